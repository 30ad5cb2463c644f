"""A whole model on Triton kernels in the interpreter: logits as in the reference tier, with batches and edits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.gguf import GgmlType, GgufFile
from slm_core.quant import QuantizedTensor, dequantize, format_of
from slm_core.types import ContextOptions, KvType, Pos
from slm_native.kernels.parameters import Linear
from slm_native.kernels.reference import ReferenceKernels
from slm_native.model import NativeModel

pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
pytest.importorskip("triton", reason="kernels for CUDA are tested in Triton's interpreter: pip install triton")

from slm_native.kernels.torch.triton import kernels as triton_kernels
from slm_native.kernels.torch.triton.kernels import TritonKernels

KERNELS = ["few_rows", "many_rows", "attend_decoding", "norm_rope_and_store", "norm_and_rope", "silu_mul", "rms_norm"]


def recorded(kernel, calls: list[str]):
    """A kernel wrapper that records its name at each call."""

    def call(*args, **named):
        calls.append(kernel.__name__)
        return kernel(*args, **named)

    return call


def run(path, kernels, random_tokens) -> list[np.ndarray]:
    """Logits of prefills in batches with single tokens, before and after a cut and a fork."""
    rows = []
    with NativeModel(GgufFile.open(path), kernels, lambda share: None) as model:
        context = model.new_context(ContextOptions(256, 3, 64, KvType.F16, KvType.Q8_0))
        for step, plan in enumerate([{0: 10}, {0: 1, 1: 2}, {0: 1, 1: 1, 2: 1}]):
            batch = context.new_batch()
            for seq_id, n in plan.items():
                tokens = random_tokens(n, seed=10 * step + seq_id)
                batch.extend(tokens, Pos(seq_id, context.length(seq_id)), logits="all")
            rows.append(context.decode(batch).copy())
            if step == 1:
                context.cut(Pos(0, 2), Pos(0, 5))
                context.drop(2)
                context.fork(0, 2, 6)
    return rows


def test_logits_equal_the_reference(tmp_path, random_tokens, assert_close):
    """Other orders of float32 sums may change the last bit of keys in f16 and q8_0. All paths of ``matmul`` run."""
    path = make_tiny_model("narrow_llama", "q8_0").write(tmp_path / "tiny.gguf")
    kernels, calls = TritonKernels("cpu"), []
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setattr(triton_kernels, name, recorded(getattr(triton_kernels, name), calls))
        triton_rows = run(path, kernels, random_tokens)
    assert set(calls) == set(KERNELS), "not all kernels ran"
    for actual, expected in zip(triton_rows, run(path, ReferenceKernels(), random_tokens), strict=True):
        assert_close(actual, expected, 5e-3)


def test_a_step_launches_few_kernels(tmp_path, random_tokens):
    """Seven for a layer: two norms; queries, keys and values; attention, which applies RoPE and writes keys and values;
    gate, up and the activation; two products that add to the residual.
    """
    from triton.runtime.interpreter import InterpretedFunction

    path, launched = make_tiny_model("narrow_llama", "q8_0").write(tmp_path / "tiny.gguf"), []
    with (
        NativeModel(GgufFile.open(path), TritonKernels("cpu"), lambda share: None) as model,
        model.new_context(ContextOptions(256, 3, 64, KvType.F16, KvType.F16)) as context,
    ):
        batch = context.new_batch()
        batch.add(7, Pos(0, 0), logits=True)
        context.decode(batch)
        with pytest.MonkeyPatch.context() as patch:
            launch = InterpretedFunction.__getitem__

            def recording_launch(self, grid):
                launched.append(self.fn.__name__)
                return launch(self, grid)

            patch.setattr(InterpretedFunction, "__getitem__", recording_launch)
            batch.clear()
            batch.add(8, Pos(0, 1), logits=True)
            context.decode(batch)
        n_layers = model.info.n_layers
    of_layers = {"_normed": 2, "_few_rows": 4, "_attend_pages": 1}
    outside = {"_dequantized": 1, "_normed": 1, "_few_rows": 1}
    assert Counter(launched) == Counter({name: n * n_layers for name, n in of_layers.items()}) + Counter(outside)


def test_joined_matrices_give_the_products_of_each(assert_close):
    """Queries, keys and values of unequal heights, one with a bias, in products of few, of many and of most rows."""
    rng, kernels = np.random.default_rng(1), TritonKernels("cpu", "float32")
    blocks = format_of(GgmlType.Q8_0).block
    linears, apart = [], []
    for n_out, has_bias in ((96, False), (32, True), (40, False)):
        data = rng.integers(0, 256, n_out * 3 * 34, np.uint8)
        data.view(blocks)["scale"] = rng.uniform(-0.1, 0.1, n_out * 3)
        tensor = QuantizedTensor("w", (n_out, 96), GgmlType.Q8_0, data)
        bias = rng.standard_normal(n_out, np.float32) if has_bias else None
        linears.append(Linear(kernels.prepare(tensor), None, None if bias is None else kernels.from_host(bias)))
        apart.append((dequantize(data, GgmlType.Q8_0, (n_out, 96)).astype(np.float64), 0 if bias is None else bias))
    for n_rows in (1, 3, 20, 130, 1):
        x = rng.standard_normal((n_rows, 96), np.float32)
        products = kernels.project(kernels.from_host(x), None, linears)
        for actual, (weights, bias) in zip(products, apart, strict=True):
            assert_close(kernels.to_host(actual), (x @ weights.T + bias).astype(np.float32), 1e-5)
        for linear, (weights, bias) in zip(linears, apart, strict=True):  # each matrix still serves alone
            alone = kernels.to_host(kernels.linear(kernels.from_host(x), linear))
            assert_close(alone, (x @ weights.T + bias).astype(np.float32), 1e-5)
    packed = [linear.weight.packed for linear in linears]
    assert len({part.untyped_storage().data_ptr() for part in packed}) == 1, "the matrices are in memory twice"


def test_wide_heads_may_be_left_to_torch(tmp_path, random_tokens, assert_close, monkeypatch):
    """As on devices with too little shared memory for the kernel."""
    path = make_tiny_model("narrow_llama", "q8_0").write(tmp_path / "tiny.gguf")
    kernels = TritonKernels("cpu")
    kernels._widest = 8
    monkeypatch.setattr(triton_kernels, "attend_decoding", lambda *args, **named: pytest.fail("the kernel was used"))
    for actual, expected in zip(
        run(path, kernels, random_tokens), run(path, ReferenceKernels(), random_tokens), strict=True
    ):
        assert_close(actual, expected, 5e-3)
