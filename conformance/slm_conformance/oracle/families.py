"""Tiny random models of every architecture: metadata from a table, tensors as the architecture declares them.

Head counts are odd, no tensor is zero or symmetric, and all widths differ if the architecture allows it. The
declaration gives names and shapes only. To check what an engine computes, compare it with another engine.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.factories import WeightType, n_vocab, tokenizer_metadata
from slm_conformance.oracle.family_table import ENCODERS, FAMILIES, SMALL, Family
from slm_conformance.oracle.gguf_writer import StoredTensor, Value, write_gguf
from slm_core.architectures import EMBEDDING, TensorSpec, read_spec
from slm_core.gguf import GgufFile

OUTPUT = "output.weight"
_OUTSIDE = ("rope", "dense", "token_types")  # prefixes of the names of tensors outside of blocks
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}


def family_model(directory: Path, name: str, weight_type: WeightType = "f32", seed: int = 0) -> Path:
    """Write a tiny model into ``directory``; returns its file.

    Args:
        directory: an existing directory.
        name: the name of the family, a key of ``FAMILIES``, ``ENCODERS`` or ``SMALL``.
        weight_type: the number format of the matrices; norms, biases, routers and rows that are no whole number of
            blocks are float32.
        seed: the seed of the weights; equal arguments give equal bytes.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    tensors = {
        tensor: StoredTensor.pack(
            _random(rng, tensor, shape, family_of(name).quiet), _stored(tensor, shape, weight_type)
        )
        for tensor, shape in family_tensors(name).items()
    }
    return write_family(directory / f"{name}-{weight_type}-{seed}.gguf", name, tensors, weight_type)


def write_family(path: Path, name: str, tensors: Mapping[str, StoredTensor], weight_type: WeightType = "f32") -> Path:
    """Write the file of a family with these tensors; returns ``path``."""
    return write_gguf(path, _metadata(family_of(name), weight_type), tensors)


def family_tensors(name: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a family's file and their shapes, rows first."""
    family = family_of(name)
    return {tensor: spec.shape for tensor, spec in _declared(family) if _is_present(tensor, spec, family)}


def family_of(name: str) -> Family:
    """The family of this name."""
    return (ENCODERS | FAMILIES | SMALL)[name]


def _declared(family: Family) -> Iterator[tuple[str, TensorSpec]]:
    """All tensors of the architecture, read from a file with the metadata and tensors of one number."""
    embedding = (n_vocab(), int(str(family.metadata["embedding_length"])))
    hints = {
        hint if hint.startswith(_OUTSIDE) or "." in hint.split("_", 1)[0] else f"blk.0.{hint}": (1,)
        for hint in family.optional
    }
    stubs = {tensor: StoredTensor.pack(np.zeros(shape, np.float32), "f32") for tensor, shape in hints.items()}
    stubs[EMBEDDING] = StoredTensor.pack(np.zeros(embedding, np.float32), "f32")
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "stub.gguf", _metadata(family, "f32"), stubs)
        with GgufFile.open(path) as file:
            yield from read_spec(file).tensors()


def _is_present(tensor: str, spec: TensorSpec, family: Family) -> bool:
    name_in_block = tensor.split(".", 2)[-1] if tensor.startswith("blk.") else tensor
    return (
        spec.required
        or not {tensor, name_in_block}.isdisjoint(family.optional)
        or (tensor == OUTPUT and not family.tied)
    )


def _metadata(family: Family, weight_type: WeightType) -> dict[str, Value]:
    return {
        "general.architecture": family.architecture,
        "general.name": "tiny random model",  # not the name of a family: llama.cpp searches this name for some families
        "general.file_type": _FILE_TYPES[weight_type],
        **{f"{family.architecture}.{key}": value for key, value in family.metadata.items()},
        **family.plain,
        **tokenizer_metadata(family.architecture),
    }


def _stored(name: str, shape: tuple[int, ...], weight_type: WeightType) -> WeightType:
    is_matrix = len(shape) > 1 and "norm" not in name and "ffn_gate_inp" not in name and not name.endswith("bias")
    has_odd_rows = weight_type == "q8_0" and shape[-1] % 32 != 0  # rows that are no whole number of blocks stay F32
    return weight_type if is_matrix and not has_odd_rows else "f32"


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], quiet: tuple[str, ...]) -> NDArray[np.float32]:
    """Weights with which each part changes the logits: peaked attention, norms other than 1, biases other than 0."""
    if name.startswith("rope_f"):
        return rng.uniform(1, 4, shape).astype(np.float32)
    values = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("ssm_a"):  # decay rates; a state grows without bound if they have the other sign
        return -np.exp(values)
    if ("norm" in name or "output_scale" in name) and name.endswith("weight"):
        return (1 + np.float32(0.2) * values) * np.float32(0.25 if name.split(".")[-2] in quiet else 1)
    if len(shape) == 1:
        return np.float32(0.5) * values
    scale = 2.5 if name in (EMBEDDING, "output.weight") else 1.6 if "attn_q" in name or "attn_k" in name else 1.0
    return values * np.float32(scale / np.sqrt(shape[-1]))
