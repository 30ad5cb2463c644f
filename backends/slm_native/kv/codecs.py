"""The number formats of keys and values: one codec for each KV type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.container import LARGEST_NUMBER
from slm_core.errors import InvalidOption
from slm_core.types import KvType

FloatArray: TypeAlias = NDArray[np.float32]
Array: TypeAlias = Any
"""Arrays of a kernel set: NumPy arrays, or arrays of its device."""
Planes: TypeAlias = Sequence[Array]
"""The encoding of float32 [..., D]: one array [..., W] for each plane of the codec."""

_BLOCK = 32
_F16_MAX = np.float32(65504)
_BF16_MAX = np.float32(2.0**127 * (2 - 2.0**-7))
_LARGEST_BF16 = int(LARGEST_NUMBER.view(np.uint32)) >> 16
_SMALLEST_PEAK = np.float32(1e-30)  # blocks below it are encoded as zeros, because their float16 scale would be zero


@dataclass(frozen=True, slots=True)
class KvCodec:
    """One KV type.

    Attributes:
        kv_type: the type.
        planes: for each plane its dtype, and the number of values of a head that share one item.
        encode: float32 [..., D] to planes.
        decode: planes to a C-contiguous float32 [..., D].
        is_bounded: whether planes in NumPy decode to magnitudes up to ``LARGEST_NUMBER``.
    """

    kv_type: KvType
    planes: tuple[tuple[np.dtype[Any], int], ...]
    encode: Callable[[Array], Planes]
    decode: Callable[[Planes], Array]
    is_bounded: Callable[[Planes], bool]


def _encode_f16(x: FloatArray) -> Planes:
    """Round to half precision; larger magnitudes are clamped to 65504."""
    return (np.clip(x, -_F16_MAX, _F16_MAX).astype("<f2"),)


def _encode_bf16(x: FloatArray) -> Planes:
    """The upper half of a float32, rounded to nearest, ties to even; larger magnitudes are clamped."""
    bits = np.clip(x, -_BF16_MAX, _BF16_MAX).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return (np.where(np.isnan(x), np.uint32(0x7FC0), upper).astype("<u2"),)


def _decode_bf16(planes: Planes) -> FloatArray:
    wide: NDArray[np.uint32] = planes[0].astype(np.uint32, "C") << np.uint32(16)
    return wide.view(np.float32)


def _blocks(x: FloatArray) -> FloatArray:
    return x.reshape(*x.shape[:-1], -1, _BLOCK)


def _inverse(scales: FloatArray, peaks: FloatArray) -> FloatArray:
    inverse: FloatArray = np.divide(1, scales, out=np.zeros_like(scales), where=np.abs(peaks) > _SMALLEST_PEAK)
    return inverse[..., None]


def _as_f16(scales: FloatArray) -> NDArray[np.float16]:
    return np.clip(scales, -_F16_MAX, _F16_MAX).astype("<f2")


def _encode_q8_0(x: FloatArray) -> Planes:
    """Blocks of 32 values with one float16 scale, like ggml's Q8_0; scales are in a plane of their own."""
    blocks = _blocks(x)
    peaks = np.abs(blocks).max(axis=-1)
    scales = peaks / np.float32(127)
    quants = np.rint(blocks * _inverse(scales, peaks)).astype(np.int8)
    return quants.reshape(x.shape), _as_f16(scales)


def _decode_q8_0(planes: Planes) -> FloatArray:
    quants, scales = planes
    return _scaled(quants, scales)


def _scaled(quants: NDArray[np.int8], scales: NDArray[np.float16]) -> FloatArray:
    blocks = quants.reshape(*scales.shape, _BLOCK).astype(np.float32, "C")
    blocks *= scales.astype(np.float32)[..., None]
    return blocks.reshape(quants.shape)


def _encode_from_zero(x: FloatArray, zero: int) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes [..., blocks, 32] up to 2 * zero - 1: 0 for the value of largest magnitude, ``zero`` for the value 0."""
    blocks = _blocks(x)
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], -1)[..., 0]
    scales = peaks / np.float32(-zero)
    codes = np.trunc(blocks * _inverse(scales, peaks) + np.float32(zero + 0.5))
    return np.minimum(codes, 2 * zero - 1).astype(np.uint8), _as_f16(scales)


def _packed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes [..., blocks, 32] as nibbles [..., blocks * 16]; the first 16 codes of a block are the lower nibbles."""
    nibbles: NDArray[np.uint8] = (codes[..., :16] & np.uint8(15)) | codes[..., 16:] << np.uint8(4)
    return nibbles.reshape(*codes.shape[:-2], -1)


def _unpacked(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    halves = nibbles.reshape(*nibbles.shape[:-1], -1, 16)
    return np.concatenate((halves & 15, halves >> 4), axis=-1)


def _encode_q4_0(x: FloatArray) -> Planes:
    """Like ggml's Q4_0: nibbles, and scales in a plane of their own."""
    codes, scales = _encode_from_zero(x, 8)
    return _packed(codes), scales


def _decode_q4_0(planes: Planes) -> FloatArray:
    nibbles, scales = planes
    codes = _unpacked(nibbles).astype(np.int8) - np.int8(8)
    return _scaled(codes.reshape(*codes.shape[:-2], -1), scales)


def _encode_q5_0(x: FloatArray) -> Planes:
    """Like ggml's Q5_0, in three planes: nibbles, scales, and the fifth bits of a block in one number."""
    codes, scales = _encode_from_zero(x, 16)
    fifth = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return _packed(codes), scales, fifth.view("<u4")[..., 0]


def _decode_q5_0(planes: Planes) -> FloatArray:
    nibbles, scales, fifth = planes
    flags = np.ascontiguousarray(fifth)[..., None].view(np.uint8)
    codes = _unpacked(nibbles) | np.unpackbits(flags, axis=-1, bitorder="little") << 4
    return _scaled((codes.astype(np.int8) - np.int8(16)).reshape(*codes.shape[:-2], -1), scales)


def _encode_q6_0(x: FloatArray) -> Planes:
    """Like Q5_0, with six bits: the lower half of the third plane has the fifth bits, the upper half the sixth bits."""
    codes, scales = _encode_from_zero(x, 32)
    high = np.packbits(np.stack([codes >> 4 & 1, codes >> 5], axis=-2), axis=-1, bitorder="little")
    return _packed(codes), scales, high.reshape(*high.shape[:-2], 8).view("<u8")[..., 0]


def _decode_q6_0(planes: Planes) -> FloatArray:
    nibbles, scales, high = planes
    flags = np.ascontiguousarray(high)[..., None].view(np.uint8)
    bits = np.unpackbits(flags, axis=-1, bitorder="little")
    codes = _unpacked(nibbles) | bits[..., :_BLOCK] << 4 | bits[..., _BLOCK:] << 5
    return _scaled((codes.astype(np.int8) - np.int8(32)).reshape(*codes.shape[:-2], -1), scales)


def _encode_e4m3(x: FloatArray) -> Planes:
    """Rounded to nearest, ties to even; larger magnitudes are clamped. https://arxiv.org/abs/2209.05433, section 3."""
    magnitude = np.minimum(np.abs(x), _E4M3_MAX)
    exponent = np.frexp(magnitude)[1] - 1  # of 1.f * 2 ** exponent
    step = np.ldexp(np.float32(1), np.maximum(exponent, -6) - 3)
    rounded = np.rint(magnitude / step) * step
    codes = np.searchsorted(_E4M3_LEVELS, rounded).astype(np.uint8)
    codes = np.where(np.isnan(x), np.uint8(_E4M3_NAN), codes)
    return (codes | np.signbit(x).astype(np.uint8) << np.uint8(7),)


def _decode_e4m3(planes: Planes) -> FloatArray:
    values: FloatArray = _E4M3_TABLE[np.ascontiguousarray(planes[0])]
    return values


def _e4m3_levels() -> FloatArray:
    """The values of codes 0 to 126, ascending: eight below 2^-6, then eight for each power of two."""
    codes = np.arange(_E4M3_NAN)
    exponent, fraction = codes >> 3, codes & 7
    below = np.ldexp(fraction / 8, -6)
    return np.where(exponent == 0, below, np.ldexp(1 + fraction / 8, exponent - 7)).astype(np.float32)


_E4M3_MAX, _E4M3_NAN = np.float32(448), 0x7F
_E4M3_LEVELS = _e4m3_levels()
_E4M3_TABLE = np.concatenate([_E4M3_LEVELS, [np.nan], -_E4M3_LEVELS, [np.nan]]).astype(np.float32)


def _are_bounded(planes: Planes) -> bool:
    """Codes are always bounded; float16 scales are if they are finite."""
    return all(plane.dtype.kind != "f" or bool((np.abs(plane) <= LARGEST_NUMBER).all()) for plane in planes)


def _is_bounded_bf16(planes: Planes) -> bool:
    return bool(((planes[0] & 0x7FFF) <= _LARGEST_BF16).all())


def _is_bounded_e4m3(planes: Planes) -> bool:
    return bool(((planes[0] & 0x7F) != _E4M3_NAN).all())


_F32, _F16, _I8, _U8 = np.dtype("<f4"), np.dtype("<f2"), np.dtype("i1"), np.dtype("u1")
_U16, _U32, _U64 = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")
_SCALE = (_F16, _BLOCK)
_CODECS: dict[str, KvCodec] = {
    codec.kv_type: codec
    for codec in (
        KvCodec(
            KvType.F32,
            ((_F32, 1),),
            lambda x: (x,),
            lambda planes: np.ascontiguousarray(planes[0], np.float32),
            _are_bounded,
        ),
        KvCodec(KvType.F16, ((_F16, 1),), _encode_f16, lambda planes: planes[0].astype(np.float32, "C"), _are_bounded),
        KvCodec(KvType.BF16, ((_U16, 1),), _encode_bf16, _decode_bf16, _is_bounded_bf16),
        KvCodec(KvType.Q8_0, ((_I8, 1), _SCALE), _encode_q8_0, _decode_q8_0, _are_bounded),
        KvCodec(KvType.Q6_0, ((_U8, 2), _SCALE, (_U64, _BLOCK)), _encode_q6_0, _decode_q6_0, _are_bounded),
        KvCodec(KvType.Q5_0, ((_U8, 2), _SCALE, (_U32, _BLOCK)), _encode_q5_0, _decode_q5_0, _are_bounded),
        KvCodec(KvType.Q4_0, ((_U8, 2), _SCALE), _encode_q4_0, _decode_q4_0, _are_bounded),
        KvCodec(KvType.F8_E4M3, ((_U8, 1),), _encode_e4m3, _decode_e4m3, _is_bounded_e4m3),
    )
}


def codec_of(kv_type: str, head_dim: int) -> KvCodec:
    """The codec of a KV type (or of its name) for heads of width D.

    Raises:
        InvalidOption: an unknown type, or one whose blocks do not divide the head.
    """
    usable = [k for k, codec in _CODECS.items() if all(head_dim % n_shared == 0 for _, n_shared in codec.planes)]
    codec = _CODECS.get(kv_type)
    if codec is None:
        raise InvalidOption(f"unknown KV type {str(kv_type)!r} (accepted: {', '.join(usable)})")
    if codec.kv_type not in usable:
        raise InvalidOption(
            f"KV type {codec.kv_type} needs heads whose width is a multiple of {_BLOCK}, this model's is"
            f" {head_dim} (accepted: {', '.join(usable)})"
        )
    return codec
