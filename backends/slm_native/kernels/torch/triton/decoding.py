"""Decoding attention, one new token per sequence, over pages of the KV cache (flash-decoding, Dao et al. 2023).

The tiles of a sequence, a page or a part of one, are split among programs. Each computes a softmax and a sum of values
over its tiles; the last program of a head to finish combines the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slm_core.architectures import RopeStyle
from slm_core.types import KvType
from slm_native.kernels.parameters import PLAIN, Scoring
from slm_native.kernels.torch.pages import DecodeGroup, TorchKvLayer
from slm_native.kernels.torch.triton._checks import check, check_rows, on_device_of
from slm_native.kernels.torch.triton.small_steps import positioned, write_head
from slm_native.kv import PAGE_TOKENS

_PROGRAMS = 128  # enough to fill a GPU; with fewer, the tiles of a sequence are split
_MOST_SPLITS = 64  # of a sequence: more cost more to combine than they save
WRITTEN = {KvType.F32, KvType.F16, KvType.Q8_0}
"""The KV types that kernels write; torch encodes the other types."""
_NIBBLES = (KvType.Q6_0, KvType.Q5_0, KvType.Q4_0)
_MIN_GROUP = 16  # smallest number of rows in tl.dot
_STAGES = 2  # tiles that are loaded at a time
_WIDE = 512  # programs for heads of at least this width have more warps, so that registers do not spill
_TILE_BYTES = 32 << 10  # of the keys and values of all stages; a device has 64 KiB of shared memory or more
_JOINED = 8192  # numbers that are combined at a time
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _read(plane, scales, high, d, t, D: tl.constexpr, KIND: tl.constexpr, mask):  # noqa: N803  (Triton's custom)
    """Keys or values [TILE, D padded] of one head, float32."""
    if KIND == "q4_0" or KIND == "q5_0" or KIND == "q6_0":
        at = t[:, None] * (D // 2) + d[None, :] // 32 * 16 + d[None, :] % 16
        code = tl.load(plane + at, mask=mask, other=0).to(tl.int32) >> d[None, :] % 32 // 16 * 4 & 15
        if KIND == "q4_0":
            x = (code - 8).to(tl.float32)
        else:
            bits = tl.load(high + t[:, None] * (D // 32) + d[None, :] // 32, mask=mask, other=0)
            code |= ((bits >> d[None, :] % 32 & 1) << 4).to(tl.int32)
            if KIND == "q5_0":
                x = (code - 16).to(tl.float32)
            else:
                code |= ((bits >> d[None, :] % 32 + 32 & 1) << 5).to(tl.int32)
                x = (code - 32).to(tl.float32)
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
    if KIND == "q8_0" or KIND == "q6_0" or KIND == "q5_0" or KIND == "q4_0":
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
def _write_new(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    plane,
    scales,
    page_stride,
    scale_page_stride,
    page,
    line,
    eps,
    D: tl.constexpr,  # noqa: N803
    DP: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    NORMED: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
):
    """Normalize, rotate, encode and write one head of a new token's keys or values to its page."""
    d = tl.arange(0, DP)
    x = positioned(x_ptr, weight_ptr, cos_ptr, sin_ptr, d, d < D, eps, D, HALF, NORMED, INTERLEAVED, 0)
    blocks: tl.constexpr = D // 32 if KIND == "q8_0" else 0
    write_head(x, plane + page * page_stride, scales + page * scale_page_stride, line, d, D, DP, blocks)


@triton.jit
def _attend_pages(
    q_ptr,
    new_k,
    new_v,
    q_norm,
    k_norm,
    cos,
    sin,
    pages,
    slots,
    k_ptr,
    k_scales,
    k_high,
    v_ptr,
    v_scales,
    v_high,
    row_ids,
    tables,
    n_held,
    slopes,
    mixed_ptr,
    largest_ptr,
    total_ptr,
    arrivals,
    sinks,
    y_ptr,
    scale,
    softcap,
    q_eps,
    k_eps,
    window,
    n_table,
    q_row,
    k_row,
    v_row,
    k_page,
    k_scale_page,
    k_high_page,
    v_page,
    v_scale_page,
    v_high_page,
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
    NEW: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    INTERLEAVED: tl.constexpr,  # noqa: N803
    Q_NORMED: tl.constexpr,  # noqa: N803
    K_NORMED: tl.constexpr,  # noqa: N803
    JOINED: tl.constexpr,  # noqa: N803
    GP: tl.constexpr,  # noqa: N803
    JOINED_SPLITS: tl.constexpr,  # noqa: N803
    SUNK: tl.constexpr,  # noqa: N803
):
    """Attention of one sequence and one key head with its queries, over one split of the sequence's tiles.

    With ``NEW``, queries, keys and values are projections. Queries are normalized and rotated here. The program of the
    last tile also writes the new token's key and value. With ``JOINED``, the last program of a key head combines the
    results of all its programs; ``arrivals`` counts them, and is 0 again afterwards.
    """
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = tl.load(n_held + seq).to(tl.int32)
    g, d, t = tl.arange(0, G), tl.arange(0, DP), tl.arange(0, TILE)
    token = tl.load(row_ids + seq).to(tl.int64)
    real = g < GROUP
    q_heads = q_ptr + token * q_row + (head * GROUP + g)[:, None] * D
    if NEW:
        q_real, angles = real[:, None] & (d[None, :] < D), token * HALF
        q = positioned(
            *(q_heads, q_norm, cos + angles, sin + angles, d[None, :], q_real, q_eps),
            *(D, HALF, Q_NORMED, INTERLEAVED, 1),
        )  # [G, DP]
    else:
        q = tl.load(q_heads + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)  # [G, DP]
    q = q.to(DTYPE)
    largest = tl.full((G,), -float("inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    mixed = tl.zeros((G, DP), tl.float32)
    start = tl.maximum(held - window, 0) // TILE if WINDOWED else 0
    end = tl.cdiv(held, TILE)
    per_split = tl.cdiv(end - start, tl.num_programs(2))
    first = start + split * per_split
    if NEW:  # noqa: SIM102  (a constant and a number of the device)
        if (first < end) & (first + per_split >= end):  # this program reads them after the barrier
            page, line = tl.load(pages + token), head * PAGE + tl.load(slots + token)
            k_head, v_head, angles = new_k + token * k_row + head * D, new_v + token * v_row + head * D, token * HALF
            k_place, v_place = (k_ptr, k_scales, k_page, k_scale_page), (v_ptr, v_scales, v_page, v_scale_page)
            of_keys = k_norm, cos + angles, sin + angles
            _write_new(k_head, *of_keys, *k_place, page, line, k_eps, D, DP, HALF, K_NORMED, INTERLEAVED, KEYS)
            _write_new(v_head, *of_keys, *v_place, page, line, k_eps, D, DP, 0, False, False, VALUES)
            tl.debug_barrier()
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
        k_high_at = k_high + number * k_high_page + lines * (D // 32)
        k = _read(k_at, k_scales_at, k_high_at, d, t, D, KEYS, mask).to(DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [G, TILE]
        scores = _scored(scores, seen, held - 1 - position, slopes + head * GROUP + g, real, softcap, CAPPED, SLOPED)
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shares, kept = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        v_at = v_ptr + number * v_page + lines * VW
        v_scales_at = v_scales + number * v_scale_page + lines * (D // 32)
        v_high_at = v_high + number * v_high_page + lines * (D // 32)
        v = _read(v_at, v_scales_at, v_high_at, d, t, D, VALUES, mask).to(DTYPE)
        total = total * kept + tl.sum(shares, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(shares.to(DTYPE), v, input_precision="ieee")
        largest = higher
    out = (split * tl.num_programs(0) + seq).to(tl.int64) * H + head * GROUP + g
    tl.store(mixed_ptr + out[:, None] * D + d[None, :], mixed, mask=real[:, None] & (d[None, :] < D))
    tl.store(largest_ptr + out, largest, mask=real)
    tl.store(total_ptr + out, total, mask=real)
    if JOINED:
        tl.debug_barrier()  # all threads have written before the program arrives
        counter = arrivals + seq * tl.num_programs(1) + head
        if tl.atomic_add(counter, 1) == tl.num_programs(2) - 1:
            _join_heads(
                *(mixed_ptr, largest_ptr, total_ptr, sinks, token, y_ptr, seq * H + head * GROUP, head * GROUP),
                *(tl.num_programs(0) * H, tl.num_programs(2), H, D, DP, GROUP, GP, JOINED_SPLITS, SUNK),
            )
            tl.store(counter, 0)


@triton.jit
def _join_heads(
    mixed_ptr,
    largest_ptr,
    total_ptr,
    sinks,
    token,
    y_ptr,
    row,
    head,
    n_rows,
    n_splits,
    H: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    DP: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    GP: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    SUNK: tl.constexpr,  # noqa: N803
):
    """Combine all splits for ``GROUP`` heads from ``head`` on of one token, ``SPLITS`` at a time.

    Results of other programs are read from the L2 cache, because the L1 cache of this multiprocessor may be older.
    """
    s, g, d = tl.arange(0, SPLITS)[:, None], tl.arange(0, GP), tl.arange(0, DP)
    real = g < GROUP
    highest = tl.where(real, -float("inf"), 0.0)
    if SUNK:
        highest = tl.load(sinks + head + g, mask=real, other=0.0)
    for start in range(0, n_splits, SPLITS):
        at, there = (start + s) * n_rows + row + g[None, :], (start + s < n_splits) & real[None, :]  # [SPLITS, GP]
        largest = tl.load(largest_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, tl.max(largest, axis=0))
    total = tl.zeros((GP,), tl.float32)
    if SUNK:
        total += tl.exp(tl.load(sinks + head + g, mask=real, other=0.0) - highest)
    mixed = tl.zeros((GP, DP), tl.float32)
    for start in range(0, n_splits, SPLITS):
        at, there = (start + s) * n_rows + row + g[None, :], (start + s < n_splits) & real[None, :]
        largest = tl.load(largest_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        shares = tl.exp(largest - highest[None, :])
        totals = tl.load(total_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
        total += tl.sum(shares * totals, axis=0)
        parts_at = mixed_ptr + at[:, :, None].to(tl.int64) * D + d[None, None, :]
        mask = there[:, :, None] & (d[None, None, :] < D)
        mixed += tl.sum(shares[:, :, None] * tl.load(parts_at, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
    y = mixed / tl.where(real, total, 1.0)[:, None]
    out = y_ptr + (token * H + head + g)[:, None] * D + d[None, :]
    tl.store(out, y, mask=real[:, None] & (d[None, :] < D))


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
    """Combine all splits for one head of one sequence."""
    row = tl.program_id(0)
    token = tl.load(row_ids + row // H).to(tl.int64)
    _join_heads(
        *(mixed_ptr, largest_ptr, total_ptr, sinks, token, y_ptr, row, row % H, n_rows, n_splits),
        *(H, D, DP, 1, 1, SPLITS, SUNK),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """Keys and values of the tokens of a batch, before norm and RoPE, and how queries and keys are normalized.

    Attributes:
        k: float32 [T, K * D]; the rows may be parts of longer ones.
        v: the same.
        q_norm: weight [D] and epsilon of the norm of queries; None without a norm.
        k_norm: the same, of keys.
        cos: float32 [T, R/2], R at most D; R = 0 rotates nothing.
        sin: the same.
        style: which values form a pair.
        pages: int64 [T], the page of each token.
        slots: int64 [T], the slot of each token on its page.
    """

    k: Tensor
    v: Tensor
    q_norm: tuple[Tensor, float] | None
    k_norm: tuple[Tensor, float] | None
    cos: Tensor
    sin: Tensor
    style: RopeStyle
    pages: Tensor
    slots: Tensor


def attend_decoding(
    q: Tensor,
    cache: TorchKvLayer,
    group: DecodeGroup,
    scale: float,
    scoring: Scoring = PLAIN,
    *,
    dtype: torch.dtype,
    out: Tensor,
    new: NewTokens | None = None,
) -> None:
    """Attention of sequences of different lengths with one token each; pages are read in place.

    The number of programs depends on the number of sequences, not on their lengths, so that a captured launch serves
    all lengths.

    Args:
        q: float32 [T, H, D], the queries of the batch; with ``new``, before norm and RoPE, and their rows may be parts
            of longer ones.
        cache: one layer of the cache, of any KV type; with ``new``, of ``WRITTEN``.
        group: the sequences; each has at least one token.
        scale: factor on ``q · k``.
        scoring: window, soft cap, ALiBi and sinks.
        dtype: number format of products: float32, bfloat16 or float16; sums are float32.
        out: float32 [T, H, D]; the rows of the group are written.
        new: keys and values that are not in the cache yet; they are written to it. None if the cache has them.

    Raises:
        ValueError: another type, shape or layout.
    """
    _check(q, cache, group, scoring, out, new)
    n_seqs, n_heads, width, n_kv_heads = len(group.rows), *q.shape[1:], cache.key_planes[0].shape[1]
    n_table = group.tables.shape[1]
    padded = triton.next_power_of_2(width)
    tile = _tile(padded, dtype)
    n_splits = max(1, min(n_table * (PAGE_TOKENS // tile), _PROGRAMS // (n_seqs * n_kv_heads), _MOST_SPLITS))
    mixed = torch.empty(n_splits, n_seqs, n_heads, width, dtype=torch.float32, device=q.device)
    largest, total = (torch.empty(n_splits, n_seqs, n_heads, dtype=torch.float32, device=q.device) for _ in range(2))
    grouped = n_heads // n_kv_heads
    keys, values = (_three_planes(planes) for planes in (cache.key_planes, cache.value_planes))
    n_rows, heads_joined = n_seqs * n_heads, triton.next_power_of_2(grouped)
    is_joined = n_seqs * n_kv_heads <= len(cache.arrivals)
    sinks, max_joined_splits = q if scoring.sinks is None else scoring.sinks, _JOINED // (padded * heads_joined)
    with on_device_of(q):
        _attend_pages[n_seqs, n_kv_heads, n_splits](
            *(q, *_pointers(new, q), *keys, *values, group.rows, group.tables, group.n_held),
            *(q if scoring.slopes is None else scoring.slopes, mixed, largest, total, cache.arrivals, sinks, out),
            *(scale, scoring.softcap or 1.0, *_epsilons(new), scoring.window or 0, n_table),
            *(q.stride(0), *((0, 0) if new is None else (new.k.stride(0), new.v.stride(0)))),
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
            NEW=new is not None,
            HALF=0 if new is None else new.cos.shape[1],
            INTERLEAVED=new is not None and new.style is RopeStyle.INTERLEAVED,
            Q_NORMED=new is not None and new.q_norm is not None,
            K_NORMED=new is not None and new.k_norm is not None,
            JOINED=is_joined,
            GP=heads_joined,
            JOINED_SPLITS=max(1, min(triton.next_power_of_2(n_splits), max_joined_splits)),
            SUNK=scoring.sinks is not None,
            num_warps=8 if padded >= _WIDE else 4,
            num_stages=_STAGES,
        )
        if not is_joined:
            _join[(n_rows,)](
                *(mixed, largest, total, sinks, group.rows, out, n_rows, n_splits),
                H=n_heads,
                D=width,
                DP=padded,
                SPLITS=max(1, min(triton.next_power_of_2(n_splits), _JOINED // padded)),
                SUNK=scoring.sinks is not None,
            )


def _pointers(new: NewTokens | None, unused: Tensor) -> tuple[Tensor, ...]:
    """The tensors of new tokens; any tensor in place of absent ones."""
    if new is None:
        return (unused,) * 8
    norms = (unused if norm is None else norm[0] for norm in (new.q_norm, new.k_norm))
    return new.k, new.v, *norms, new.cos, new.sin, new.pages, new.slots


def _epsilons(new: NewTokens | None) -> tuple[float, float]:
    norms = (None, None) if new is None else (new.q_norm, new.k_norm)
    q_eps, k_eps = (0.0 if norm is None else norm[1] for norm in norms)
    return q_eps, k_eps


def _tile(width: int, dtype: torch.dtype) -> int:
    """Tokens of a tile, a power of two: keys and values of all stages fit in the shared memory of every device."""
    fitting = _TILE_BYTES // (2 * _STAGES * width * dtype.itemsize)
    return min(PAGE_TOKENS, max(_MIN_GROUP, fitting))


def _three_planes(planes: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The planes of values, scales and bits above the fourth; any tensor for a plane that the type does not have."""
    return planes[0], planes[min(1, len(planes) - 1)], planes[-1]


def _check(
    q: Tensor, cache: TorchKvLayer, group: DecodeGroup, scoring: Scoring, out: Tensor, new: NewTokens | None
) -> None:
    n_tokens, n_heads, width = q.shape
    if new is None:
        check("q", q, torch.float32, (None, n_heads, width))
    else:
        check_rows("q", q, torch.float32, (n_tokens, n_heads, width))
        _check_new(new, cache, n_tokens, width)
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


def _check_new(new: NewTokens, cache: TorchKvLayer, n_tokens: int, width: int) -> None:
    n_kv_heads = cache.key_planes[0].shape[1]
    for name, x in (("k", new.k), ("v", new.v)):
        check_rows(name, x, torch.float32, (n_tokens, n_kv_heads * width))
    for name, norm in (("q_norm", new.q_norm), ("k_norm", new.k_norm)):
        if norm is not None:
            check(name, norm[0], torch.float32, (width,))
    check("cos", new.cos, torch.float32, (n_tokens, None))
    check("sin", new.sin, torch.float32, (n_tokens, new.cos.shape[1]))
    for name, indices in (("pages", new.pages), ("slots", new.slots)):
        check(name, indices, torch.int64, (n_tokens,))
    types = {cache.key_type, cache.value_type}
    if not types <= WRITTEN or (KvType.Q8_0 in types and width & (width - 1)) or 2 * new.cos.shape[1] > width:
        raise ValueError(
            f"heads of {width} in {cache.key_type} and {cache.value_type} (accepted: {', '.join(sorted(WRITTEN))}, a"
            " power of two for q8_0; cos of half of it at most)"
        )
