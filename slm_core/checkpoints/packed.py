"""Matrices of 4-bit and 8-bit integers with a scale for each group of columns: GPTQ, AWQ, and compressed-tensors' own.

They are read as GGUF's types. A symmetric matrix keeps its numbers exactly: it has the same codes and scales in Q4_0
and Q8_0, whose blocks of 32 columns repeat the scale of their group. A 4-bit matrix with zero points becomes Q4_1: its
codes are kept, and the product of scale and zero point is rounded to float16, which moves a weight by at most ``scale *
zero * 2**-11``. A matrix whose columns are in groups out of order becomes F16, as GGUF's blocks need neighbours.

The layouts are those of AutoGPTQ and GPTQModel (``qweight``, ``qzeros``, ``scales``, ``g_idx``), of AutoAWQ
("gemm"), and of https://github.com/vllm-project/compressed-tensors ("pack-quantized").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.safetensors import StoredTensor
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.gguf.cursor import shown
from slm_core.quant import dequantize

Read: TypeAlias = Callable[[str], NDArray[np.uint8]]
"""The bytes of a stored tensor."""
Tensors: TypeAlias = Mapping[str, StoredTensor]

METHODS = ("gptq", "awq")
PACK_QUANTIZED = "pack-quantized"
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, of each four bits of AWQ's integers, lowest first."""
_BITS = (4, 8)
_INT_BITS = 32
_INTEGERS = {"I32": "<i4", "I64": "<i8"}
_FLOATS = {"F16": GgmlType.F16, "BF16": GgmlType.BF16, "F32": GgmlType.F32}
_BLOCK = 32
_Kind: TypeAlias = Literal["gptq", "awq", "compressed-tensors"]
_NEUTRAL: Mapping[str, str] = {
    "gptq": "damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name"
    " desc_act sym lm_head pack_dtype meta dataset use_cuda_fp16 use_exllama disable_exllama exllama_config"
    " max_input_length batch_size block_name_to_quantize cache_block_outputs modules_in_block_to_quantize"
    " module_name_preceding_first_block model_seqlen pad_token_id tokenizer backend hyb_act mse act_group_aware"
    " is_marlin_format quantizer",
    "awq": "zero_point modules_to_not_convert backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse"
    " model_name_or_path quant_method",
}
"""Keys of quantization configurations that change nothing here: tensors say the same, or say more."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a directory packs its matrices.

    Attributes:
        kind: the program that wrote them.
        bits: the bits of an integer.
        zero_offset: added to stored zero points.
    """

    kind: _Kind
    bits: int
    zero_offset: int = 0

    @classmethod
    def read(cls, about: Config, method: str) -> Packing:
        """The packing of a ``quantization_config``.

        Raises:
            UnsupportedModel: it is not implemented.
        """
        bits = about.size("bits")
        if bits not in (_BITS if method == "gptq" else (4,)):
            raise UnsupportedModel(f"{about.source}: matrices of {bits} bits (accepted: 4, and 8 for GPTQ)")
        about.neutral("group_size", *_NEUTRAL[method].split())
        if method == "awq":
            about.only("version", "gemm", "GEMM")
            return cls("awq", bits)
        about.only("checkpoint_format", "gptq", "gptq_v2")
        about.only("dynamic", {})
        # Version 1 stores zero points minus 1.
        return cls("gptq", bits, 0 if about.text("checkpoint_format", "gptq") == "gptq_v2" else 1)

    @classmethod
    def of_compressed_tensors(cls, about: Config) -> Packing:
        """The packing of a ``quantization_config`` with the format "pack-quantized".

        Raises:
            UnsupportedModel: its matrices have several numbers of bits, or activations are quantized.
        """
        bits = set()
        for name in about.mapping("config_groups"):
            group = about.part("config_groups").part(name)
            weights = group.part("weights")
            bits.add(weights.size("num_bits"))
            weights.only("type", "int")
            weights.only("strategy", "group", "channel")
            weights.neutral("symmetric", "group_size", "actorder", "dynamic", "observer", "observer_kwargs")
            weights.neutral("block_structure", "scale_dtype", "zp_dtype")
            group.only("input_activations")
            group.only("output_activations")
            group.neutral("targets", "format")
        if len(bits) != 1 or not bits <= set(_BITS):
            raise UnsupportedModel(f"{about.source}: matrices of {sorted(bits)} bits (accepted: 4 or 8, of all)")
        return cls("compressed-tensors", bits.pop())


class _Codes(NamedTuple):
    """A matrix as integers: ``scales[:, group] * (codes - zeros[:, group])``.

    codes: uint8 [out, in]; scales: float32 [out, n_groups]; zeros: uint8 [out, n_groups]; groups: of each column, or
    None if groups are neighbours.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]
    groups: NDArray[np.intp] | None


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed matrix of a directory.

    Attributes:
        base: the beginning of its tensors' names ("model.layers.0.mlp.up_proj").
        packing: how it is packed.
        shape: (out, in).
        parts: its tensors, by the ends of their names.
        ggml_type: the type that it is read as.
    """

    base: str
    packing: Packing
    shape: tuple[int, int]
    parts: Tensors = field(repr=False)
    ggml_type: GgmlType = GgmlType.F16

    def rows(self, read: Read) -> NDArray[np.generic]:
        """Packed rows, uint8 [out, row_bytes]; for F16, float16 [out, in]."""
        matrix = self._codes(read)
        if self.ggml_type is GgmlType.F16:
            groups = _in_order(self.shape[1], matrix.scales.shape[1]) if matrix.groups is None else matrix.groups
            weights = (matrix.codes - matrix.zeros[:, groups].astype(np.float32)) * matrix.scales[:, groups]
            return weights.astype(np.float16)
        return _blocks(matrix, self.ggml_type)

    def type_of_numbers(self, read: Read) -> GgmlType:
        """The type that keeps the numbers, decided by scales, zero points and groups.

        Raises:
            InvalidModelFile: a column is in a group that does not exist, or the stated shape is wrong.
        """
        n_in, n_groups, bits = self.shape[1], self._n_groups(), self.packing.bits
        if "weight_shape" in self.parts:
            self._check_shape(read(self._name("weight_shape")).view(_INTEGERS[self.parts["weight_shape"].dtype]))
        scales = self._scales(read)
        is_exact = np.array_equal(scales.astype(np.float16).astype(np.float32), scales)
        if not is_exact or self._groups(read, n_groups) is not None or (n_in // n_groups) % _BLOCK:
            return GgmlType.F16
        if (self._zeros(read) == 1 << (bits - 1)).all():
            return GgmlType.Q4_0 if bits == 4 else GgmlType.Q8_0
        return GgmlType.Q4_1 if bits == 4 else GgmlType.F16

    def _check_shape(self, stated: NDArray[np.integer]) -> None:
        if tuple(stated) != self.shape:
            raise InvalidModelFile(f"{shown(self._name('weight_shape'))} is {stated.tolist()}, not {self.shape}")

    def _codes(self, read: Read) -> _Codes:
        n_groups = self._n_groups()
        return _Codes(self._integers(read), self._scales(read), self._zeros(read), self._groups(read, n_groups))

    def _integers(self, read: Read) -> NDArray[np.uint8]:
        """The codes, uint8 [out, in]."""
        n_out, n_in = self.shape
        if self.packing.kind == "compressed-tensors":  # (out, in / 8)
            return self._unpacked(read, "weight_packed").reshape(n_out, n_in)
        codes = self._unpacked(read, "qweight")
        if self.packing.kind == "awq":  # (in, out / 8)
            return np.ascontiguousarray(_in_awq_order(codes).reshape(n_in, n_out).T)
        # (in / 8, out): an integer holds neighbours of a column
        return codes.reshape(-1, n_out, self._n_in_int).transpose(1, 0, 2).reshape(n_out, n_in)

    def _scales(self, read: Read) -> NDArray[np.float32]:
        name = "weight_scale" if self.packing.kind == "compressed-tensors" else "scales"
        stored = self.parts[name]
        numbers = dequantize(read(self._name(name)), _FLOATS[stored.dtype], stored.shape)
        return numbers if self.packing.kind == "compressed-tensors" else numbers.T

    def _zeros(self, read: Read) -> NDArray[np.uint8]:
        """Zero points, uint8 [out, n_groups]."""
        n_out, n_groups = self.shape[0], self._n_groups()
        if self.packing.kind == "compressed-tensors":
            if "weight_zero_point" not in self.parts:
                return np.full((n_out, n_groups), 1 << (self.packing.bits - 1), np.uint8)
            # (out / 8, n_groups): an integer holds neighbours of a column
            zeros = self._unpacked(read, "weight_zero_point").reshape(-1, n_groups, self._n_in_int)
            return zeros.transpose(0, 2, 1).reshape(n_out, n_groups)
        zeros = self._unpacked(read, "qzeros")
        zeros = _in_awq_order(zeros) if self.packing.kind == "awq" else zeros
        largest = np.uint8((1 << self.packing.bits) - 1)
        return (zeros.reshape(n_groups, n_out).T + np.uint8(self.packing.zero_offset)) & largest

    def _groups(self, read: Read, n_groups: int) -> NDArray[np.intp] | None:
        """The group of each column; None if columns of a group are neighbours, in order.

        Raises:
            InvalidModelFile: there is no such group.
        """
        name = "weight_g_idx" if self.packing.kind == "compressed-tensors" else "g_idx"
        if name not in self.parts:
            return None
        groups = read(self._name(name)).view("<i4").astype(np.intp)
        if groups.min(initial=0) < 0 or groups.max(initial=0) >= n_groups:
            raise InvalidModelFile(f"{shown(self._name(name))} names groups other than 0 to {n_groups - 1}")
        return None if np.array_equal(groups, _in_order(len(groups), n_groups)) else groups

    def _unpacked(self, read: Read, part: str) -> NDArray[np.uint8]:
        """The integers of a part, lowest bits first."""
        data = read(self._name(part))
        if self.packing.bits == 8:
            return data
        codes = np.empty((data.size, 2), np.uint8)
        codes[:, 0], codes[:, 1] = data & 15, data >> 4
        return codes.reshape(-1)

    @property
    def _n_in_int(self) -> int:
        return _INT_BITS // self.packing.bits

    def _n_groups(self) -> int:
        if self.packing.kind == "compressed-tensors":
            return self.parts["weight_scale"].shape[1]
        return self.parts["scales"].shape[0]

    def _name(self, part: str) -> str:
        return f"{self.base}.{part}"


def find_matrices(folder: Path, tensors: Tensors, packing: Packing | None, read: Read) -> dict[str, PackedMatrix]:
    """The packed matrices of a directory, by the names that they would have unpacked.

    Raises:
        InvalidModelFile: a part is missing, or has the wrong shape, type or values.
    """
    if packing is None:
        return {}
    first = "weight_packed" if packing.kind == "compressed-tensors" else "qweight"
    matrices = {}
    for name in tensors:
        if name.endswith(f".{first}"):
            base = name.removesuffix(f".{first}")
            matrix = _checked(folder, base, tensors, packing)
            matrices[f"{base}.weight"] = _typed(folder, matrix, read)
    return matrices


def parts_of(matrices: Mapping[str, PackedMatrix]) -> set[str]:
    """The names of all tensors that belong to packed matrices."""
    return {f"{matrix.base}.{part}" for matrix in matrices.values() for part in matrix.parts}


def _typed(folder: Path, matrix: PackedMatrix, read: Read) -> PackedMatrix:
    try:
        kind = matrix.type_of_numbers(read)
    except InvalidModelFile as error:
        raise InvalidModelFile(f"{folder}: {error}") from None
    return replace(matrix, ggml_type=kind)


_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
}
_OPTIONAL = ("g_idx", "weight_zero_point", "weight_g_idx")


def _checked(folder: Path, base: str, tensors: Tensors, packing: Packing) -> PackedMatrix:
    parts = {part: tensors[f"{base}.{part}"] for part in _PARTS[packing.kind] if f"{base}.{part}" in tensors}
    for part in _PARTS[packing.kind]:
        if part not in parts and part not in _OPTIONAL:
            raise InvalidModelFile(f"{folder}: tensor {shown(f'{base}.{part}')} is missing")
    of_compressed = packing.kind == "compressed-tensors"
    names = ("weight_packed", "weight_scale") if of_compressed else ("qweight", "scales")
    packed, scales = (parts[name].shape for name in names)
    if len(packed) != 2 or len(scales) != 2 or 0 in (*packed, *scales):
        raise InvalidModelFile(f"{folder}: {shown(base)} is packed, but no matrix")
    n = _INT_BITS // packing.bits
    if packing.kind == "gptq":
        shape, n_groups = (packed[1], packed[0] * n), scales[0]
        expected = {"scales": (n_groups, shape[0]), "qzeros": (n_groups, shape[0] // n), "g_idx": (shape[1],)}
        is_whole = shape[0] % n == 0
    elif packing.kind == "awq":
        shape, n_groups = (packed[1] * n, packed[0]), scales[0]
        expected, is_whole = {"scales": (n_groups, shape[0]), "qzeros": (n_groups, packed[1])}, True
    else:
        shape, n_groups = (packed[0], packed[1] * n), scales[1]
        zeros = {"weight_zero_point": (shape[0] // n, n_groups)}
        expected = {"weight_scale": (shape[0], n_groups), "weight_shape": (2,), "weight_g_idx": (shape[1],), **zeros}
        is_whole = shape[0] % n == 0 or "weight_zero_point" not in parts
    if not is_whole or shape[1] % n_groups:
        raise InvalidModelFile(
            f"{folder}: {shown(base)} has {shape[0]} rows, and {shape[1]} columns in {n_groups} groups"
        )
    _check_parts(folder, base, parts, expected)
    return PackedMatrix(base, packing, shape, parts)


def _check_parts(folder: Path, base: str, parts: Tensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    for part, stored in parts.items():
        what = f"{folder}: tensor {shown(f'{base}.{part}')}"
        if stored.shape != expected.get(part, stored.shape):
            raise InvalidModelFile(f"{what} has the shape {stored.shape} (accepted: {expected[part]})")
        accepted = tuple(_FLOATS) if "scale" in part else tuple(_INTEGERS) if part == "weight_shape" else ("I32",)
        if stored.dtype not in accepted:
            raise InvalidModelFile(f"{what} is of type {stored.dtype} (accepted: {', '.join(accepted)})")


def _in_awq_order(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes in the order of columns, from AWQ's order within each eight."""
    ordered = np.empty((codes.size // 8, 8), np.uint8)
    ordered[:, _AWQ_COLUMNS] = codes.reshape(-1, 8)
    return ordered.reshape(-1)


def _in_order(n_in: int, n_groups: int) -> NDArray[np.intp]:
    return np.arange(n_in) // (n_in // n_groups)


def _blocks(matrix: _Codes, kind: GgmlType) -> NDArray[np.uint8]:
    """GGUF's blocks, uint8 [out, n_blocks * block_bytes]."""
    n_out, n_in = matrix.codes.shape
    n_blocks, n_groups = n_in // _BLOCK, matrix.scales.shape[1]
    blocks = np.empty((n_out, n_blocks, kind.block_bytes), np.uint8)
    codes, repeats = matrix.codes.reshape(n_out, n_blocks, _BLOCK), n_blocks // n_groups
    scales = np.repeat(matrix.scales, repeats, axis=1).astype(np.float16)
    blocks[:, :, :2] = scales.view(np.uint8).reshape(n_out, n_blocks, 2)
    if kind is GgmlType.Q8_0:
        blocks[:, :, 2:] = codes - np.uint8(128)
        return blocks.reshape(n_out, -1)
    at = 2
    if kind is GgmlType.Q4_1:
        least = np.repeat(-matrix.scales * matrix.zeros, repeats, axis=1).astype(np.float16)
        blocks[:, :, 2:4] = least.view(np.uint8).reshape(n_out, n_blocks, 2)
        at = 4
    blocks[:, :, at:] = codes[:, :, :16] | codes[:, :, 16:] << 4
    return blocks.reshape(n_out, -1)
