"""Where the tokens of a batch go: a run for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_native.kv.codecs import Array
from slm_native.kv.store import PAGE_TOKENS, PageIndex
from slm_native.kv.tables import PageTables


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The tokens that a batch brings for one sequence.

    Attributes:
        seq_id: the sequence.
        rows: which tokens of the batch they are.
        start: position of the first, from where the pages begin.
        n_held: tokens on the pages with them, S.
        pages: where those lie.
        both_ways: whether they all see each other, in place of those before each; of windows, they see what they would.
    """

    seq_id: int
    rows: slice | NDArray[np.intp]
    start: int
    n_held: int
    pages: PageIndex
    both_ways: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Where the tokens of a batch go. The cache is unchanged until the plan is committed.

    Attributes:
        runs: one for each sequence of the batch.
        pages: the page of each token [T].
        slots: its place on that page [T].
        tables: the tables that hold once the batch has run.
    """

    runs: Sequence[Run]
    pages: Array
    slots: Array
    tables: PageTables

    @property
    def has_spans(self) -> bool:
        """Whether there are tokens that see others behind them, so that no part of the batch can be run alone."""
        return any(run.both_ways for run in self.runs)


def n_pages_of(n_tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-n_tokens // PAGE_TOKENS)


def count(rows: slice | NDArray[np.intp]) -> int:
    """How many rows these are."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def rows_by_sequence(seq_ids: NDArray[np.int32]) -> list[tuple[int, slice | NDArray[np.intp]]]:
    """The sequences of a batch and the rows of each, in order; a slice where they lie side by side."""
    if (seq_ids == seq_ids[0]).all():
        return [(int(seq_ids[0]), slice(0, len(seq_ids)))]
    order = np.argsort(seq_ids, kind="stable")
    bounds = np.flatnonzero(np.diff(seq_ids[order])) + 1
    found: list[tuple[int, slice | NDArray[np.intp]]] = []
    for rows in np.split(order, bounds):
        side_by_side = rows[-1] - rows[0] == len(rows) - 1
        found.append((int(seq_ids[rows[0]]), slice(int(rows[0]), int(rows[-1]) + 1) if side_by_side else rows))
    return found
