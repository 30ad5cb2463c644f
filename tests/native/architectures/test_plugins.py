"""An architecture from a plugin runs like a built-in one; its name must be new."""

from __future__ import annotations

import types
from dataclasses import replace

import numpy as np
import pytest

from native.exact import exact
from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_core import plugins
from slm_core.architectures import (
    Activation,
    Keys,
    LayerSpec,
    ModelSpec,
    RopeStyle,
    architecture_names,
    decoder_spec,
    read_rope,
    read_sizes,
    tables,
)
from slm_core.errors import PluginError, UnsupportedModel
from slm_core.hookspecs import Entry, hookimpl
from slm_core.types import Pos


def my_spec(keys: Keys) -> ModelSpec:
    """A qwen3 with another name and a sliding window."""
    sizes = read_sizes(keys)
    block = tables.llama_block(sizes) | tables.norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    layer = LayerSpec(block, rope, window=keys.count("my_window", 0) or None, activation=Activation.SILU)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)


def varied_spec(keys: Keys) -> ModelSpec:
    """A llama whose second layer has one KV head, and heads half as wide."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    each = [sizes, replace(sizes, n_kv_heads=1, head_dim=sizes.head_dim // 2), *[sizes] * (sizes.n_layers - 2)]
    layers = [
        LayerSpec(
            tables.llama_block(layer_sizes),
            replace(rope, n_dims=layer_sizes.head_dim),
            n_kv_heads=layer_sizes.n_kv_heads,
            head_dim=layer_sizes.head_dim,
        )
        for layer_sizes in each
    ]
    return decoder_spec(keys, sizes, layers)


@pytest.fixture
def provide(monkeypatch):
    """Adds a plugin that provides an architecture with the given name."""

    def add(name: str, spec=my_spec) -> None:
        module = types.ModuleType("a_plugin")
        module.slm_architectures = hookimpl(lambda: (Entry(name, spec),))
        registry = plugins.Registry({"theirs": module})
        monkeypatch.setattr(plugins, "registry", lambda: registry)

    return add


def as_architecture(name: str, **extra: int):
    tiny = make_tiny_model("qwen3")
    renamed = {key.replace("qwen3.", f"{name}."): value for key, value in tiny.metadata.items()}
    tiny.metadata.clear()
    tiny.metadata.update(renamed | {"general.architecture": name} | {f"{name}.{k}": v for k, v in extra.items()})
    return tiny


def test_a_plugin_architecture_runs(tmp_path, provide, load, feed, random_tokens, assert_close):
    provide("my-qwen")
    assert {"my-qwen", "llama"} <= set(architecture_names())
    tokens, rows = random_tokens(60), []
    for tiny in (make_tiny_model("qwen3"), as_architecture("my-qwen"), as_architecture("my-qwen", my_window=20)):
        with load(tiny.write(tmp_path / "m.gguf")).new_context(exact(n_ctx=64)) as context:
            rows.append(feed(context, tokens))
    plain, same, windowed = rows
    assert_close(same, plain, 1e-6)
    assert_close(windowed[:20], plain[:20], 1e-6)
    assert abs(windowed[20:] - plain[20:]).max() > 0.1, "the window changes the logits"


def test_layers_of_a_plugin_may_have_different_heads(tmp_path, provide, tier, load, feed, random_tokens, assert_close):
    """Also in tiers that fuse layers into one call."""
    provide("varied", varied_spec)
    tiny, rng = as_architecture("varied"), np.random.default_rng(0)
    for name in [name for name in tiny.tensors if "attn_q_norm" in name or "attn_k_norm" in name]:
        del tiny.tensors[name]
    n_q, n_embd = tiny.shape.n_heads * tiny.shape.head_dim // 2, tiny.shape.n_embd
    shapes = {"q": (n_q, n_embd), "k": (tiny.shape.head_dim // 2, n_embd), "v": (tiny.shape.head_dim // 2, n_embd)}
    for name, shape in (shapes | {"output": (n_embd, n_q)}).items():
        values = rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
        tiny.tensors[f"blk.1.attn_{name}.weight"] = StoredTensor.pack(values, "f32")
    path, tokens, rows = tiny.write(tmp_path / "m.gguf"), random_tokens(100), []
    for name in ("reference", tier):
        with load(path, name).new_context(exact(n_ctx=128)) as context:
            prompt_logits = [feed(context, tokens[:80])]
            context.cut(Pos(0, 10), Pos(0, 33))
            rows.append(np.concatenate([*prompt_logits, feed(context, tokens[80:], chunk=1)]))
    assert_close(rows[1], rows[0], 1e-4)


def test_keys_that_a_plugin_does_not_read_are_refused(tmp_path, provide, load):
    provide("my-qwen")
    with pytest.raises(UnsupportedModel, match=r"'my-qwen\.my_number' is 3"):
        load(as_architecture("my-qwen", my_number=3).write(tmp_path / "m.gguf"))


def test_plugins_cannot_replace_a_built_in_architecture(tmp_path, provide, load):
    provide("qwen3")
    with pytest.raises(PluginError, match="'qwen3', which slm_core has"):
        load(make_tiny_model("qwen3").write(tmp_path / "m.gguf"))


def test_plugin_names_that_no_file_can_have_are_refused(provide):
    with pytest.raises(PluginError, match="My Qwen"):
        provide("My Qwen")
