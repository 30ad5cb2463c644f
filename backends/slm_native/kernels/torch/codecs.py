"""The KV codecs on a device: equal to the NumPy codecs, plane for plane and bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_core.types import KvType
from slm_native.kv import KvCodec, Planes

PLANE_TYPES = {
    "<f4": torch.float32,
    "<f2": torch.float16,
    "|i1": torch.int8,
    "|u1": torch.uint8,
    "<u2": torch.int16,
    "<u4": torch.int32,
    "<u8": torch.int64,
}
"""Torch type of a plane, by its NumPy type; signed, as torch supports few operations on unsigned integers."""

_F16_MAX = 65504.0
_BF16_MAX = 2.0**127 * (2 - 2.0**-7)
_E4M3_MAX = 448.0
_BLOCK = 32
_SMALLEST_PEAK = 1e-30  # blocks below it are encoded as zeros, because their float16 scale would be zero


def device_codec(codec: KvCodec) -> KvCodec:
    """The codec on torch tensors."""
    encode, decode = _CODECS[codec.kv_type]
    return replace(codec, encode=encode, decode=decode)


def plane_type(dtype: np.dtype[Any]) -> torch.dtype:
    """The type of a plane on the device."""
    return PLANE_TYPES[dtype.str]


def _encode_f32(x: Tensor) -> Planes:
    return (x,)


def _decode_f32(planes: Planes) -> Tensor:
    plane: Tensor = planes[0]
    return plane


def _encode_f16(x: Tensor) -> Planes:
    """Round to half precision; larger magnitudes are clamped to 65504."""
    return (x.clamp(-_F16_MAX, _F16_MAX).half(),)


def _decode_f16(planes: Planes) -> Tensor:
    plane: Tensor = planes[0]
    return plane.float()


def _encode_bf16(x: Tensor) -> Planes:
    """Rounded to nearest, ties to even; larger magnitudes are clamped."""
    return (x.clamp(-_BF16_MAX, _BF16_MAX).bfloat16().view(torch.int16),)


def _decode_bf16(planes: Planes) -> Tensor:
    plane: Tensor = planes[0]
    return plane.view(torch.bfloat16).float()


def _encode_e4m3(x: Tensor) -> Planes:
    """Rounded to nearest, ties to even; larger magnitudes are clamped."""
    return (x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8),)


def _decode_e4m3(planes: Planes) -> Tensor:
    plane: Tensor = planes[0]
    return plane.view(torch.float8_e4m3fn).float()


def _blocks(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, _BLOCK)


def _inverse(scales: Tensor, peaks: Tensor) -> Tensor:
    return torch.where(peaks.abs() > _SMALLEST_PEAK, 1 / scales, 0)[..., None]


def _as_f16(scales: Tensor) -> Tensor:
    return scales.clamp(-_F16_MAX, _F16_MAX).half()


def _scaled(quants: Tensor, scales: Tensor) -> Tensor:
    """Quants [..., D], scales [..., D/32]."""
    return (quants.reshape(*scales.shape, _BLOCK).float() * scales.float()[..., None]).reshape(quants.shape)


def _encode_q8_0(x: Tensor) -> Planes:
    """Blocks of 32 values with one float16 scale, like ggml's Q8_0; scales are in a plane of their own."""
    blocks = _blocks(x)
    peaks = blocks.abs().amax(dim=-1)
    scales = peaks / 127
    quants = (blocks * _inverse(scales, peaks)).round().to(torch.int8)
    return quants.reshape(x.shape), _as_f16(scales)


def _decode_q8_0(planes: Planes) -> Tensor:
    quants, scales = planes
    return _scaled(quants, scales)


def _encode_from_zero(x: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """Codes [..., blocks, 32] up to 2 * zero - 1: 0 for the value of largest magnitude, ``zero`` for the value 0."""
    blocks = _blocks(x)
    peaks = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))[..., 0]
    scales = peaks / -zero
    codes = (blocks * _inverse(scales, peaks) + (zero + 0.5)).trunc()
    return codes.clamp(max=2 * zero - 1).to(torch.uint8), _as_f16(scales)


def _packed(codes: Tensor) -> Tensor:
    """Codes [..., blocks, 32] as nibbles [..., blocks * 16]; the first 16 codes of a block are the lower nibbles."""
    return ((codes[..., :16] & 15) | codes[..., 16:] << 4).flatten(-2)


def _unpacked(nibbles: Tensor) -> Tensor:
    halves = nibbles.reshape(*nibbles.shape[:-1], -1, 16)
    return torch.cat([halves & 15, halves >> 4], dim=-1)


def _encode_q4_0(x: Tensor) -> Planes:
    """Like ggml's Q4_0: nibbles, and scales in a plane of their own."""
    codes, scales = _encode_from_zero(x, 8)
    return _packed(codes), scales


def _decode_q4_0(planes: Planes) -> Tensor:
    nibbles, scales = planes
    return _scaled((_unpacked(nibbles).to(torch.int8) - 8).flatten(-2), scales)


def _encode_q5_0(x: Tensor) -> Planes:
    """Like ggml's Q5_0, in three planes: nibbles, scales, and the fifth bits of a block in one number."""
    codes, scales = _encode_from_zero(x, 16)
    shifts = torch.arange(_BLOCK, device=x.device)
    fifth = ((codes >> 4).long() << shifts).sum(dim=-1)  # in 64 bits; the upper half is empty
    return _packed(codes), scales, fifth.to(torch.int32)


def _decode_q5_0(planes: Planes) -> Tensor:
    nibbles, scales, fifth = planes
    shifts = torch.arange(_BLOCK, dtype=torch.int32, device=nibbles.device)
    codes = _unpacked(nibbles).to(torch.int8) | ((fifth[..., None] >> shifts & 1) << 4).to(torch.int8)
    return _scaled((codes - 16).flatten(-2), scales)


def _encode_q6_0(x: Tensor) -> Planes:
    """Like Q5_0, with six bits: the lower half of the third plane has the fifth bits, the upper half the sixth bits."""
    codes, scales = _encode_from_zero(x, 32)
    shifts = torch.arange(_BLOCK, device=x.device)
    high = (codes >> 4 & 1).long() << shifts | (codes >> 5).long() << shifts + _BLOCK
    return _packed(codes), scales, high.sum(dim=-1)


def _decode_q6_0(planes: Planes) -> Tensor:
    nibbles, scales, high = planes
    shifts = torch.arange(_BLOCK, device=nibbles.device)
    fifth, sixth = high[..., None] >> shifts & 1, high[..., None] >> shifts + _BLOCK & 1
    codes = _unpacked(nibbles).to(torch.int8) | (fifth << 4 | sixth << 5).to(torch.int8)
    return _scaled((codes - 32).flatten(-2), scales)


_CODECS = {
    KvType.F32: (_encode_f32, _decode_f32),
    KvType.F16: (_encode_f16, _decode_f16),
    KvType.BF16: (_encode_bf16, _decode_bf16),
    KvType.Q8_0: (_encode_q8_0, _decode_q8_0),
    KvType.Q6_0: (_encode_q6_0, _decode_q6_0),
    KvType.Q5_0: (_encode_q5_0, _decode_q5_0),
    KvType.Q4_0: (_encode_q4_0, _decode_q4_0),
    KvType.F8_E4M3: (_encode_e4m3, _decode_e4m3),
}
