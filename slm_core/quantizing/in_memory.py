"""GGUF files in memory, of metadata and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType, GgufWriter, NewTensor, PlainValue
from slm_core.gguf.writer import stored
from slm_core.quant import quantize

_ALIGNMENT = 32
_ALIGNMENT_KEY = "general.alignment"

Weights: TypeAlias = NDArray[np.float32] | NDArray[np.float16] | tuple[NDArray[np.float32], GgmlType]
"""The weights of a tensor, rows first: stored as they are, or quantized to a type."""


def model_bytes(
    metadata: Mapping[str, PlainValue | NDArray[np.generic] | bytes], tensors: Mapping[str, Weights]
) -> bytes:
    """A GGUF file in memory, for ``slm.load``.

    Args:
        metadata: the value of each key, as in ``docs/gguf.md`` of ggml; bytes are a stored value of another file
            (``Metadata.stored``).
        tensors: the weights of each tensor by its GGUF name, such as ``blk.0.attn_q.weight``.

    Raises:
        InvalidOption: weights of another dtype, or without elements.
        UnsupportedModel, InvalidModelFile: weights that cannot be quantized to the type; see ``quant.quantize``.
    """
    if _ALIGNMENT_KEY in metadata:
        raise InvalidOption(
            f"metadata has {_ALIGNMENT_KEY!r} (accepted: metadata without it; tensors are aligned to 32)"
        )
    packed = {name: _packed(name, weights) for name, weights in tensors.items()}
    headers = [NewTensor(name, shape, ggml_type, len(data)) for name, (shape, ggml_type, data) in packed.items()]
    values = {key: value if isinstance(value, bytes) else stored(value) for key, value in metadata.items()}
    padded = (data.ljust(-(-len(data) // _ALIGNMENT) * _ALIGNMENT, b"\0") for _, _, data in packed.values())
    return b"".join([GgufWriter(values, headers, _ALIGNMENT).header, *padded])


def _packed(name: str, weights: Weights) -> tuple[tuple[int, ...], GgmlType, bytes]:
    """Shape, type and stored bytes of a tensor."""
    numbers, ggml_type = weights if isinstance(weights, tuple) else (weights, None)
    float_types = {np.dtype(np.float32): GgmlType.F32, np.dtype(np.float16): GgmlType.F16}
    if not isinstance(numbers, np.ndarray) or numbers.dtype not in float_types or not numbers.size or not numbers.ndim:
        description = (
            f"{numbers.dtype} {list(numbers.shape)}" if isinstance(numbers, np.ndarray) else type(numbers).__name__
        )
        raise InvalidOption(
            f"tensor {name!r} is {description} (accepted: a NumPy array of float32 or float16, with elements)"
        )
    if ggml_type is None or ggml_type == float_types[numbers.dtype]:
        return numbers.shape, float_types[numbers.dtype], np.ascontiguousarray(numbers).tobytes()
    rows = np.ascontiguousarray(numbers, np.float32).reshape(-1, numbers.shape[-1])
    return numbers.shape, GgmlType(ggml_type), quantize(rows, GgmlType(ggml_type)).tobytes()
