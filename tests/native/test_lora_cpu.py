"""Adapters on the cpu tier, with every instruction set, against weights with the changes added."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import slm_core as slm
from instruction_sets import every_isa
from slm_conformance.oracle.adapters import RandomAdapter, merged, random_adapter, usual_matrices
from slm_conformance.oracle.factories import WeightType, make_tiny_model
from slm_conformance.oracle.references import reference_of
from slm_conformance.oracle.weights import Weights
from slm_core.types import ContextOptions, KvType, Pos
from slm_native import _extension
from slm_native.kernels.cpu import kernels

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 250, 45)]
N_PROMPT = 40
FLOAT_BOUND = 1e-4  # clause 9 of the contract
NOISE = 1.6
"""Rounding activations to int8 adds noise in proportion to products, and the changes make their matrices larger."""


def errors(path: Path, scales: Mapping[Path, float], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    """Relative errors of logits: of a prompt, then of one token at a time, and of two tokens at once."""
    with slm.load(path, backend="native", tier="cpu", n_threads=2) as loaded:
        names = {loaded.adapters.load(adapter).name: scale for adapter, scale in scales.items()}
        options = ContextOptions(n_ctx=128, n_seq_max=2, n_batch=64, kv_type_k=KvType.F32, kv_type_v=KvType.F32)
        with loaded.model.new_context(options) as context:
            context.set_adapters(0, names)
            batch = context.new_batch()
            batch.extend(TOKENS[:N_PROMPT], Pos(0, 0), logits="all")
            rows = list(context.decode(batch).copy())
            for at in range(N_PROMPT, len(TOKENS)):
                context.fork(0, 1)
                batch.clear()
                for seq_id in range(1 + at % 2):
                    batch.add(TOKENS[at], Pos(seq_id, at), logits=True)
                rows.append(context.decode(batch)[-1].copy())
                context.drop(1)
    difference: NDArray[np.float64] = np.linalg.norm(np.array(rows) - expected, axis=1)
    return difference / np.linalg.norm(expected, axis=1)


def adapters_of(folder: Path, weights: Weights, n: int) -> list[tuple[RandomAdapter, float]]:
    """Adapters of rank 3 with scales that give sums of the same size for any number."""
    names = usual_matrices(weights)
    return [
        (random_adapter(folder / f"{i}.gguf", "llama", weights, names, i), float((-1) ** i / np.sqrt(n)))
        for i in range(n)
    ]


@pytest.mark.parametrize("n_adapters", [1, 7], ids=["rank 3", "rank 21"])
@pytest.mark.parametrize("weight_type", ["f32", "f16", "q8_0"])
@every_isa
def test_equals_merged_weights(
    weight_type: WeightType, n_adapters: int, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_available_isa", lambda _: isa)
    model = make_tiny_model("llama", weight_type)
    path, weights = model.write(tmp_path / "tiny.gguf"), Weights.of(model)
    parts = adapters_of(tmp_path, weights, n_adapters)
    expected = reference_of(merged(weights, *parts)).decode(TOKENS)
    changed = errors(path, {made.path: scale for made, scale in parts}, expected)
    if weight_type == "q8_0":
        plain = errors(path, {}, reference_of(weights).decode(TOKENS))
        assert changed.mean() < NOISE * plain.mean()
    else:
        assert changed.max() < FLOAT_BOUND
