"""Random adapters (LoRA, control vectors) as GGUF files, and models with their changes added to the weights."""

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
_SHARE = 0.5  # root mean square of a change, relative to that of its matrix


@dataclass(frozen=True, slots=True, eq=False)
class RandomAdapter:
    """An adapter, and the sums that it adds to tensors.

    Attributes:
        path: its file.
        changes: float32 (out, in), by the tensor's name; of a control vector float32 [E], by ``direction_name``.
    """

    path: Path
    changes: Mapping[str, NDArray[np.float32]]


def adapter_name(seed: int) -> str:
    """The name of a random adapter in the suite's models."""
    return f"random {seed}"


def control_vector_name(seed: int) -> str:
    """The name of a random control vector in the suite's models."""
    return f"vector {seed}"


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


def random_control_vector(path: Path, weights: Weights, seed: int) -> RandomAdapter:
    """Write a control vector with a direction for every layer but the first."""
    rng, n_embd = np.random.default_rng([8, seed]), weights.shape.n_embd
    directions = {layer: rng.normal(size=n_embd).astype(np.float32) for layer in range(1, weights.shape.n_layers)}
    tensors = {f"direction.{layer}": StoredTensor.pack(values, "f32") for layer, values in directions.items()}
    write_gguf(path, control_vector_metadata(), tensors)
    return RandomAdapter(path, {direction_name(layer): values for layer, values in directions.items()})


def direction_name(layer: int) -> str:
    """The name in ``Weights`` of a direction that is added to the residual stream after a layer."""
    return f"blk.{layer}.direction"


def control_vector_metadata() -> dict[str, str | float]:
    """The metadata of a control vector's file."""
    return {"general.architecture": "controlvector", "controlvector.model_hint": "llama"}


def usual_matrices(weights: Weights) -> list[str]:
    """The names of the matrices of ``KINDS``, sorted."""
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
            scaled = np.float32(scale) * change
            tensors[name] = tensors[name] + scaled if name in tensors else scaled
    return dataclasses.replace(weights, tensors=tensors)
