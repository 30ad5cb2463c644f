"""Spans: tokens of one batch that see each other both ways, as images in a prompt do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slm_native.kv.runs import BatchPlan, Run
from slm_native.kv.store import PAGE_TOKENS, PageIndex


def in_spans(plan: BatchPlan, ahead: NDArray[np.int32]) -> BatchPlan:
    """``plan``, with runs that are a span each, or have none.

    Args:
        plan: where the tokens of a batch go.
        ahead: tokens behind each that it sees [T].
    """
    return replace(plan, runs=[part for run in plan.runs for part in _parts(run, ahead[run.rows])])


def _parts(run: Run, ahead: NDArray[np.int32]) -> Iterator[Run]:
    rows = np.arange(run.rows.start, run.rows.stop) if isinstance(run.rows, slice) else run.rows
    begin, n = 0, len(ahead)
    while begin < n:
        both_ways = bool(ahead[begin] > 0)
        later = np.flatnonzero(ahead[begin:] > 0)
        end = begin + (int(ahead[begin]) + 1 if both_ways else int(later[0]) if len(later) else n - begin)
        held = run.start + end
        yield Run(run.seq_id, rows[begin:end], run.start + begin, held, _first(run.pages, held), both_ways)
        begin = end


def _first(pages: PageIndex, n_held: int) -> PageIndex:
    n_pages = -(-n_held // PAGE_TOKENS)
    return slice(pages.start, pages.start + n_pages) if isinstance(pages, slice) else pages[:n_pages]
