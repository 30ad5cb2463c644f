"""An architecture from a plugin runs as one that is built in; a name can be given once."""

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
    """A qwen3 by another name, with a window."""
    sizes = read_sizes(keys)
    block = tables.llama_block(sizes) | tables.norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    layer = LayerSpec(block, rope, window=keys.count("my_window", 0) or None, activation=Activation.SILU)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)


def varied_spec(keys: Keys) -> ModelSpec:
    """A llama whose second layer has one key head, and heads half as wide."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    each = [sizes, replace(sizes, n_kv_heads=1, head_dim=sizes.head_dim // 2), *[sizes] * (sizes.n_layers - 2)]
    layers = [
        LayerSpec(
            tables.llama_block(own),
            replace(rope, n_dims=own.head_dim),
            n_kv_heads=own.n_kv_heads,
            head_dim=own.head_dim,
        )
        for own in each
    ]
    return decoder_spec(keys, sizes, layers)


@pytest.fixture
def provide(monkeypatch):
    """Adds a plugin that provides an architecture of that name."""

    def add(name: str, spec=my_spec) -> None:
        module = types.ModuleType("a_plugin")
        module.slm_architectures = hookimpl(lambda: (Entry(name, spec),))
        whole = plugins.Registry({"theirs": module})
        monkeypatch.setattr(plugins, "registry", lambda: whole)

    return add


def as_architecture(name: str, **further: int):
    tiny = make_tiny_model("qwen3")
    renamed = {key.replace("qwen3.", f"{name}."): value for key, value in tiny.metadata.items()}
    tiny.metadata.clear()
    tiny.metadata.update(renamed | {"general.architecture": name} | {f"{name}.{k}": v for k, v in further.items()})
    return tiny


def test_an_architecture_of_a_plugin_runs(tmp_path, provide, load, feed, random_tokens, assert_close):
    provide("my-qwen")
    assert {"my-qwen", "llama"} <= set(architecture_names())
    tokens, rows = random_tokens(60), []
    for tiny in (make_tiny_model("qwen3"), as_architecture("my-qwen"), as_architecture("my-qwen", my_window=20)):
        with load(tiny.write(tmp_path / "m.gguf")).new_context(exact(n_ctx=64)) as context:
            rows.append(feed(context, tokens))
    plain, same, windowed = rows
    assert_close(same, plain, 1e-6)
    assert_close(windowed[:20], plain[:20], 1e-6)
    assert abs(windowed[20:] - plain[20:]).max() > 0.1, "the window matters"


def test_layers_of_a_plugin_may_differ_in_their_heads(tmp_path, provide, tier, load, feed, random_tokens, assert_close):
    """In one call too, where the tier runs such blocks in one: all but the last."""
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
            found = [feed(context, tokens[:80])]
            context.cut(Pos(0, 10), Pos(0, 33))
            rows.append(np.concatenate([*found, feed(context, tokens[80:], chunk=1)]))
    assert_close(rows[1], rows[0], 1e-4)


def test_a_key_that_a_plugin_does_not_read_is_refused(tmp_path, provide, load):
    provide("my-qwen")
    with pytest.raises(UnsupportedModel, match=r"'my-qwen\.my_number' is 3"):
        load(as_architecture("my-qwen", my_number=3).write(tmp_path / "m.gguf"))


def test_an_architecture_that_there_is_cannot_be_provided(tmp_path, provide, load):
    provide("qwen3")
    with pytest.raises(PluginError, match="'qwen3', which slm_core has"):
        load(make_tiny_model("qwen3").write(tmp_path / "m.gguf"))


def test_a_name_that_no_file_has_is_refused(provide):
    with pytest.raises(PluginError, match="My Qwen"):
        provide("My Qwen")
