"""GGUF quantization formats in NumPy: one module a format, each found by being here.

A format's module defines ``FORMAT``; nothing else names it. These are the definition of every type, slow and obvious.
"""

from slm_native.quant._registry import (
    check_tensor,
    dequantize,
    dequantize_rows,
    format_of,
    row_bytes,
    supported_types,
)

__all__ = ["check_tensor", "dequantize", "dequantize_rows", "format_of", "row_bytes", "supported_types"]
