"""A whole model on Triton's kernels, in the interpreter: the reference tier's logits, batches and edits included."""

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

STEPS = ["few_rows", "many_rows", "attend_decoding", "norm_rope_and_store", "norm_and_rope", "silu_mul", "rms_norm"]


def noted(step, calls: list[str]):
    """A step that leaves its name where it was called."""

    def call(*args, **named):
        calls.append(step.__name__)
        return step(*args, **named)

    return call


def run(path, kernels, random_tokens) -> list[np.ndarray]:
    """Prefills of two lengths, single tokens of three sequences beside them, after a fork and a cut."""
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


def test_logits_are_those_of_the_reference(tmp_path, random_tokens, assert_close):
    """Float32 sums in other orders, and keys whose last digit in f16 or q8_0 they tip; all paths of ``matmul``."""
    path = make_tiny_model("llama", "q8_0").write(tmp_path / "tiny.gguf")
    kernels, calls = TritonKernels("cpu"), []
    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(triton_kernels, name, noted(getattr(triton_kernels, name), calls))
        found = run(path, kernels, random_tokens)
    assert set(calls) == set(STEPS), "not all kernels ran"
    for mine, wanted in zip(found, run(path, ReferenceKernels(), random_tokens), strict=True):
        assert_close(mine, wanted, 5e-3)
