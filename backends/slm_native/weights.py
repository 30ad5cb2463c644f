"""The tensors of a model: checked against its spec, then prepared for a kernel set."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile, TensorInfo
from slm_core.gguf.cursor import shown
from slm_native.kernels import FloatArray, KernelSet, Weight
from slm_native.quant import supported_types
from slm_native.spec import ModelSpec
from slm_native.tensor import QuantizedTensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix and what its product is scaled by and shifted by."""

    weight: Weight  # (out, in)
    scale: FloatArray | None  # [1]
    bias: FloatArray | None  # [out]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The weights of one transformer block."""

    attn_norm: FloatArray  # [E]
    attn_q: Linear  # (H*D, E)
    attn_k: Linear  # (K*D, E)
    attn_v: Linear  # (K*D, E)
    attn_q_norm: FloatArray | None  # [D]
    attn_k_norm: FloatArray | None  # [D]
    attn_output: Linear  # (E, H*D)
    ffn_norm: FloatArray  # [E]
    ffn_gate: Linear  # (F, E)
    ffn_up: Linear  # (F, E)
    ffn_down: Linear  # (E, F)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights outside the blocks; blocks come from ``WeightReader.block``."""

    token_embd: Weight  # (V, E)
    rope_freqs: FloatArray | None  # [R/2]
    output_norm: FloatArray  # [E]
    output: Linear  # (V, E)


def check_tensors(gguf: GgufFile, spec: ModelSpec) -> None:
    """Compare a file's tensors with what the model must have and may have; the directory alone is read.

    Raises:
        InvalidModelFile: a tensor is missing or has the wrong shape.
        UnsupportedModel: a tensor of a type that cannot be read, or one that the architecture does not have.
    """
    known = set()
    for name, wanted in spec.tensors():
        known.add(name)
        if name not in gguf.tensors:
            if wanted.required:
                raise InvalidModelFile(f"{gguf.path}: tensor {name!r} of shape {wanted.shape} is missing")
            continue
        tensor = gguf.tensors[name]
        if tensor.shape != wanted.shape:
            raise InvalidModelFile(f"{gguf.path}: tensor {name!r} has the shape {tensor.shape}, not {wanted.shape}")
        if wanted.used:
            _check_type(gguf, tensor)
        else:
            _log.info("%s: tensor %r changes nothing here", gguf.path, name)
    for name in gguf.tensors:
        if name not in known:
            raise UnsupportedModel(
                f"{gguf.path}: tensor {shown(name)} is not one that {spec.architecture} models have, as far as the"
                " native engine knows them, so results could be wrong"
            )


def _check_type(gguf: GgufFile, tensor: TensorInfo) -> None:
    if tensor.ggml_type not in supported_types():
        accepted = ", ".join(ggml_type.name for ggml_type in supported_types())
        raise UnsupportedModel(
            f"{gguf.path}: tensor {tensor.name!r} is of type {tensor.ggml_type.name} (accepted: {accepted})"
        )


class WeightReader:
    """Prepares the weights of a file that ``check_tensors`` has accepted.

    Args:
        gguf: the file.
        kernels: who will use the weights.
    """

    def __init__(self, gguf: GgufFile, kernels: KernelSet) -> None:
        self._gguf = gguf
        self._kernels = kernels

    def model(self) -> Weights:
        """The weights outside the blocks."""
        token_embd = self._kernels.prepare(self._tensor("token_embd.weight"))
        tied = "output.weight" not in self._gguf.tensors
        return Weights(
            token_embd=token_embd,
            rope_freqs=self._vector("rope_freqs.weight"),
            output_norm=self._norm("output_norm"),
            output=Linear(token_embd, None, None) if tied else self._linear("output"),
        )

    def blocks(self, n_layers: int) -> Iterator[Block]:
        """The blocks, prepared one at a time."""
        for layer in range(n_layers):
            prefix = f"blk.{layer}."
            yield Block(
                attn_norm=self._norm(f"{prefix}attn_norm"),
                attn_q=self._linear(f"{prefix}attn_q"),
                attn_k=self._linear(f"{prefix}attn_k"),
                attn_v=self._linear(f"{prefix}attn_v"),
                attn_q_norm=self._vector(f"{prefix}attn_q_norm.weight"),
                attn_k_norm=self._vector(f"{prefix}attn_k_norm.weight"),
                attn_output=self._linear(f"{prefix}attn_output"),
                ffn_norm=self._norm(f"{prefix}ffn_norm"),
                ffn_gate=self._linear(f"{prefix}ffn_gate"),
                ffn_up=self._linear(f"{prefix}ffn_up"),
                ffn_down=self._linear(f"{prefix}ffn_down"),
            )

    def _linear(self, name: str) -> Linear:
        weight = self._kernels.prepare(self._tensor(f"{name}.weight"))
        return Linear(weight, self._vector(f"{name}.scale"), self._vector(f"{name}.bias"))

    def _norm(self, name: str) -> FloatArray:
        return self._kernels.vector(self._tensor(f"{name}.weight"))

    def _vector(self, name: str) -> FloatArray | None:
        return self._kernels.vector(self._tensor(name)) if name in self._gguf.tensors else None

    def _tensor(self, name: str) -> QuantizedTensor:
        info = self._gguf.tensors[name]
        return QuantizedTensor(name, info.shape, info.ggml_type, self._gguf.tensor_data(name))
