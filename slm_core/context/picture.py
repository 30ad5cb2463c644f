"""How a context shows itself: a line, and a map of its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.display import Html, count, joined, signature, table
from slm_core.display.blocks import cell_map, legend, usage_bar
from slm_core.display.html import card
from slm_core.protocols import Context

_SQUARES = 256
"""The largest number of squares of a map."""
_LISTED = 16
"""The largest number of sequences that are listed."""


def line(context: Context, lengths: Mapping[int, int] | None) -> str:
    """One line: the positions and sequences in use; ``lengths`` by sequence, None for a closed context."""
    if lengths is None:
        return signature(context, "closed")
    n_used = context.n_ctx - context.n_free
    return signature(
        context,
        f"{n_used:,} of {context.n_ctx:,} positions used",
        f"{sum(n > 0 for n in lengths.values())} of {count(context.n_seq_max, 'sequence')}",
    )


def page(context: Context, lengths: Mapping[int, int] | None, references: NDArray[np.int32] | None) -> Html:
    """A map of the cells: used by one sequence (own), by several (shared), or free; and the sequences.

    Args:
        context: the context.
        lengths: tokens of each sequence; None for a closed context.
        references: the number of sequences that use each of the first cells; None if the cells are unknown.
    """
    title = type(context).__name__
    if lengths is None:
        return card(title, "closed")
    drawing = _bar(context) if references is None else _map(references, context.n_ctx)
    return card(f"{title}: {context.n_ctx:,} positions", drawing, _sequences(lengths))


def _bar(context: Context) -> Html:
    return usage_bar([("own", context.n_ctx - context.n_free), ("free", context.n_free)])


def _map(references: NDArray[np.int32], n_ctx: int) -> Html:
    own, shared = int((references == 1).sum()), int((references > 1).sum())
    n_per_square = -(-n_ctx // _SQUARES)
    squares = []
    for first in range(0, n_ctx, n_per_square):
        here = references[first : first + n_per_square]
        squares.append((_use(here), first, min(n_per_square, n_ctx - first)))
    parts = legend([("own", own), ("shared", shared), ("free", n_ctx - own - shared)])
    return joined([cell_map(squares), parts])


def _use(references: NDArray[np.int32]) -> str:
    n_own, n_shared = int((references == 1).sum()), int((references > 1).sum())
    if not n_own and not n_shared:
        return "free"
    return "own" if n_own >= n_shared else "shared"


def _sequences(lengths: Mapping[int, int]) -> Html:
    used = [(seq_id, n) for seq_id, n in lengths.items() if n]
    rows: Sequence[tuple[str, str]] = [(f"sequence {seq_id}", count(n, "token")) for seq_id, n in used[:_LISTED]]
    if len(used) > _LISTED:
        rows = [*rows, ("", f"and {len(used) - _LISTED} more")]
    return table(rows)
