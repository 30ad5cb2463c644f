"""Weights are complete before anything reads them, even if copies to the device finish late."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.torch import kernels as torch_kernels  # noqa: E402


class LateUploader:
    """A stand-in for copies on another stream, at their latest: a tensor is zeros until ``close``."""

    def __init__(self, device: torch.device) -> None:
        self._pending: list[tuple[torch.Tensor, np.ndarray]] = []

    def upload(self, data: np.ndarray) -> torch.Tensor:
        target = torch.zeros(len(data), dtype=torch.uint8)
        self._pending.append((target, data))
        return target

    def close(self) -> None:
        for target, data in self._pending:
            target.copy_(torch.from_numpy(data.copy()))
        self._pending.clear()


def logits(path, tier: str) -> np.ndarray:
    options = ModelOptions(device="cpu", backend_options={"tier": tier})
    with NativeBackend().load(path, options) as model, model.new_context(ContextOptions(64)) as context:
        batch = context.new_batch()
        batch.extend([5, 9, 70, 3, 200], Pos(0, 0), logits="all")
        return context.decode(batch).copy()


@pytest.mark.parametrize("family", ["lfm2", "mamba", "mamba2", "rwkv7", "gemma4", "qwen3"])
def test_no_weight_is_read_before_it_arrived(tmp_path, monkeypatch, assert_close, family):
    """Convolutions are transposed while loading, and a scale may be multiplied: they must not be read too early."""
    path = family_model(tmp_path, family)
    expected = logits(path, "reference")
    monkeypatch.setattr(torch_kernels, "Uploader", LateUploader)
    assert_close(logits(path, "torch"), expected, 1e-5)
