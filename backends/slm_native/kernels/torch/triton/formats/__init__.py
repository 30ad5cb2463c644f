"""Triton code that reads quantized blocks: one module per format; a new module is registered automatically."""

from slm_native.kernels.torch.triton.formats._registry import PackedFormat, packed_format, packed_types

__all__ = ["PackedFormat", "packed_format", "packed_types"]
