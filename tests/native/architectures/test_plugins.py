"""An architecture from a plugin runs as one that is built in; a name can be given once."""

from __future__ import annotations

import types

import pytest

from slm_conformance.factories import make_tiny_model
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
from slm_core.types import ContextOptions


def my_spec(keys: Keys) -> ModelSpec:
    """A qwen3 by another name, with a window."""
    sizes = read_sizes(keys)
    block = tables.llama_block(sizes) | tables.norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    layer = LayerSpec(block, rope, window=keys.count("my_window", 0) or None, activation=Activation.SILU)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)


@pytest.fixture
def provide(monkeypatch):
    """Adds a plugin that provides an architecture of that name."""

    def add(name: str) -> None:
        module = types.ModuleType("a_plugin")
        module.slm_architectures = hookimpl(lambda: (Entry(name, my_spec),))
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
        with load(tiny.write(tmp_path / "m.gguf")).new_context(ContextOptions(n_ctx=64)) as context:
            rows.append(feed(context, tokens))
    plain, same, windowed = rows
    assert_close(same, plain, 1e-6)
    assert_close(windowed[:20], plain[:20], 1e-6)
    assert abs(windowed[20:] - plain[20:]).max() > 0.1, "the window matters"


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
