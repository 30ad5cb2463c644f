"""Finds the formats and applies them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from torch import Tensor

from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import format_of
from slm_native.kernels.torch import unpack as package
from slm_native.kernels.torch.unpack._blocks import Blocks


@cache
def _formats() -> dict[GgmlType, Callable[[Blocks], Tensor]]:
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
    return {GgmlType[name.upper()]: importlib.import_module(f"{package.__name__}.{name}").expand for name in names}


def unpacked_types() -> list[GgmlType]:
    """The types that can be expanded, by id."""
    return sorted(_formats())


def unpack(rows: Tensor, ggml_type: GgmlType) -> Tensor:
    """Expand rows of a matrix.

    Args:
        rows: uint8 [n, bytes of a row], on any device.
        ggml_type: the type of their blocks.

    Returns:
        float32 [n, in].

    Raises:
        UnsupportedModel: the type has no format here.
    """
    expand = _formats().get(ggml_type)
    if expand is None:
        accepted = ", ".join(t.name for t in unpacked_types())
        raise UnsupportedModel(f"the torch tier has no tensor type {ggml_type.name} (supported: {accepted})")
    blocks = Blocks(rows.reshape(-1, ggml_type.block_bytes), format_of(ggml_type).block)
    return expand(blocks).reshape(len(rows), -1)
