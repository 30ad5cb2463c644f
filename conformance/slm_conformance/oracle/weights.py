"""The weights of a model as plain arrays, from a tiny model in memory or from a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.factories import SHAPES, Architecture, ModelShape, TinyModel
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile, TensorInfo
from slm_core.modelinfo import main_weight_type
from slm_core.types import ModelSource


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The input of a forward pass.

    Attributes:
        shape: the dimensions.
        tensors: float32, by name in the file, with rows in the order of the file.
        main_type: the number format of the matrices in the file: "f32", "f16" or "q8_0".
    """

    shape: ModelShape
    tensors: Mapping[str, NDArray[np.float32]]
    main_type: str

    @lru_cache(maxsize=8)  # noqa: B019  (few models, and no test has many)
    def doubles(self) -> Mapping[str, NDArray[np.float64]]:
        """The tensors as float64."""
        return {name: values.astype(np.float64) for name, values in self.tensors.items()}

    @property
    def n_vocab(self) -> int:
        """Vocabulary size V."""
        return len(self.tensors["token_embd.weight"])

    def mtp_layer(self) -> Self:
        """The MTP layer as a model of one layer: its inputs are embedding rows, its output norm is the layer's own."""
        shape, prefix = self.shape, f"blk.{self.shape.n_layers}."
        tensors = {
            f"blk.0.{name.removeprefix(prefix)}": array
            for name, array in self.tensors.items()
            if name.startswith(prefix)
        }
        others = {name: array for name, array in self.tensors.items() if not name.startswith("blk.")}
        norm = {"output_norm.weight": tensors["blk.0.nextn.shared_head_norm.weight"]}
        return replace(self, shape=replace(shape, n_layers=1, n_mtp=0), tensors={**tensors, **others, **norm})

    def kv_bytes(self, n_tokens: int, bytes_per_number: float) -> int:
        """Bytes of the keys and values of ``n_tokens`` tokens."""
        return int(n_tokens * self.shape.n_layers * 2 * self.shape.n_kv_heads * self.shape.head_dim * bytes_per_number)

    @classmethod
    def of(cls, model: TinyModel) -> Self:
        """The weights of a tiny model, rounded as in its file. The file is not read."""
        values = {name: tensor.values() for name, tensor in model.tensors.items()}
        return cls(model.shape, values, model.tensors["token_embd.weight"].weight_type)

    @classmethod
    def read(cls, path: ModelSource) -> Self:
        """The weights of a file.

        Raises:
            InvalidModelFile: the file is damaged.
            UnsupportedModel: an architecture other than llama, qwen2 and qwen3, or a type other than F32, F16 and Q8_0.
        """
        with GgufFile.open(path) as file:
            check_readable(file)
            shape = _shape(file)
            tensors = {name: tensor_values(file, info) for name, info in file.tensors.items()}
            return cls(shape, tensors, main_weight_type(file).lower())


def check_readable(file: GgufFile) -> None:
    """Check the header of a file for ``Weights.read``.

    Raises:
        UnsupportedModel: an unknown architecture or weight type.
    """
    architecture = file.require("general.architecture", str)
    if architecture not in SHAPES:
        raise UnsupportedModel(f"{file.path}: architecture {architecture!r} (accepted: {', '.join(SHAPES)})")
    for name, info in file.tensors.items():
        if _weight_type(info) not in ("f32", "f16", "q8_0"):
            raise UnsupportedModel(f"{file.path}: tensor {name!r} is {info.ggml_type.name} (accepted: F32, F16, Q8_0)")


def _weight_type(info: TensorInfo) -> str:
    return info.ggml_type.name.lower()


def _shape(file: GgufFile) -> ModelShape:
    arch = cast("Architecture", file.require("general.architecture", str))
    n_embd, n_heads = file.require(f"{arch}.embedding_length", int), file.require(f"{arch}.attention.head_count", int)
    key = f"{arch}.rope.dimension_sections"
    n_mtp = file.get(f"{arch}.nextn_predict_layers", int, 0)
    return ModelShape(
        architecture=arch,
        n_layers=file.require(f"{arch}.block_count", int) - n_mtp,
        n_embd=n_embd,
        n_ff=file.require(f"{arch}.feed_forward_length", int),
        n_heads=n_heads,
        n_kv_heads=file.get(f"{arch}.attention.head_count_kv", int, n_heads),
        head_dim=file.get(f"{arch}.attention.key_length", int, n_embd // n_heads),
        rope_freq_base=file.get(f"{arch}.rope.freq_base", float, 1e4),
        norm_eps=file.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        tied="output.weight" not in file.tensors,
        sections=tuple(file.require(key, np.ndarray).tolist()[:3]) if key in file.metadata else (),
        n_mtp=n_mtp,
    )


def tensor_values(file: GgufFile, info: TensorInfo) -> NDArray[np.float32]:
    """A tensor of a file in F32, F16 or Q8_0."""
    return StoredTensor(info.shape, _weight_type(info), file.tensor_data(info.name).tobytes()).values()


def rope_frequencies(weights: Weights) -> NDArray[np.float64]:
    """Radians by which each pair of a head rotates per position, float64 [D/2].

    RoFormer (Su et al. 2021), divided by the frequency factors in the file, if any (Llama 3.1).
    """
    shape = weights.shape
    frequencies = shape.rope_freq_base ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    factors = weights.tensors.get("rope_freqs.weight")
    return frequencies if factors is None else frequencies / factors


def section_of_pairs(shape: ModelShape) -> NDArray[np.intp]:
    """The axis that rotates each pair of a head: time, height or width, [D/2]. Without sections in the file, time."""
    n_pairs = shape.head_dim // 2
    return np.repeat(np.arange(3), shape.sections) if shape.sections else np.zeros(n_pairs, np.intp)
