"""Collects the modules of formats and applies them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

from torch import Tensor

from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import format_of
from slm_core.submodules import public_modules
from slm_native.kernels.torch.unpack._blocks import Blocks, fields_of


@cache
def _formats() -> dict[GgmlType, Callable[[Blocks], Tensor]]:
    names = public_modules(__package__)
    return {GgmlType[name.upper()]: importlib.import_module(f"{__package__}.{name}").expand for name in names}


def unpacked_types() -> list[GgmlType]:
    """The types that can be dequantized, sorted by id."""
    return sorted(_formats())


def unpack(rows: Tensor, ggml_type: GgmlType) -> Tensor:
    """Dequantize rows of a matrix.

    Args:
        rows: uint8 [n, bytes of a row], on any device.
        ggml_type: the type of their blocks.

    Returns:
        float32 [n, in].

    Raises:
        UnsupportedModel: the type has no format here.
    """
    return expander(ggml_type)(rows.reshape(-1, ggml_type.block_bytes)).reshape(len(rows), -1)


@cache
def expander(ggml_type: GgmlType) -> Callable[[Tensor], Tensor]:
    """Dequantizes blocks of a type: uint8 [N, bytes of a block] to float32 [N, weights of a block]; see ``unpack``."""
    expand = _formats().get(ggml_type)
    if expand is None:
        accepted = ", ".join(t.name for t in unpacked_types())
        raise UnsupportedModel(f"the torch tier has no tensor type {ggml_type.name} (supported: {accepted})")
    layout = fields_of(format_of(ggml_type).block)
    return lambda data: expand(Blocks(data, layout))
