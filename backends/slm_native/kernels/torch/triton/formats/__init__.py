"""Packed blocks as Triton kernels read them: one module a format, each found by being here."""

from slm_native.kernels.torch.triton.formats._registry import PackedFormat, packed_format, packed_types

__all__ = ["PackedFormat", "packed_format", "packed_types"]
