"""GGUF quantization formats in NumPy, one module per format.

A format's module defines ``FORMAT``; there is no list of formats. These modules are the slow, obvious reference of
every type.
"""

from slm_core.quant._format import Affine
from slm_core.quant._registry import (
    check_size,
    check_tensor,
    dequantize,
    dequantize_rows,
    format_of,
    quantizable_types,
    quantize,
    row_bytes,
    split_rows,
    supported_types,
)
from slm_core.quant._tensor import QuantizedTensor

__all__ = [
    "Affine",
    "QuantizedTensor",
    "check_size",
    "check_tensor",
    "dequantize",
    "dequantize_rows",
    "format_of",
    "quantizable_types",
    "quantize",
    "row_bytes",
    "split_rows",
    "supported_types",
]
