"""Dequantization through torch.compile: the many small operations of a format as one kernel."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType
from slm_native.kernels.torch.unpack import expander

BACKEND = "inductor"
_MOST_CHARACTERS = 300  # of an error, which may be very long


def check_compiles(rows: Tensor, ggml_type: GgmlType, dtype: torch.dtype) -> None:
    """Compile for a type when the model is loaded: a failure is then an error of the option, not of a step.

    Args:
        rows: uint8 [n, bytes of a row], some rows of a matrix.
        ggml_type: the type of their blocks.
        dtype: the type of dequantized weights.

    Raises:
        InvalidOption: torch cannot compile here.
    """
    blocks = rows.reshape(-1, ggml_type.block_bytes)[:64]
    expander(ggml_type)(blocks)  # creates the tables that compiled code reads
    try:
        _compiled(ggml_type, dtype, rows.device)(blocks)
    except RuntimeError as error:  # torch.compile raises only subclasses, also if there is no compiler
        why = textwrap.shorten(str(error), _MOST_CHARACTERS)
        raise InvalidOption(f"compile=true: torch.compile does not work on {rows.device}: {why}") from error


def unpack_compiled(rows: Tensor, ggml_type: GgmlType, dtype: torch.dtype) -> Tensor:
    """``unpack`` to ``dtype`` [n, in], after ``check_compiles``."""
    data = rows.reshape(-1, ggml_type.block_bytes)
    return _compiled(ggml_type, dtype, rows.device)(data).reshape(len(rows), -1)


@cache
def _compiled(ggml_type: GgmlType, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Compiled for one device: torch would recompile for each device, and stops after a few recompilations."""
    expand = expander(ggml_type)
    compiled: Callable[[Tensor], Tensor] = torch.compile(
        lambda data: expand(data).to(dtype), dynamic=True, fullgraph=True, backend=BACKEND
    )
    return compiled
