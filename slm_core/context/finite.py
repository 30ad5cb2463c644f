"""Refuses results with NaN or infinities, which come from damaged weights or overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import DecodeFailed
from slm_core.protocols import Batch
from slm_core.types import Logits, States, TopLogits

Check: TypeAlias = Callable[[NDArray[np.float32]], None]
"""``check_logits`` or ``check_states``."""


def check_logits(rows: Logits) -> None:
    """Check rows of logits, float32 [n_rows, V]; a token that is never chosen may have -inf.

    Raises:
        DecodeFailed: a row has NaN or infinity.
    """
    if len(rows) and not rows.max() < np.inf:  # one pass; the maximum is NaN if any logit is
        raise _not_finite()


def check_states(rows: States) -> None:
    """Check hidden states, float32; see ``check_logits``."""
    if not np.isfinite(rows).all():
        raise _not_finite()


def check_top(top: TopLogits) -> None:
    """Check top logits, among which NaN counts as the largest; see ``check_logits``."""
    if not (top.logits[:, 0] < np.inf).all():
        raise _not_finite()


def with_last_rows(batch: Batch) -> NDArray[np.bool_]:
    """The output mask of a batch, with the last token of each sequence.

    That token attends to all others, so its row shows whether any key or value of the sequence is NaN. Engines that
    read the keys of all sequences and mask them afterwards need to know: one NaN would spread to every sequence.
    """
    mask = batch.logits_mask
    if mask.all():
        return mask
    _, from_end = np.unique(batch.seq_ids[::-1], return_index=True)
    mask = mask.copy()
    mask[len(mask) - 1 - from_end] = True
    return mask


def _not_finite() -> DecodeFailed:
    return DecodeFailed("the model computed NaN or infinity: its weights are damaged, or numbers overflowed")
