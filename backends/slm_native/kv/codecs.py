"""How keys and values are stored: one codec for each KV type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidOption
from slm_core.types import KvType

FloatArray: TypeAlias = NDArray[np.float32]
Planes: TypeAlias = Sequence[NDArray[Any]]
"""What a codec makes of float32 [..., D]: one array [..., W] for each of its planes."""

_Q8_0_BLOCK = 32
_F16_MAX = np.float32(65504)


@dataclass(frozen=True, slots=True)
class KvCodec:
    """One KV type.

    Attributes:
        kv_type: the type.
        planes: the dtype of each plane and how many of the D values of a head share one item of it.
        encode: float32 [..., D] to planes.
        decode: planes to a C-contiguous float32 [..., D].
    """

    kv_type: KvType
    planes: tuple[tuple[np.dtype[Any], int], ...]
    encode: Callable[[FloatArray], Planes]
    decode: Callable[[Planes], FloatArray]


def _encode_f16(x: FloatArray) -> Planes:
    """Round to half precision; what is larger than it can hold becomes its largest, not infinite."""
    return (np.clip(x, -_F16_MAX, _F16_MAX).astype("<f2"),)


def _encode_q8_0(x: FloatArray) -> Planes:
    """Blocks of 32 values with one float16 scale, as ggml's Q8_0, the scales in a plane of their own."""
    blocks = x.reshape(*x.shape[:-1], -1, _Q8_0_BLOCK)
    scales = np.abs(blocks).max(axis=-1) / np.float32(127)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    quants = np.rint(blocks * inverse[..., None]).astype(np.int8)
    return quants.reshape(x.shape), np.minimum(scales, _F16_MAX).astype("<f2")


def _decode_q8_0(planes: Planes) -> FloatArray:
    quants, scales = planes
    blocks = quants.reshape(*scales.shape, _Q8_0_BLOCK).astype(np.float32, "C")
    blocks *= scales.astype(np.float32)[..., None]
    return blocks.reshape(quants.shape)


_F32, _F16, _I8 = np.dtype("<f4"), np.dtype("<f2"), np.dtype("i1")
_CODECS: dict[str, KvCodec] = {
    codec.kv_type: codec
    for codec in (
        KvCodec(KvType.F32, ((_F32, 1),), lambda x: (x,), lambda planes: np.ascontiguousarray(planes[0], np.float32)),
        KvCodec(KvType.F16, ((_F16, 1),), _encode_f16, lambda planes: planes[0].astype(np.float32, "C")),
        KvCodec(KvType.Q8_0, ((_I8, 1), (_F16, _Q8_0_BLOCK)), _encode_q8_0, _decode_q8_0),
    )
}


def codec_of(kv_type: str, head_dim: int) -> KvCodec:
    """The codec of a KV type, or of the text that spells it, for heads of width D.

    Raises:
        InvalidOption: an unknown type, or one whose blocks do not divide the head.
    """
    usable = [k for k, codec in _CODECS.items() if all(head_dim % span == 0 for _, span in codec.planes)]
    codec = _CODECS.get(kv_type)
    if codec is None:
        raise InvalidOption(f"unknown KV type {str(kv_type)!r} (accepted: {', '.join(usable)})")
    if codec.kv_type not in usable:
        raise InvalidOption(
            f"KV type {codec.kv_type} needs heads whose width is a multiple of {_Q8_0_BLOCK}, this model's is"
            f" {head_dim} (accepted: {', '.join(usable)})"
        )
    return codec
