"""Products with packed blocks, for few rows (memory-bound) and for many (compute-bound); dequantized matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slm_native.kernels.torch.triton._checks import check, on_device_of
from slm_native.kernels.torch.triton.formats import PackedFormat
from slm_native.kernels.torch.triton.formats._loads import load

_LANES = 512  # weights of a row of the tile that a warp has at a time, 16 for each thread
_FEW_PARTS = 2
_DEQUANTIZED = 1024  # weights that a program of ``dequantized`` has at a time
MAX_ROWS = 8
"""Most rows of activations in ``few_rows``; each needs an accumulator."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """Launch parameters of ``few_rows``.

    Attributes:
        rows: the largest product of rows of the matrix that a thread reads at a time and rows of activations; a power
            of two. Types without ``terms`` whose blocks have many parts use 1, because their weights take many
            registers.
        num_warps: warps of a program.
        programs: the number of programs of one warp that fills a GPU. A matrix with fewer programs has programs of one
            warp, whose threads read one row each unless the product is gated.
    """

    rows: int = 4
    num_warps: int = 4
    programs: int = 1024


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


FEW_ROWS = (FewRows(), FewRows(rows=1), FewRows(rows=2), FewRows(rows=8), FewRows(num_warps=1))
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
def _sums(x, PER_THREAD: tl.constexpr):  # noqa: N803  (Triton's custom for constants)
    """Sums of consecutive values of one thread: [Q, N, WIDTH // PER_THREAD]."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // PER_THREAD, PER_THREAD)), axis=3)


@triton.jit
def _few_rows(
    x_ptr,
    w_ptr,
    residual_ptr,
    y_ptr,
    n_rows,
    n_out,
    n_blocks,
    row_bytes,
    STEP: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    N_STEPS: tl.constexpr,  # noqa: N803
    N_GROUPS: tl.constexpr,  # noqa: N803
    PER_THREAD: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    BLOCK_BYTES: tl.constexpr,  # noqa: N803
    M: tl.constexpr,  # noqa: N803
    R: tl.constexpr,  # noqa: N803
    Q: tl.constexpr,  # noqa: N803
    N: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
    ADDED: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
):
    """R * Q rows of the matrix, N blocks at a time. A thread has R rows, and loads activations once for all of them.

    Threads exchange nothing before the end: each sums ``PER_THREAD`` consecutive values. With ``GATED``, every second
    row of a thread is one of the matrix's lower half.
    """
    q, n = tl.arange(0, Q)[:, None, None], tl.arange(0, N)[None, :, None]
    j = tl.arange(0, WIDTH)[None, None, :]
    n_in = n_blocks * BLOCK_SIZE
    half: tl.constexpr = 2 if GATED else 1
    height = n_out // half
    first = tl.program_id(0) * (R // half * Q)
    totals = (tl.zeros((Q, N, WIDTH // PER_THREAD), tl.float32),) * (R * M)
    for start in range(0, n_blocks, N):
        block = start + n
        for s in tl.static_range(N_STEPS):
            at = block * BLOCK_SIZE + j + 0 * q
            there = block + 0 * (q + j) < n_blocks if MASKED else None
            x, x_sums = (), ()
            for m in tl.static_range(M):
                row_of_x = x_ptr + tl.minimum(m, n_rows - 1) * n_in + at
                for g in tl.static_range(N_GROUPS):
                    part = load(row_of_x + COLUMNS[s * N_GROUPS + g], there)  # [Q, N, WIDTH]
                    x += (part,)
                    if PER_THREAD > 1:
                        x_sums += (_sums(part, PER_THREAD),)
            sums = ()
            for r in tl.static_range(R):
                row = first + r // half * Q + q
                mask = (row < height) & (block < n_blocks) if MASKED else None
                row += r % half * height
                blocks = w_ptr + row.to(tl.int64) * row_bytes + block * BLOCK_BYTES
                step = STEP(blocks, s, j, mask)
                for m in tl.static_range(M):
                    total = totals[r * M + m]
                    for g in tl.static_range(N_GROUPS):
                        if PER_THREAD > 1:
                            total += _sums(step[3 * g] * x[m * N_GROUPS + g], PER_THREAD) * step[3 * g + 1]
                            total -= x_sums[m * N_GROUPS + g] * step[3 * g + 2]
                        else:
                            total += step * x[m * N_GROUPS + g]
                    sums += (total,)
            totals = sums
    for r in tl.static_range(R // half):
        rows = first + r * Q + tl.arange(0, Q)
        for m in tl.static_range(M):
            y = tl.sum(tl.sum(totals[half * r * M + m], axis=2), axis=1)  # [Q]
            out, there = m * height + rows, (rows < height) & (m + 0 * rows < n_rows)
            if GATED:
                y = y / (1 + tl.exp(-y)) * tl.sum(tl.sum(totals[(half * r + 1) * M + m], axis=2), axis=1)
            if ADDED:
                y += tl.load(residual_ptr + out, mask=there, other=0.0)
            tl.store(y_ptr + out, y, mask=there)


def few_rows(
    x: Tensor,
    packed: Tensor,
    form: PackedFormat,
    residual: Tensor | None = None,
    way: FewRows = FEW_ROWS[0],
    *,
    gated: bool = False,
) -> Tensor:
    """``x @ weight.T + residual`` for few rows of ``x``, in float32, without rounding of weights.

    Args:
        x: float32 [T, in], T from 1 to ``MAX_ROWS``.
        packed: uint8 [out, bytes of a row].
        form: format of the blocks; its block size divides ``in``.
        residual: float32 [T, out], or None.
        way: launch parameters.
        gated: the matrix is gate above up; the result is ``silu(x @ gate.T) * (x @ up.T)``, [T, out / 2].

    Returns:
        float32 [T, out].

    Raises:
        ValueError: another type, shape or layout.
    """
    n_rows, n_out = len(x), len(packed)
    n_blocks = _checked_blocks(x, packed, form)
    if not 1 <= n_rows <= MAX_ROWS:
        raise ValueError(f"x has {n_rows} rows (accepted: 1 to {MAX_ROWS})")
    half = 2 if gated else 1
    if n_out % half or (gated and residual is not None):
        raise ValueError(f"a gated product of {n_out} rows (accepted: an even number, without a residual)")
    if residual is not None:
        check("residual", residual, torch.float32, (n_rows, n_out))
    m = triton.next_power_of_2(n_rows)
    r = max(half, way.rows // m if form.per_thread > 1 or form.n_parts <= _FEW_PARTS else 1)
    _, q = _tile(form, n_blocks, 1)
    are_many = triton.cdiv(n_out, r * q) >= way.programs
    r, num_warps = (r, way.num_warps) if are_many else (r if gated else 1, 1)
    n, q = _tile(form, n_blocks, num_warps)
    y = torch.empty(n_rows, n_out // half, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _few_rows[(triton.cdiv(n_out, r * q),)](
            *(x, packed, x if residual is None else residual, y),
            *(n_rows, n_out, n_blocks, packed.shape[1]),
            STEP=form.part if form.terms is None else form.terms,
            COLUMNS=sum(form.columns, ()),
            N_STEPS=len(form.columns),
            N_GROUPS=len(form.columns[0]),
            PER_THREAD=form.per_thread,
            WIDTH=form.width,
            BLOCK_SIZE=form.block_size,
            BLOCK_BYTES=form.block_bytes,
            M=m,
            R=r,
            Q=q,
            N=n,
            MASKED=n_blocks % n > 0 or n_out % (r * q) > 0,
            ADDED=residual is not None,
            GATED=gated,
            num_warps=num_warps,
        )
    return y


def _tile(form: PackedFormat, n_blocks: int, num_warps: int) -> tuple[int, int]:
    """The blocks and the rows of a tile that gives 16 weights to each thread."""
    blocks = num_warps * _LANES // form.width
    n = min(blocks, triton.next_power_of_2(n_blocks))
    return n, blocks // n


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
