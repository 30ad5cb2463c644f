"""Text with bidirectional blocks for gemma3, and the logits of transformers under the same attention mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slm_core.protocols import Context
from slm_core.types import Pos

Rows = NDArray[np.floating]
N, WINDOW = 200, 48
BIDIRECTIONAL_BLOCKS = (
    (30, 100),
    (100, 104),
    (120, 180),
    (185, 188),
)  # some are longer than the sliding window, two are adjacent


def transformers_logits(model: Any, tokens: Sequence[int]) -> Rows:
    """Logits under the mask of gemma3's images: tokens of a block attend to each other beyond the sliding window."""
    assert model.config.sliding_window == WINDOW
    distance = np.arange(N)[:, None] - np.arange(N)
    in_block = np.zeros((N, N), bool)
    for first, end in BIDIRECTIONAL_BLOCKS:
        in_block[first:end, first:end] = True
    causal = {"full_attention": distance >= 0, "sliding_attention": (distance >= 0) & (distance < WINDOW)}
    masks = {
        kind: torch.from_numpy(np.where(mask | in_block, 0, -np.inf).astype(np.float32))[None, None]
        for kind, mask in causal.items()
    }
    with torch.inference_mode():
        rows: Rows = model(torch.tensor([list(tokens)]), attention_mask=masks).logits[0].numpy()
    return rows


def feed_blocks(context: Context, tokens: Sequence[int]) -> Rows:
    """Decode the text in two batches, in which another sequence has tokens between the blocks."""
    batch, rows = context.new_batch(), []
    for start, stop in ((0, 110), (110, N)):
        batch.clear()
        at = start
        for first, end in ((first, end) for first, end in BIDIRECTIONAL_BLOCKS if start <= first < stop):
            batch.extend(tokens[at:first], Pos(0, at), logits="all")
            batch.extend(tokens[first:end], Pos(0, first), logits="all")
            batch.join_block(end - first)
            batch.add(tokens[0], Pos(1, context.length(1) + int((batch.seq_ids == 1).sum())))  # another sequence
            at = end
        batch.extend(tokens[at:stop], Pos(0, at), logits="all")
        rows.append(context.decode(batch).copy())
    return np.concatenate(rows)
