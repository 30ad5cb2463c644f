"""How keys and values are stored, on a device: the twins of the NumPy codecs, plane for plane and bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_core.errors import InvalidOption
from slm_core.types import KvType
from slm_native.kv import KvCodec, Planes

PLANE_TYPES = {"<f4": torch.float32, "<f2": torch.float16, "|i1": torch.int8}
"""The type of a plane on the device, by that in NumPy."""

_F16_MAX = 65504.0
_Q8_0_BLOCK = 32
_SMALLEST_PEAK = 1e-30  # below it a block counts as zeros, as its float16 scale does


def device_codec(codec: KvCodec) -> KvCodec:
    """The codec on torch tensors.

    Raises:
        InvalidOption: this tier has none of that type.
    """
    if codec.kv_type not in _CODECS:
        raise InvalidOption(f"the torch tier has no KV type {codec.kv_type} (accepted: {', '.join(_CODECS)})")
    encode, decode = _CODECS[codec.kv_type]
    return KvCodec(codec.kv_type, codec.planes, encode, decode)


def plane_type(dtype: np.dtype[Any]) -> torch.dtype:
    """The type of a plane on the device."""
    return PLANE_TYPES[dtype.str]


def _encode_f32(x: Tensor) -> Planes:
    return (x,)


def _decode_f32(planes: Planes) -> Tensor:
    plane: Tensor = planes[0]
    return plane


def _encode_f16(x: Tensor) -> Planes:
    """Round to half precision; what is larger than it can hold becomes its largest, not infinite."""
    return (x.clamp(-_F16_MAX, _F16_MAX).half(),)


def _decode_f16(planes: Planes) -> Tensor:
    plane: Tensor = planes[0]
    return plane.float()


def _encode_q8_0(x: Tensor) -> Planes:
    """Blocks of 32 values with one float16 scale, as ggml's Q8_0, the scales in a plane of their own."""
    blocks = x.reshape(*x.shape[:-1], -1, _Q8_0_BLOCK)
    peaks = blocks.abs().amax(dim=-1)
    scales = peaks / 127
    inverse = torch.where(peaks > _SMALLEST_PEAK, 1 / scales, 0)
    quants = (blocks * inverse[..., None]).round().to(torch.int8)
    return quants.reshape(x.shape), scales.clamp(max=_F16_MAX).half()


def _decode_q8_0(planes: Planes) -> Tensor:
    quants, scales = planes
    blocks: Tensor = quants.reshape(*scales.shape, _Q8_0_BLOCK).float() * scales.float()[..., None]
    return blocks.reshape(quants.shape)


_CODECS = {
    KvType.F32: (_encode_f32, _decode_f32),
    KvType.F16: (_encode_f16, _decode_f16),
    KvType.Q8_0: (_encode_q8_0, _decode_q8_0),
}
