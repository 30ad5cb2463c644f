"""The destinations of a batch's tokens, and the attention mask: one run of tokens for each sequence.

Runs are split for chunked attention, for bidirectional blocks, and to compute a batch in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slm_native.kv.codecs import Array
from slm_native.kv.store import PAGE_TOKENS, PageIndex
from slm_native.kv.tables import PageTables


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Tokens of one sequence in a batch.

    Attributes:
        seq_id: the sequence.
        rows: the tokens' indices in the batch.
        start: position of the first token, counted from the first page.
        n_held: number of tokens on the pages after the batch, S.
        pages: the sequence's pages.
        bidirectional: whether the tokens are a bidirectional block. A window may still hide tokens before the block.
        bias: the attention bias of the first n keys on the pages, float32 [n]; None for none.
    """

    seq_id: int
    rows: slice | NDArray[np.intp]
    start: int
    n_held: int
    pages: PageIndex
    bidirectional: bool = False
    bias: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """The destinations of a batch's tokens. The cache is unchanged until the plan is committed.

    Attributes:
        runs: one run or several for each sequence of the batch.
        pages: the page of each token [T].
        slots: the slot of each token on its page [T].
        tables: the page tables after the batch.
    """

    runs: Sequence[Run]
    pages: Array
    slots: Array
    tables: PageTables

    @property
    def has_blocks(self) -> bool:
        """Whether there are bidirectional blocks; the batch cannot be split then."""
        return any(run.bidirectional for run in self.runs)


def n_pages_of(n_tokens: int) -> int:
    """The number of pages for this number of tokens."""
    return -(-n_tokens // PAGE_TOKENS)


def count(rows: slice | NDArray[np.intp]) -> int:
    """The number of rows."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def rows_by_sequence(seq_ids: NDArray[np.int32]) -> list[tuple[int, slice | NDArray[np.intp]]]:
    """The sequences of a batch and the rows of each, in order; a slice if rows are contiguous."""
    if (seq_ids == seq_ids[0]).all():
        return [(int(seq_ids[0]), slice(0, len(seq_ids)))]
    order = np.argsort(seq_ids, kind="stable")
    bounds = np.flatnonzero(np.diff(seq_ids[order])) + 1
    runs: list[tuple[int, slice | NDArray[np.intp]]] = []
    for rows in np.split(order, bounds):
        is_contiguous = rows[-1] - rows[0] == len(rows) - 1
        runs.append((int(seq_ids[rows[0]]), slice(int(rows[0]), int(rows[-1]) + 1) if is_contiguous else rows))
    return runs


def part_of(plan: BatchPlan, start: int, stop: int) -> BatchPlan:
    """The plan of tokens [start, stop) of a batch. They also attend to the batch's earlier tokens."""
    runs = [run for whole in plan.runs if (run := _part_of_run(whole, start, stop)) is not None]
    return BatchPlan(runs, plan.pages[start:stop], plan.slots[start:stop], plan.tables)


def in_chunks(plan: BatchPlan, chunk: int) -> BatchPlan:
    """``plan`` for chunked attention (Llama 4): a token attends to its chunk, up to itself.

    A chunk is a whole number of pages, so attention treats each as a sequence on a part of the pages.

    Args:
        plan: the plan of the batch.
        chunk: positions in a chunk, a multiple of 64.

    Returns:
        Runs that attend only to their chunk; ``plan`` itself if every sequence ends in its first chunk.
    """
    assert chunk % PAGE_TOKENS == 0, "chunks begin where pages do"
    if all(run.n_held <= chunk for run in plan.runs):
        return plan
    return replace(plan, runs=[part for run in plan.runs for part in _chunks(run, chunk)])


def in_blocks(plan: BatchPlan, ahead: NDArray[np.int32]) -> BatchPlan:
    """``plan`` with runs split at bidirectional blocks: each run is one block or has none.

    Args:
        plan: the plan of the batch.
        ahead: for each token, the number of later tokens in its block [T].
    """
    return replace(plan, runs=[part for run in plan.runs for part in _blocks(run, ahead[run.rows])])


def with_biases(plan: BatchPlan, biases: Mapping[int, NDArray[np.float32]]) -> BatchPlan:
    """``plan`` with the attention biases of keys [n], by sequence."""
    return replace(plan, runs=[replace(run, bias=biases.get(run.seq_id)) for run in plan.runs])


def _part_of_run(run: Run, start: int, stop: int) -> Run | None:
    rows, skipped = _rows_between(run.rows, start, stop)
    if count(rows) == 0:
        return None
    first = run.start + skipped
    n_held = first + count(rows)
    return replace(run, rows=rows, start=first, n_held=n_held, pages=_first_pages(run.pages, n_held))


def _rows_between(rows: slice | NDArray[np.intp], start: int, stop: int) -> tuple[slice | NDArray[np.intp], int]:
    """The ascending ``rows`` in [start, stop), counted from ``start``; and the number of rows before them."""
    if isinstance(rows, slice):
        begin = min(max(rows.start, start), rows.stop)
        end = max(begin, min(rows.stop, stop))
        return slice(begin - start, end - start), begin - rows.start
    begin, end = np.searchsorted(rows, [start, stop]).tolist()
    return rows[begin:end] - start, begin


def _chunks(run: Run, chunk: int) -> Iterator[Run]:
    """The part of a run in each chunk; positions count from the chunk's start."""
    for first in range(run.start // chunk * chunk, run.n_held, chunk):
        begin, end = max(run.start, first), min(run.n_held, first + chunk)
        rows = _part(run.rows, begin - run.start, end - run.start)
        pages = _part(run.pages, first // PAGE_TOKENS, n_pages_of(end))
        bias = None if run.bias is None else run.bias[first:end]
        yield Run(run.seq_id, rows, begin - first, end - first, pages, bias=bias)


def _blocks(run: Run, ahead: NDArray[np.int32]) -> Iterator[Run]:
    rows = np.arange(run.rows.start, run.rows.stop) if isinstance(run.rows, slice) else run.rows
    begin, n = 0, len(ahead)
    while begin < n:
        bidirectional = bool(ahead[begin] > 0)
        later = np.flatnonzero(ahead[begin:] > 0)
        end = begin + (int(ahead[begin]) + 1 if bidirectional else int(later[0]) if len(later) else n - begin)
        n_held = run.start + end
        yield Run(
            run.seq_id, rows[begin:end], run.start + begin, n_held, _first_pages(run.pages, n_held), bidirectional
        )
        begin = end


def _first_pages(pages: PageIndex, n_held: int) -> PageIndex:
    """The pages of the first ``n_held`` tokens."""
    return _part(pages, 0, n_pages_of(n_held))


def _part(ids: slice | NDArray[np.intp], begin: int, end: int) -> slice | NDArray[np.intp]:
    return slice(ids.start + begin, ids.start + end) if isinstance(ids, slice) else ids[begin:end]
