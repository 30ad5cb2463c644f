"""Random adapters (LoRA) as GGUF files, and models with their changes added to the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.gguf_writer import StoredTensor, write_gguf
from slm_conformance.oracle.weights import Weights

KINDS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""The matrices of a block that every backend with adapters can change."""
_RANK, _ALPHA = 3, 6.0
_SHARE = 0.5  # of a change's root mean square in that of the matrix


@dataclass(frozen=True, slots=True, eq=False)
class RandomAdapter:
    """An adapter, and the sums that it adds to tensors.

    Attributes:
        path: its file.
        changes: float32 (out, in), by the tensor's name.
    """

    path: Path
    changes: Mapping[str, NDArray[np.float32]]


def random_adapter(path: Path, architecture: str, weights: Weights, names: Sequence[str], seed: int) -> RandomAdapter:
    """Write an adapter that changes the named matrices."""
    rng, tensors, changes = np.random.default_rng([7, seed]), {}, {}
    for name in names:
        matrix = weights.tensors[name]
        b, a = (
            rng.normal(size=shape).astype(np.float32) for shape in ((matrix.shape[0], _RANK), (_RANK, matrix.shape[1]))
        )
        b *= np.float32(_SHARE * matrix.std() / np.std(b @ a * (_ALPHA / _RANK)))
        changes[name] = b @ a * np.float32(_ALPHA / _RANK)
        stored = (b, a.T) if name == "token_embd.weight" else (a, b)
        for part, values in zip("ab", stored, strict=True):
            tensors[f"{name}.lora_{part}"] = StoredTensor.pack(np.ascontiguousarray(values), "f32")
    write_gguf(path, adapter_metadata(architecture), tensors)
    return RandomAdapter(path, changes)


def usual_matrices(weights: Weights) -> list[str]:
    """The matrices of ``KINDS``."""
    return sorted(name for name in weights.tensors if name.removesuffix(".weight").rpartition(".")[2] in KINDS)


def adapter_metadata(architecture: str) -> dict[str, str | float]:
    """The metadata of an adapter's file."""
    return {
        "general.type": "adapter",
        "general.architecture": architecture,
        "adapter.type": "lora",
        "adapter.lora.alpha": _ALPHA,
    }


def merged(weights: Weights, *parts: tuple[RandomAdapter, float]) -> Weights:
    """The model with the changes of adapters, each with its scale, added to its weights."""
    tensors = dict(weights.tensors)
    for adapter, scale in parts:
        for name, change in adapter.changes.items():
            tensors[name] = tensors[name] + np.float32(scale) * change
    return dataclasses.replace(weights, tensors=tensors)
