"""Decoding attention, one new token per sequence, over pages of the KV cache (flash-decoding, Dao et al. 2023).

The tiles of a sequence, a page or a part of one, are split among programs. Each computes a softmax and a sum of values
over its tiles; a second kernel combines the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slm_core.types import KvType
from slm_native.kernels.parameters import PLAIN, Scoring
from slm_native.kernels.torch.pages import DecodeGroup, TorchKvLayer
from slm_native.kernels.torch.triton._checks import check, on_device_of
from slm_native.kv import PAGE_TOKENS

_PROGRAMS = 128  # enough to fill a GPU; with fewer, the tiles of a sequence are split
_MOST_SPLITS = 64  # of a sequence: more cost more to combine than they save
_NIBBLES = (KvType.Q5_0, KvType.Q4_0)
_MIN_GROUP = 16  # smallest number of rows in tl.dot
_STAGES = 2  # tiles that are loaded at a time
_WIDE = 512  # heads from this width on have more warps, so that registers do not spill
_TILE_BYTES = 32 << 10  # of the keys and values of all stages; a device has 64 KiB of shared memory or more
_JOINED = 2048  # numbers that are combined at a time
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _read(plane, scales, fifth, d, t, D: tl.constexpr, KIND: tl.constexpr, mask):  # noqa: N803  (Triton's custom)
    """Keys or values [TILE, D padded] of one head, float32."""
    if KIND == "q4_0" or KIND == "q5_0":
        at = t[:, None] * (D // 2) + d[None, :] // 32 * 16 + d[None, :] % 16
        code = tl.load(plane + at, mask=mask, other=0).to(tl.int32) >> d[None, :] % 32 // 16 * 4 & 15
        if KIND == "q4_0":
            x = (code - 8).to(tl.float32)
        else:
            bits = tl.load(fifth + t[:, None] * (D // 32) + d[None, :] // 32, mask=mask, other=0)
            x = ((code | (bits >> d[None, :] % 32 & 1) << 4) - 16).to(tl.float32)
    else:
        stored = tl.load(plane + t[:, None] * D + d[None, :], mask=mask, other=0)
        if KIND == "bf16":
            x = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        elif KIND == "f8_e4m3":  # its exponent and fraction in a float16, whose bias is 8 more
            code = stored.to(tl.int32)
            x = ((code & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
            x = tl.where(code > 127, -x, x)
        else:
            x = stored.to(tl.float32)
    if KIND == "q8_0" or KIND == "q5_0" or KIND == "q4_0":
        x *= tl.load(scales + t[:, None] * (D // 32) + d[None, :] // 32, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _scored(scores, seen, distance, slopes, real, softcap, CAPPED: tl.constexpr, SLOPED: tl.constexpr):  # noqa: N803
    """Scores [G, TILE] after soft cap, ALiBi and mask."""
    if CAPPED:
        scores = (1 - 2 / (tl.exp(2 * scores / softcap) + 1)) * softcap  # softcap * tanh(scores / softcap)
    if SLOPED:
        slope = tl.load(slopes, mask=real, other=0.0)
        scores -= slope[:, None] * distance[None, :].to(tl.float32)
    return tl.where(seen[None, :], scores, -float("inf"))


@triton.jit
def _attend_pages(
    q_ptr,
    k_ptr,
    k_scales,
    k_fifth,
    v_ptr,
    v_scales,
    v_fifth,
    row_ids,
    tables,
    n_held,
    slopes,
    mixed_ptr,
    largest_ptr,
    total_ptr,
    scale,
    softcap,
    window,
    n_table,
    k_page,
    k_scale_page,
    k_fifth_page,
    v_page,
    v_scale_page,
    v_fifth_page,
    H: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    G: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    DP: tl.constexpr,  # noqa: N803
    KW: tl.constexpr,  # noqa: N803
    VW: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    WINDOWED: tl.constexpr,  # noqa: N803
    SLOPED: tl.constexpr,  # noqa: N803
):
    """One sequence, one key head with its queries, one split of the tiles that the sequence has."""
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = tl.load(n_held + seq).to(tl.int32)
    g, d, t = tl.arange(0, G), tl.arange(0, DP), tl.arange(0, TILE)
    rows = tl.load(row_ids + seq).to(tl.int64) * H + head * GROUP + g
    real = g < GROUP
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)  # [G, DP]
    q = q.to(DTYPE)
    largest = tl.full((G,), -float("inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    mixed = tl.zeros((G, DP), tl.float32)
    start = tl.maximum(held - window, 0) // TILE if WINDOWED else 0
    end = tl.cdiv(held, TILE)
    per_split = tl.cdiv(end - start, tl.num_programs(2))
    first = start + split * per_split
    for tile in range(first, tl.minimum(first + per_split, end)):
        page, slot = tile // (PAGE // TILE), tile % (PAGE // TILE) * TILE
        number = tl.load(tables + seq * n_table + page).to(tl.int64)
        position = tile * TILE + t
        seen = position < held
        if WINDOWED:
            seen &= position >= held - window
        mask = seen[:, None] & (d[None, :] < D)
        lines = head * PAGE + slot
        k_at = k_ptr + number * k_page + lines * KW
        k_scales_at = k_scales + number * k_scale_page + lines * (D // 32)
        k_fifth_at = k_fifth + number * k_fifth_page + lines * (D // 32)
        k = _read(k_at, k_scales_at, k_fifth_at, d, t, D, KEYS, mask).to(DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [G, TILE]
        scores = _scored(scores, seen, held - 1 - position, slopes + head * GROUP + g, real, softcap, CAPPED, SLOPED)
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shares, kept = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        v_at = v_ptr + number * v_page + lines * VW
        v_scales_at = v_scales + number * v_scale_page + lines * (D // 32)
        v_fifth_at = v_fifth + number * v_fifth_page + lines * (D // 32)
        v = _read(v_at, v_scales_at, v_fifth_at, d, t, D, VALUES, mask).to(DTYPE)
        total = total * kept + tl.sum(shares, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(shares.to(DTYPE), v, input_precision="ieee")
        largest = higher
    out = (split * tl.num_programs(0) + seq).to(tl.int64) * H + head * GROUP + g
    tl.store(mixed_ptr + out[:, None] * D + d[None, :], mixed, mask=real[:, None] & (d[None, :] < D))
    tl.store(largest_ptr + out, largest, mask=real)
    tl.store(total_ptr + out, total, mask=real)


@triton.jit
def _join(
    mixed_ptr,
    largest_ptr,
    total_ptr,
    sinks,
    row_ids,
    y_ptr,
    n_rows,
    n_splits,
    H: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    DP: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    SUNK: tl.constexpr,  # noqa: N803
):
    """Combine all splits for one head of one sequence, ``SPLITS`` at a time."""
    row, d, s = tl.program_id(0), tl.arange(0, DP), tl.arange(0, SPLITS)
    highest = tl.load(sinks + row % H) if SUNK else -float("inf")
    for start in range(0, n_splits, SPLITS):
        largest = tl.load(largest_ptr + (start + s) * n_rows + row, mask=start + s < n_splits, other=-float("inf"))
        highest = tl.maximum(highest, tl.max(largest, axis=0))
    total = tl.exp(tl.load(sinks + row % H) - highest) if SUNK else 0.0
    mixed = tl.zeros((DP,), tl.float32)
    for start in range(0, n_splits, SPLITS):
        at, there = (start + s) * n_rows + row, start + s < n_splits
        shares = tl.exp(tl.load(largest_ptr + at, mask=there, other=-float("inf")) - highest)
        total += tl.sum(shares * tl.load(total_ptr + at, mask=there, other=0.0), axis=0)
        mask = there[:, None] & (d[None, :] < D)
        parts = tl.load(mixed_ptr + at[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)
        mixed += tl.sum(shares[:, None] * parts, axis=0)
    out = tl.load(row_ids + row // H).to(tl.int64) * H + row % H
    tl.store(y_ptr + out * D + d, mixed / total, mask=d < D)


def attend_decoding(
    q: Tensor,
    cache: TorchKvLayer,
    group: DecodeGroup,
    scale: float,
    scoring: Scoring = PLAIN,
    *,
    dtype: torch.dtype,
    out: Tensor,
) -> None:
    """Attention of sequences of different lengths with one token each; pages are read in place.

    The number of programs depends on the number of sequences, not on their lengths, so that a captured launch serves
    all lengths.

    Args:
        q: float32 [T, H, D], the queries of the batch.
        cache: one layer of the cache, of any KV type.
        group: the sequences; each has at least one token.
        scale: factor on ``q · k``.
        scoring: window, soft cap, ALiBi and sinks.
        dtype: number format of products: float32, bfloat16 or float16; sums are float32.
        out: float32 [T, H, D]; the rows of the group are written.

    Raises:
        ValueError: another type, shape or layout.
    """
    _check(q, cache, group, scoring, out)
    n_seqs, n_heads, width, n_kv_heads = len(group.rows), *q.shape[1:], cache.key_planes[0].shape[1]
    n_table = group.tables.shape[1]
    padded = triton.next_power_of_2(width)
    tile = _tile(padded, dtype)
    n_splits = max(1, min(n_table * (PAGE_TOKENS // tile), _PROGRAMS // (n_seqs * n_kv_heads), _MOST_SPLITS))
    mixed = torch.empty(n_splits, n_seqs, n_heads, width, dtype=torch.float32, device=q.device)
    largest, total = (torch.empty(n_splits, n_seqs, n_heads, dtype=torch.float32, device=q.device) for _ in range(2))
    grouped = n_heads // n_kv_heads
    keys, values = (_three(planes) for planes in (cache.key_planes, cache.value_planes))
    n_rows = n_seqs * n_heads
    with on_device_of(q):
        _attend_pages[n_seqs, n_kv_heads, n_splits](
            *(q, *keys, *values, group.rows, group.tables, group.n_held),
            *(q if scoring.slopes is None else scoring.slopes, mixed, largest, total),
            *(scale, scoring.softcap or 1.0, scoring.window or 0, n_table),
            *(plane.stride(0) for plane in (*keys, *values)),
            H=n_heads,
            GROUP=grouped,
            G=max(_MIN_GROUP, triton.next_power_of_2(grouped)),
            D=width,
            DP=padded,
            KW=keys[0].shape[3],
            VW=values[0].shape[3],
            KEYS=str(cache.key_type),
            VALUES=str(cache.value_type),
            PAGE=PAGE_TOKENS,
            TILE=tile,
            DTYPE=_TRITON_TYPES[dtype],
            CAPPED=scoring.softcap is not None,
            WINDOWED=scoring.window is not None,
            SLOPED=scoring.slopes is not None,
            num_warps=8 if padded >= _WIDE else 4,
            num_stages=_STAGES,
        )
        _join[(n_rows,)](
            *(mixed, largest, total, q if scoring.sinks is None else scoring.sinks, group.rows, out, n_rows, n_splits),
            H=n_heads,
            D=width,
            DP=padded,
            SPLITS=min(triton.next_power_of_2(n_splits), max(1, _JOINED // padded)),
            SUNK=scoring.sinks is not None,
        )


def _tile(width: int, dtype: torch.dtype) -> int:
    """Tokens of a tile, a power of two: keys and values of all stages fit in the shared memory of every device."""
    fitting = _TILE_BYTES // (2 * _STAGES * width * dtype.itemsize)
    return min(PAGE_TOKENS, max(_MIN_GROUP, fitting))


def _three(planes: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The planes of values, scales and fifth bits; any tensor for a plane that the type does not have."""
    return planes[0], planes[min(1, len(planes) - 1)], planes[-1]


def _check(q: Tensor, cache: TorchKvLayer, group: DecodeGroup, scoring: Scoring, out: Tensor) -> None:
    _, n_heads, width = q.shape
    check("q", q, torch.float32, (None, n_heads, width))
    check("out", out, torch.float32, tuple(q.shape))
    check("rows", group.rows, torch.int64, (None,))
    check("tables", group.tables, torch.int64, (len(group.rows), None))
    check("n_held", group.n_held, torch.int64, (len(group.rows),))
    for name, per_head in (("slopes", scoring.slopes), ("sinks", scoring.sinks)):
        if per_head is not None:
            check(name, per_head, torch.float32, (n_heads,))
    for planes in (cache.key_planes, cache.value_planes):
        n_kv_heads = planes[0].shape[1]
        n_halves = 1 + (cache.key_type in _NIBBLES if planes is cache.key_planes else cache.value_type in _NIBBLES)
        if planes[0].shape[3] * n_halves != width or n_heads % n_kv_heads:
            raise ValueError(f"pages {tuple(planes[0].shape)} (accepted: heads of {width}, a divisor of {n_heads})")
        for plane in planes:
            if plane.stride()[1:] != (PAGE_TOKENS * plane.shape[3], plane.shape[3], 1):
                raise ValueError(f"pages have strides {plane.stride()} (accepted: heads, slots, values in order)")
