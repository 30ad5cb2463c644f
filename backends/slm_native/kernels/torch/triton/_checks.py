"""Checks of a wrapper before it launches a kernel, and the device of the launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the device of ``x`` current: Triton launches kernels on the current CUDA device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Check a tensor that a kernel reads; ``None`` in ``shape`` is any size.

    Raises:
        ValueError: another type or shape, or a tensor that is not contiguous.
    """
    _check_type(name, x, dtype, shape)
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()} (accepted: contiguous)")


def check_rows(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Like ``check``, for a tensor whose rows may be parts of longer rows.

    Raises:
        ValueError: another type or shape, or rows that are not contiguous.
    """
    _check_type(name, x, dtype, shape)
    if len(x) and not x[0].is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()} (accepted: contiguous rows)")


def _check_type(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    fits = x.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(x.shape, shape, strict=True)
    )
    if x.dtype != dtype or not fits:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)} (accepted: {dtype} {shape})")
