"""Attention in torch: scaled_dot_product_attention over gathered pages, or explicit scores if they are changed."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from slm_native.kernels.parameters import PLAIN, BlockRange, Scoring
from slm_native.kernels.torch.pages import DecodeGroup, TorchKvLayer

_SCORES_AT_A_TIME = 1 << 24  # 64 MiB of float32 if scores are materialized


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, scoring: Scoring = PLAIN, block: BlockRange | None = None
) -> Tensor:
    """Causal attention of the last T of S positions; see ``KernelSet.attention``.

    Args:
        q: [T, H, D].
        k: [S, K, D].
        v: [S, K, D].
        scale: factor on ``q · k``.
        scoring: window, soft cap, ALiBi and sinks.
        block: the queries' bidirectional block, if they are part of one.

    Returns:
        [T, H, D].
    """
    n_tokens, n_heads, _ = q.shape
    n_before = len(k) - n_tokens if block is None else block.position
    if scoring.is_plain and n_before == 0 and block is None:
        return _attend_to_itself(q, k, v, scale)
    step = max(1, _SCORES_AT_A_TIME // (n_heads * len(k)))
    parts = []
    for start in range(0, n_tokens, step):
        stop = min(start + step, n_tokens)
        first = 0 if scoring.window is None else max(0, n_before + start - scoring.window + 1)
        last, part = n_before + stop, None
        if block is not None:
            first, last = min(first, block.first), len(k)
            part = BlockRange(block.first - first, n_before + start - first)
        parts.append(_attend(q[start:stop], k[first:last], v[first:last], scale, scoring, part))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_at(positions: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, scoring: Scoring = PLAIN) -> Tensor:
    """Causal attention of queries at any positions. The operations depend only on shapes, as a CUDA graph requires.

    Args:
        positions: int64 [T], positions of the queries.
        q: [T, H, D].
        k: [S, K, D], at positions from 0 on; keys after the last query's position are ignored.
        v: [S, K, D].
        scale: factor on ``q · k``.
        scoring: window, soft cap, ALiBi and sinks.

    Returns:
        [T, H, D].
    """
    n_tokens, n_heads, _ = q.shape
    step, key_positions = max(1, _SCORES_AT_A_TIME // (n_heads * len(k))), torch.arange(len(k), device=q.device)
    keys, values = (x.transpose(0, 1)[None] for x in (k, v))
    parts = []
    for start in range(0, n_tokens, step):
        queries = q[start : start + step].transpose(0, 1)[None]
        distance = (positions[start : start + step, None] - key_positions)[None]  # [1, T, S]
        mixed = _mixed(queries, keys, values, distance, _causal_mask(distance, scoring), scale, scoring)
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


def attend_bidirectionally(q: Tensor, k: Tensor, v: Tensor, scale: float, scoring: Scoring = PLAIN) -> Tensor:
    """Bidirectional attention within one sequence; see ``KernelSet.bidirectional_attention``.

    Args:
        q: [T, H, D].
        k: [T, K, D].
        v: [T, K, D].
        scale: factor on ``q · k``.
        scoring: window, soft cap, ALiBi and sinks.

    Returns:
        [T, H, D].
    """
    positions = torch.arange(len(q), device=q.device)
    distance = (positions[:, None] - positions).abs()
    near = distance >= 0 if scoring.window is None else distance <= scoring.window // 2
    per_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return _mixed(per_head[0], per_head[1], per_head[2], distance[None], near[None], scale, scoring)[0].transpose(0, 1)


def attend_one_token_each(
    q: Tensor, cache: TorchKvLayer, group: DecodeGroup, scale: float, scoring: Scoring = PLAIN
) -> Tensor:
    """Attention of sequences of different lengths with one token each.

    Args:
        q: [B, H, D].
        cache: one layer of the cache.
        group: the sequences.
        scale: factor on ``q · k``.
        scoring: window, soft cap, ALiBi and sinks.

    Returns:
        [B, H, D].
    """
    k, v = cache.keys(group.tables, group.longest), cache.values(group.tables, group.longest)  # [B, S, K, D]
    distance = group.n_held[:, None, None] - 1 - torch.arange(group.longest, device=q.device)  # [B, 1, S]
    mask = _causal_mask(distance, scoring)
    return _mixed(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), distance, mask, scale, scoring)[:, :, 0]


def _attend_to_itself(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of a prompt from position 0; torch has kernels for this mask that do not materialize scores."""
    q, k, v = (x.to(q.dtype).transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return mixed[0].transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, scoring: Scoring, block: BlockRange | None) -> Tensor:
    position = len(k) - len(q) if block is None else block.position
    per_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
    positions = torch.arange(len(k), device=q.device)
    distance = (positions[position : position + len(q), None] - positions)[None]  # [1, T, S]
    mask = _causal_mask(distance, scoring)
    if block is not None:
        mask = mask | (positions >= block.first)
    return _mixed(per_head[0], per_head[1], per_head[2], distance, mask, scale, scoring)[0].transpose(0, 1)


def _causal_mask(distance: Tensor, scoring: Scoring) -> Tensor:
    """The attention mask of causal queries."""
    mask = distance >= 0
    return mask if scoring.window is None else mask & (distance < scoring.window)


def _mixed(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, mask: Tensor, scale: float, scoring: Scoring) -> Tensor:
    """The outputs of attention, computed in the number format of the queries.

    Args:
        q: [B, H, T, D].
        k: [B, K, S, D].
        v: [B, K, S, D].
        distance: from each query to each key, [B or 1, T, S].
        mask: the keys that a query attends to, of the same shape.
        scale: factor on ``q · k``.
        scoring: soft cap, ALiBi and sinks.

    Returns:
        [B, H, T, D].
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    if scoring.softcap is None and scoring.slopes is None and scoring.sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=grouped)
    n_seqs, n_kv_heads, n_tokens = len(q), k.shape[1], q.shape[2]
    groups = q.reshape(n_seqs, n_kv_heads, -1, *q.shape[2:])  # [B, K, H/K, T, D]
    scores = (groups @ k[:, :, None].transpose(-1, -2)).flatten(1, 2).float() * scale  # [B, H, T, S]
    shares = _shares(scores, mask[:, None], distance[:, None], scoring).to(q.dtype)
    return (shares.reshape(n_seqs, n_kv_heads, -1, n_tokens, k.shape[2]) @ v[:, :, None]).flatten(1, 2)


def _shares(scores: Tensor, mask: Tensor, distance: Tensor, scoring: Scoring) -> Tensor:
    """The softmax of scores after soft cap, ALiBi, mask and sinks, float32 [B, H, T, S]."""
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    if scoring.slopes is not None:
        scores = scores - scoring.slopes[:, None, None] * distance
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is None:
        return scores.softmax(dim=-1)
    sinks = scoring.sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
