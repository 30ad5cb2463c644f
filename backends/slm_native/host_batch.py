"""The input of a forward pass: a batch in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.types import EMBEDDED
from slm_native.adapted import Adapted
from slm_native.kv import KvLayer, part_of
from slm_native.memory import MemoryPlan
from slm_native.mtp import BatchStates
from slm_native.positions import Positions


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """A batch in host memory, with the destinations of its keys, values and states.

    Attributes:
        tokens: ids [T], ``EMBEDDED`` for an embedding row.
        rows: embedding rows in place of tokens [n, E].
        positions: position of each token in its sequence [T].
        rope_positions: position of each token for RoPE [T]; for M-RoPE [T, 3]: time, height, width.
        output_mask: the tokens whose rows are returned, bool [T].
        plan: the destinations of keys, values and states, and the attention mask.
        layers: the KV cache of each attention layer.
        embedded: the context's position embeddings.
        adapted: the parts of the model that adapters change; None without adapters.
        states: the hidden states around the batch, for the MTP layer; None if it does not run.
    """

    tokens: NDArray[np.int32]
    rows: NDArray[np.float32]
    positions: NDArray[np.int32]
    rope_positions: NDArray[np.integer]
    output_mask: NDArray[np.bool_]
    plan: MemoryPlan
    layers: Sequence[KvLayer]
    embedded: Positions
    adapted: Adapted | None = None
    states: BatchStates | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def parts(self, size: int | None) -> Iterator[HostBatch]:
        """Split the batch into parts of ``size`` tokens. Models with an MTP layer have no parts.

        The batch stays whole if ``size`` is None, if each sequence has one token, or if it has bidirectional blocks.
        """
        pages = self.plan.pages
        if size is None or len(self) <= size or len(pages.runs) == len(self) or pages.has_blocks:
            yield self
            return
        n_rows = np.cumsum(self.tokens == EMBEDDED)
        for start in range(0, len(self), size):
            part = slice(start, min(start + size, len(self)))
            rows = self.rows[n_rows[part.start - 1] if part.start else 0 : n_rows[part.stop - 1]]
            plan = MemoryPlan(part_of(pages, part.start, part.stop), [])
            inputs = self.tokens[part], rows, self.positions[part], self.rope_positions[part], self.output_mask[part]
            yield HostBatch(*inputs, plan, self.layers, self.embedded, self.adapted)
