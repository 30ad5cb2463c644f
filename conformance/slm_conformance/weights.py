"""A model's weights as plain arrays: from a tiny model in memory, or from a GGUF file of the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from slm_conformance.factories import SHAPES, ModelShape, TinyModel
from slm_conformance.gguf_writer import StoredTensor
from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile, TensorInfo
from slm_core.modelinfo import main_weight_type


@dataclass(frozen=True, slots=True)
class Weights:
    """What a forward pass needs.

    Attributes:
        shape: the dimensions.
        tensors: float32, by name in the file, in the file's order of rows.
        main_type: how the file stores its matrices: "f32", "f16" or "q8_0".
    """

    shape: ModelShape
    tensors: Mapping[str, NDArray[np.float32]]
    main_type: str

    @property
    def n_vocab(self) -> int:
        """Vocabulary size V."""
        return len(self.tensors["token_embd.weight"])

    @classmethod
    def of(cls, model: TinyModel) -> Self:
        """The weights of a tiny model, as its file rounds them; the file is not read."""
        values = {name: tensor.values() for name, tensor in model.tensors.items()}
        return cls(model.shape, values, model.tensors["token_embd.weight"].weight_type)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The weights of a file.

        Raises:
            InvalidModelFile: the file is damaged.
            UnsupportedModel: an architecture other than llama, qwen2 and qwen3, or a type other than F32, F16 and Q8_0.
        """
        with GgufFile.open(path) as file:
            shape = _shape(file)
            tensors = {name: _values(file, info) for name, info in file.tensors.items()}
            return cls(shape, tensors, main_weight_type(file).lower())


def _shape(file: GgufFile) -> ModelShape:
    arch = file.require("general.architecture", str)
    if arch not in SHAPES:
        raise UnsupportedModel(f"{file.path}: architecture {arch!r} (accepted: {', '.join(SHAPES)})")
    n_embd, n_heads = file.require(f"{arch}.embedding_length", int), file.require(f"{arch}.attention.head_count", int)
    return ModelShape(
        architecture=arch,
        n_layers=file.require(f"{arch}.block_count", int),
        n_embd=n_embd,
        n_ff=file.require(f"{arch}.feed_forward_length", int),
        n_heads=n_heads,
        n_kv_heads=file.get(f"{arch}.attention.head_count_kv", int, n_heads),
        head_dim=file.get(f"{arch}.attention.key_length", int, n_embd // n_heads),
        rope_freq_base=file.get(f"{arch}.rope.freq_base", float, 1e4),
        norm_eps=file.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        tied="output.weight" not in file.tensors,
    )


def _values(file: GgufFile, info: TensorInfo) -> NDArray[np.float32]:
    weight_type = info.ggml_type.name.lower()
    if weight_type not in ("f32", "f16", "q8_0"):
        raise UnsupportedModel(f"{file.path}: tensor {info.name!r} is {weight_type} (accepted: f32, f16, q8_0)")
    return StoredTensor(info.shape, weight_type, file.tensor_data(info.name).tobytes()).values()


def rope_frequencies(weights: Weights) -> NDArray[np.float64]:
    """Radians that each pair of a head turns per position, float64 [D/2].

    RoFormer (Su et al. 2021), divided by the file's frequency factors where it has them (Llama 3.1).
    """
    shape = weights.shape
    frequencies = shape.rope_freq_base ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    factors = weights.tensors.get("rope_freqs.weight")
    return frequencies if factors is None else frequencies / factors
