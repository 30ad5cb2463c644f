"""Expanding packed weights on a torch device: one module a format, each found by being here.

The layout of a block is that of ``slm_core.quant``, whose NumPy code is the definition; every result equals its bit for
bit.
"""

from slm_native.kernels.torch.unpack._registry import expander, unpack, unpacked_types

__all__ = ["expander", "unpack", "unpacked_types"]
