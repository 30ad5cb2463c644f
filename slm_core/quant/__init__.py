"""GGUF quantization formats in NumPy: one module a format, each found by being here.

A format's module defines ``FORMAT``; nothing else names it. These are the definition of every type, slow and obvious.
"""

from slm_core.quant._format import Affine
from slm_core.quant._registry import (
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
