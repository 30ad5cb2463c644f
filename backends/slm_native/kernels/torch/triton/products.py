"""Products with packed blocks, for few rows (memory-bound) and for many (compute-bound); dequantized matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slm_native.kernels.torch.triton._checks import check, on_device_of
from slm_native.kernels.torch.triton.formats import PackedFormat

_ROWS = 4  # rows of the matrix that a program of ``few_rows`` reads side by side
_LANES_OF_WARP = 512  # 16 per thread
_DEQUANTIZED = 1024  # weights that a program of ``dequantized`` has at a time
MAX_ROWS = 8
"""Most rows of activations in ``few_rows``; each needs an accumulator."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """Launch parameters of ``few_rows``.

    Attributes:
        lanes: weights that a program unpacks at a time, times the rows of activations.
        programs: number of programs that fills a device; with fewer, the blocks of a row are split among programs.
        num_warps: most warps of a program.
    """

    lanes: int = 2048  # 16 registers per thread
    programs: int = 1024
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class ManyRows:
    """Launch parameters of ``many_rows``.

    Attributes:
        rows: largest number of rows of a tile.
        columns: columns of a tile.
        num_warps: warps of a program.
    """

    rows: int = 64
    columns: int = 64
    num_warps: int = 4


FEW_ROWS = (
    FewRows(),
    FewRows(lanes=1024),
    FewRows(lanes=1024, num_warps=2),
    FewRows(lanes=4096, num_warps=8),
    FewRows(programs=4096),
    FewRows(lanes=1024, programs=4096, num_warps=2),
)
"""The choices for tuning; the first is the default."""

MANY_ROWS = (
    ManyRows(),
    ManyRows(columns=32),
    ManyRows(columns=128, num_warps=8),
    ManyRows(rows=32),
    ManyRows(rows=128, num_warps=8),
)
"""The choices for tuning; the first is the default."""


@triton.jit
def _few_rows(
    x_ptr,
    w_ptr,
    residual_ptr,
    y_ptr,
    n_rows,
    n_out,
    n_in,
    n_blocks,
    row_bytes,
    blocks_per_split,
    PART: tl.constexpr,  # noqa: N803  (Triton's custom for constants)
    N_PARTS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK_BYTES: tl.constexpr,  # noqa: N803
    M: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    N: tl.constexpr,  # noqa: N803
    ADDED: tl.constexpr,  # noqa: N803
):
    """R rows of the matrix, N blocks at a time, one lane per weight of a part; lanes are summed at the end."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    split = tl.program_id(1)
    j = tl.arange(0, WIDTH)[None, None, :]
    m = tl.arange(0, M)
    total = tl.zeros((R, N, WIDTH), tl.float32) if M == 1 else tl.zeros((M, R, N, WIDTH), tl.float32)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, n_blocks)
    for start in range(first, last, N):
        block = start + tl.arange(0, N)
        pointers = w_ptr + rows[:, None, None].to(tl.int64) * row_bytes + block[None, :, None] * BLOCK_BYTES
        mask = (rows[:, None, None] < n_out) & (block[None, :, None] < last)
        for p in tl.static_range(N_PARTS):
            weights = PART(pointers, p, j, mask)  # [R, N, WIDTH]
            column = (block[None, :, None] * N_PARTS + p) * WIDTH + j
            if M == 1:  # loaded in the shape of the weights, which need no exchange between threads then
                total += weights * tl.load(x_ptr + column + 0 * rows[:, None, None], mask=mask, other=0.0)
            else:
                there = (m[:, None, None] < n_rows) & (block[None, :, None] < last)
                x = tl.load(x_ptr + m[:, None, None] * n_in + column, mask=there, other=0.0)  # [M, N, WIDTH]
                total += weights[None] * x[:, None]
    sums = tl.sum(tl.sum(total, axis=2), axis=1)[None, :] if M == 1 else tl.sum(tl.sum(total, axis=3), axis=2)  # [M, R]
    out, there = m[:, None] * n_out + rows[None, :], (m[:, None] < n_rows) & (rows[None, :] < n_out)
    if ADDED:
        first = split + 0 * rows[None, :] == 0  # of every row: a number compared alone is no mask in the interpreter
        sums += tl.load(residual_ptr + out, mask=there & first, other=0.0)
    tl.store(y_ptr + split * n_rows * n_out + out, sums, mask=there)


def few_rows(
    x: Tensor, packed: Tensor, form: PackedFormat, residual: Tensor | None = None, way: FewRows = FEW_ROWS[0]
) -> Tensor:
    """``x @ weight.T + residual`` for few rows of ``x``, in float32, without rounding of weights.

    If the matrix has few rows, each is split among programs, and their sums are added in a fixed order.

    Args:
        x: float32 [T, in], T from 1 to ``MAX_ROWS``.
        packed: uint8 [out, bytes of a row].
        form: format of the blocks; its block size divides ``in``.
        residual: float32 [T, out], or None.
        way: launch parameters.

    Returns:
        float32 [T, out].

    Raises:
        ValueError: another type, shape or layout.
    """
    n_rows, n_in, n_out = len(x), x.shape[-1], len(packed)
    n_blocks = _checked_blocks(x, packed, form)
    if not 1 <= n_rows <= MAX_ROWS:
        raise ValueError(f"x has {n_rows} rows (accepted: 1 to {MAX_ROWS})")
    if residual is not None:
        check("residual", residual, torch.float32, (n_rows, n_out))
    m = triton.next_power_of_2(n_rows)
    n = min(max(1, way.lanes // (_ROWS * m * form.width)), triton.next_power_of_2(n_blocks))
    r = _ROWS if m == 1 else max(1, way.lanes // (m * n * form.width))
    num_warps = min(way.num_warps, max(1, m * r * n * form.width // _LANES_OF_WARP))
    n_groups = triton.cdiv(n_out, r)
    n_splits = max(1, min(way.programs // n_groups, n_blocks // (4 * n)))
    per_split = triton.cdiv(triton.cdiv(n_blocks, n_splits), n) * n
    n_splits = triton.cdiv(n_blocks, per_split)
    y = torch.empty(n_splits, n_rows, n_out, dtype=torch.float32, device=x.device)
    constants = {"PART": form.part, "N_PARTS": form.n_parts, "WIDTH": form.width, "BLOCK_BYTES": form.block_bytes}
    sizes = (n_rows, n_out, n_in, n_blocks, packed.shape[1], per_split)
    with on_device_of(x):
        _few_rows[n_groups, n_splits](
            *(x, packed, x if residual is None else residual, y, *sizes),
            **constants,
            M=m,
            R=r,
            N=n,
            ADDED=residual is not None,
            num_warps=num_warps,
        )
    return y[0] if n_splits == 1 else y.sum(dim=0)


@triton.jit
def _many_rows(
    x_ptr,
    w_ptr,
    y_ptr,
    n_rows,
    n_out,
    n_in,
    n_blocks,
    row_bytes,
    PART: tl.constexpr,  # noqa: N803
    N_PARTS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK_BYTES: tl.constexpr,  # noqa: N803
    BM: tl.constexpr,  # noqa: N803
    BN: tl.constexpr,  # noqa: N803
):
    """A tile [BM, BN] of the result. Each product of tiles dequantizes one part of a block of BN rows."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros((BM, BN), tl.float32)
    for block in range(n_blocks):
        pointers = w_ptr + columns[:, None, None].to(tl.int64) * row_bytes + block * BLOCK_BYTES
        for p in tl.static_range(N_PARTS):
            weights = PART(pointers, p, lanes[None, None, :], columns[:, None, None] < n_out)  # [BN, 1, WIDTH]
            k = (block * N_PARTS + p) * WIDTH + lanes
            x = tl.load(x_ptr + rows[:, None] * n_in + k[None, :], mask=rows[:, None] < n_rows, other=0.0)
            tile = tl.reshape(weights, (BN, WIDTH)).to(x.dtype)
            total = tl.dot(x, tl.trans(tile), total, input_precision="ieee")
    there = (rows[:, None] < n_rows) & (columns[None, :] < n_out)
    tl.store(y_ptr + rows[:, None] * n_out + columns[None, :], total, mask=there)


def many_rows(x: Tensor, packed: Tensor, form: PackedFormat, way: ManyRows = MANY_ROWS[0]) -> Tensor:
    """``x @ weight.T`` for many rows of ``x``; weights are rounded to its number format, sums are float32.

    Args:
        x: float32, bfloat16 or float16 [T, in].
        packed: uint8 [out, bytes of a row].
        form: format of the blocks; its block size divides ``in``.
        way: launch parameters.

    Returns:
        float32 [T, out].

    Raises:
        ValueError: another type, shape or layout.
    """
    n_blocks = _checked_blocks(x, packed, form)
    n_rows, n_out = len(x), len(packed)
    y = torch.empty(n_rows, n_out, dtype=torch.float32, device=x.device)
    bm, bn = (16 if n_rows <= 16 else way.rows), way.columns
    constants = {"PART": form.part, "N_PARTS": form.n_parts, "WIDTH": form.width, "BLOCK_BYTES": form.block_bytes}
    grid = (triton.cdiv(n_rows, bm), triton.cdiv(n_out, bn))
    sizes = (n_rows, n_out, x.shape[1], n_blocks, packed.shape[1])
    with on_device_of(x):
        _many_rows[grid](x, packed, y, *sizes, **constants, BM=bm, BN=bn, num_warps=way.num_warps)
    return y


@triton.jit
def _dequantized(
    w_ptr,
    y_ptr,
    n_out,
    n_in,
    n_blocks,
    row_bytes,
    PART: tl.constexpr,  # noqa: N803
    N_PARTS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK_BYTES: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    N: tl.constexpr,  # noqa: N803
):
    """N blocks of R rows."""
    rows = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None, None]
    block = (tl.program_id(1) * N + tl.arange(0, N))[None, :, None]
    j = tl.arange(0, WIDTH)[None, None, :]
    mask = (rows < n_out) & (block < n_blocks)
    for p in tl.static_range(N_PARTS):
        weights = PART(w_ptr + rows * row_bytes + block * BLOCK_BYTES, p, j, mask)  # [R, N, WIDTH]
        at = rows * n_in + (block * N_PARTS + p) * WIDTH + j
        tl.store(y_ptr + at, weights.to(y_ptr.dtype.element_ty), mask=mask)


def dequantized(packed: Tensor, form: PackedFormat, dtype: torch.dtype) -> Tensor:
    """The weights of packed rows, computed in float32 and rounded once.

    Args:
        packed: uint8 [out, bytes of a row], whole blocks.
        form: format of the blocks.
        dtype: float32, bfloat16 or float16.

    Returns:
        [out, in].

    Raises:
        ValueError: another type, shape or layout.
    """
    n_out, row_bytes = packed.shape
    n_blocks = row_bytes // form.block_bytes
    check("packed", packed, torch.uint8, (None, n_blocks * form.block_bytes))
    y = torch.empty(n_out, n_blocks * form.block_size, dtype=dtype, device=packed.device)
    n = min(triton.next_power_of_2(n_blocks), _DEQUANTIZED // form.width)
    r = max(1, _DEQUANTIZED // (n * form.width))
    constants = {"PART": form.part, "N_PARTS": form.n_parts, "WIDTH": form.width, "BLOCK_BYTES": form.block_bytes}
    grid = (triton.cdiv(n_out, r), triton.cdiv(n_blocks, n))
    with on_device_of(packed):
        _dequantized[grid](packed, y, n_out, y.shape[1], n_blocks, row_bytes, **constants, R=r, N=n)
    return y


def _checked_blocks(x: Tensor, packed: Tensor, form: PackedFormat) -> int:
    """Check the arguments, and return the number of blocks of a row."""
    if x.dim() != 2 or x.shape[1] % form.block_size:
        raise ValueError(f"x is {tuple(x.shape)} (accepted: [T, a multiple of {form.block_size}])")
    n_blocks = x.shape[1] // form.block_size
    check("x", x, x.dtype, (None, None))
    check("packed", packed, torch.uint8, (None, n_blocks * form.block_bytes))
    return n_blocks
