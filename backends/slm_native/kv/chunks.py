"""Chunked attention (Llama 4): positions fall into chunks, and a token sees those of its own up to itself.

A chunk is a whole number of pages, so each is attended to as a sequence of its own that lies on a part of the pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slm_native.kv.runs import BatchPlan, Run
from slm_native.kv.store import PAGE_TOKENS


def in_chunks(plan: BatchPlan, chunk: int) -> BatchPlan:
    """``plan``, with runs that see nothing outside their chunk; itself, where no sequence leaves its first one.

    Args:
        plan: where the tokens of a batch go.
        chunk: positions in a chunk, a multiple of 64.
    """
    assert chunk % PAGE_TOKENS == 0, "chunks begin where pages do"
    if all(run.n_held <= chunk for run in plan.runs):
        return plan
    return replace(plan, runs=[part for run in plan.runs for part in _parts(run, chunk)])


def _parts(run: Run, chunk: int) -> Iterator[Run]:
    """What a run brings for each chunk; positions are counted from where the chunk begins."""
    for first in range(run.start // chunk * chunk, run.n_held, chunk):
        begin, end = max(run.start, first), min(run.n_held, first + chunk)
        rows = _part(run.rows, begin - run.start, end - run.start)
        pages = _part(run.pages, first // PAGE_TOKENS, -(-end // PAGE_TOKENS))
        yield Run(run.seq_id, rows, begin - first, end - first, pages)


def _part(ids: slice | NDArray[np.intp], begin: int, end: int) -> slice | NDArray[np.intp]:
    return slice(ids.start + begin, ids.start + end) if isinstance(ids, slice) else ids[begin:end]
