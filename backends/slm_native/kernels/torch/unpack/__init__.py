"""Dequantization on a torch device: one module per format; a new module is registered automatically.

Blocks have the layouts of ``slm_core.quant``, whose NumPy code is the definition: results are equal to its results bit
for bit.
"""

from slm_native.kernels.torch.unpack._registry import expander, unpack, unpacked_types

__all__ = ["expander", "unpack", "unpacked_types"]
