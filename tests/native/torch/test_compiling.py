"""Weights dequantized through torch.compile: the same numbers, and an error if torch cannot compile.

The default backend of torch.compile takes seconds per type, so these tests use only the front end (Dynamo). A graph
break is an error.
"""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType
from slm_core.types import ContextOptions, ModelOptions
from slm_native.backend import NativeBackend

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.torch import compiling  # noqa: E402
from slm_native.kernels.torch.unpack import unpack  # noqa: E402


@pytest.fixture(autouse=True)
def eager_backend(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    compiling._compiled.cache_clear()
    yield
    compiling._compiled.cache_clear()


@pytest.mark.parametrize("ggml_type", [GgmlType.Q4_K, GgmlType.IQ2_XXS, GgmlType.MXFP4], ids=lambda t: t.name)
def test_compiled_dequantization_equals_the_steps(ggml_type):
    """Formats with neither grid nor table, with a grid, and with a table."""
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 60, (70, 3 * ggml_type.block_bytes), np.uint8))
    compiling.check_compiles(rows, ggml_type, torch.float16)
    for part in (rows, rows[3:5], rows[:1]):
        actual = compiling.unpack_compiled(part, ggml_type, torch.float16)
        assert actual.dtype == torch.float16
        np.testing.assert_array_equal(actual.numpy(), unpack(part, ggml_type).half().numpy())


def load(path):
    path.with_name("p.toml").write_text("compile = true\n")
    options = {"tier": "torch", "profile": str(path.with_name("p.toml"))}
    return NativeBackend().load(path, ModelOptions(device="cpu", backend_options=options))


def test_logits_equal_those_without_compile(tmp_path, feed, random_tokens, monkeypatch):
    path, tokens = make_tiny_model("llama", "q8_0").write(tmp_path / "tiny.gguf"), random_tokens(40)
    with load(path) as model, model.new_context(ContextOptions(64)) as context:
        n_compiled = compiling._compiled.cache_info().currsize
        assert n_compiled >= 1, "loading the model compiled nothing"
        logits = feed(context, tokens)
        assert compiling._compiled.cache_info().currsize == n_compiled, "a step compiled something"
        assert "torch.compile" in model._transformer._kernels.describe()
    plain = NativeBackend().load(path, ModelOptions(device="cpu", backend_options={"tier": "torch"}))
    with plain, plain.new_context(ContextOptions(64)) as context:
        np.testing.assert_array_equal(logits, feed(context, tokens))


def test_a_broken_compiler_is_an_error_at_load(tmp_path, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here\nand no second line")

    monkeypatch.setattr(compiling, "BACKEND", broken)
    path = make_tiny_model("llama").write(tmp_path / "tiny.gguf")
    with pytest.raises(
        InvalidOption, match=r"compile=true: torch.compile does not work on cpu: .*no compiler here"
    ) as caught:
        load(path)
    assert "\n" not in str(caught.value)
