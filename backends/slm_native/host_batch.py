"""A batch as the host has it: what a forward pass is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.types import EMBEDDED
from slm_native.kv import KvLayer, part_of
from slm_native.memory import MemoryPlan
from slm_native.positions import Positions


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """A batch, and where its tokens go.

    Attributes:
        tokens: ids [T], ``EMBEDDED`` for a row.
        rows: embedding rows in place of tokens [n, E].
        positions: of each token in its sequence [T].
        places: where each stands to be rotated [T], or [T, 3] in time, height and width.
        wants_rows: which tokens' rows are wanted [T].
        plan: where keys, values and states go, and which tokens see which.
        layers: the KV cache of each layer that attends.
        embedded: the context's position embeddings.
    """

    tokens: NDArray[np.int32]
    rows: NDArray[np.float32]
    positions: NDArray[np.int32]
    places: NDArray[np.integer]
    wants_rows: NDArray[np.bool_]
    plan: MemoryPlan
    layers: Sequence[KvLayer]
    embedded: Positions

    def __len__(self) -> int:
        return len(self.tokens)

    def parts(self, size: int | None) -> Iterator[HostBatch]:
        """The batch, ``size`` tokens at a time; whole, where that is None, or tokens or spans need each other."""
        pages = self.plan.pages
        if size is None or len(self) <= size or len(pages.runs) == len(self) or pages.has_spans:
            yield self
            return
        n_given = np.cumsum(self.tokens == EMBEDDED)
        for start in range(0, len(self), size):
            of = slice(start, min(start + size, len(self)))
            rows = self.rows[n_given[of.start - 1] if of.start else 0 : n_given[of.stop - 1]]
            plan = MemoryPlan(part_of(pages, of.start, of.stop), [])
            told = self.tokens[of], rows, self.positions[of], self.places[of], self.wants_rows[of]
            yield HostBatch(*told, plan, self.layers, self.embedded)
