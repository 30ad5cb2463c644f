"""A whole model on Triton kernels in the interpreter: logits as in the reference tier, with batches and edits."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.gguf import GgufFile
from slm_core.types import ContextOptions, KvType, Pos
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
    path = make_tiny_model("llama", "q8_0").write(tmp_path / "tiny.gguf")
    kernels, calls = TritonKernels("cpu"), []
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setattr(triton_kernels, name, recorded(getattr(triton_kernels, name), calls))
        triton_rows = run(path, kernels, random_tokens)
    assert set(calls) == set(KERNELS), "not all kernels ran"
    for actual, expected in zip(triton_rows, run(path, ReferenceKernels(), random_tokens), strict=True):
        assert_close(actual, expected, 5e-3)
