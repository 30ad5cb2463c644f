"""Text with spans for gemma3, and what transformers makes of it, which takes a mask of any form."""

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
BIDIRECTIONAL_BLOCKS = ((30, 100), (100, 104), (120, 180), (185, 188))  # some longer than the window, and side by side


def transformers_logits(model: Any, tokens: Sequence[int]) -> Rows:
    """As transformers does it for gemma3's images: tokens of one see each other, however narrow the window."""
    assert model.config.sliding_window == WINDOW
    distance = np.arange(N)[:, None] - np.arange(N)
    together = np.zeros((N, N), bool)
    for first, end in BIDIRECTIONAL_BLOCKS:
        together[first:end, first:end] = True
    seen = {"full_attention": distance >= 0, "sliding_attention": (distance >= 0) & (distance < WINDOW)}
    masks = {
        kind: torch.from_numpy(np.where(mask | together, 0, -np.inf).astype(np.float32))[None, None]
        for kind, mask in seen.items()
    }
    with torch.inference_mode():
        rows: Rows = model(torch.tensor([list(tokens)]), attention_mask=masks).logits[0].numpy()
    return rows


def feed_blocks(context: Context, tokens: Sequence[int]) -> Rows:
    """All of it in two batches, in which another sequence has tokens between the spans."""
    batch, rows = context.new_batch(), []
    for start, stop in ((0, 110), (110, N)):
        batch.clear()
        done = start
        for first, end in ((first, end) for first, end in BIDIRECTIONAL_BLOCKS if start <= first < stop):
            batch.extend(tokens[done:first], Pos(0, done), logits="all")
            batch.extend(tokens[first:end], Pos(0, first), logits="all")
            batch.join_block(end - first)
            batch.add(tokens[0], Pos(1, context.length(1) + int((batch.seq_ids == 1).sum())))  # a stranger
            done = end
        batch.extend(tokens[done:stop], Pos(0, done), logits="all")
        rows.append(context.decode(batch).copy())
    return np.concatenate(rows)
