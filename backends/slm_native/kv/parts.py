"""A batch in parts: each is a batch of its own, which sees what the ones before it have written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_native.kv.runs import BatchPlan, Run
from slm_native.kv.store import PAGE_TOKENS


def part_of(plan: BatchPlan, start: int, stop: int) -> BatchPlan:
    """Where tokens [start, stop) of a batch go, and what they see of their sequences."""
    runs = [run for each in plan.runs if (run := _part_of_run(each, start, stop)) is not None]
    return BatchPlan(runs, plan.pages[start:stop], plan.slots[start:stop], plan.tables)


def _part_of_run(run: Run, start: int, stop: int) -> Run | None:
    rows, skipped = _rows_between(run.rows, start, stop)
    n_tokens = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    if n_tokens == 0:
        return None
    first = run.start + skipped
    n_held = first + n_tokens
    n_pages = -(-n_held // PAGE_TOKENS)
    pages = run.pages
    pages = slice(pages.start, pages.start + n_pages) if isinstance(pages, slice) else pages[:n_pages]
    return Run(run.seq_id, rows, first, n_held, pages)


def _rows_between(rows: slice | NDArray[np.intp], start: int, stop: int) -> tuple[slice | NDArray[np.intp], int]:
    """Those of ascending rows, counted from ``start``; and how many come before them."""
    if isinstance(rows, slice):
        begin = min(max(rows.start, start), rows.stop)
        end = max(begin, min(rows.stop, stop))
        return slice(begin - start, end - start), begin - rows.start
    begin, end = np.searchsorted(rows, [start, stop]).tolist()
    return rows[begin:end] - start, begin
