"""What a context remembers of its sequences: keys and values on pages, states of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec
from slm_core.errors import InvalidSnapshot
from slm_native.kernels import KernelSet
from slm_native.kv import BatchPlan, HostPageStore, KvLayer, PagedKvCache, PageLayout, Rotate, in_spans
from slm_native.states import Checkpoint, StateGroup, StatePool

REPLAY_TOKENS = 256
"""Tokens that are decoded at a time where a state is computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """Where a batch goes. Nothing has changed until it is committed.

    Attributes:
        pages: where keys and values go.
        states: the sequences of the batch, and where their new states go.
    """

    pages: BatchPlan
    states: Sequence[StateGroup]


class ContextMemory:
    """All that a context remembers; see ``PagedKvCache`` and ``StatePool``.

    Truncation, and a fork of a part, need a state that may not be kept: ``nearest`` finds an earlier one, and
    ``replay`` plans the batches that compute it again.

    Args:
        spec: the model.
        layouts: of pages, one for each group of layers whose heads are alike.
        n_ctx: tokens that all sequences together may hold.
        n_seq_max: sequences.
        kernels: the arithmetic.

    Raises:
        InvalidOption: the system refuses so much memory.
    """

    def __init__(
        self, spec: ModelSpec, layouts: Sequence[PageLayout], n_ctx: int, n_seq_max: int, kernels: KernelSet
    ) -> None:
        recurrent = [layer.recurrent for layer in spec.layers if layer.recurrent is not None]
        n_scratch = REPLAY_TOKENS if recurrent else 0
        new_pages = kernels.new_pages if spec.attention_layers else HostPageStore  # without, they hold nothing
        self._pages = PagedKvCache(layouts, n_ctx, n_seq_max, new_pages, n_scratch)
        self._states = StatePool(recurrent, n_seq_max, kernels) if recurrent else None

    @property
    def layers(self) -> Sequence[KvLayer]:
        """The KV cache of each attention layer."""
        return self._pages.layers

    @property
    def keeps_states(self) -> bool:
        """Whether there are recurrent layers."""
        return self._states is not None

    def plan(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32], ahead: NDArray[np.int32]) -> MemoryPlan:
        """Find a place for the tokens of a batch; see ``PagedKvCache.plan`` and ``in_spans``."""
        pages = self._pages.plan(seq_ids, positions)
        if ahead.any():
            pages = in_spans(pages, ahead)
        return MemoryPlan(pages, [] if self._states is None else self._states.plan(pages.runs))

    def commit(self, plan: MemoryPlan) -> None:
        """The batch has run: what it wrote is true from now on."""
        if self._states is not None:
            self._states.commit(plan.states, plan.pages.runs)
        self._pages.commit(plan.pages)

    def nearest(self, seq_id: int, length: int) -> Checkpoint | None:
        """The last state that is kept of a sequence's first ``length`` tokens; None without recurrent layers."""
        return None if self._states is None else self._states.nearest(seq_id, length)

    def replay(self, seq_id: int, start: Checkpoint, stop: int) -> MemoryPlan:
        """A plan to compute the state after ``stop`` tokens from an earlier one; it is not committed.

        Args:
            seq_id: the sequence, which holds these tokens: their keys and values are read, not written again.
            start: a state before them, at most ``REPLAY_TOKENS``.
            stop: after how many tokens.
        """
        pages = self._pages.replay(seq_id, start.position, stop)
        return MemoryPlan(pages, [StateGroup([seq_id], pages.runs[0].rows, [start.state])])

    def fork(self, src: int, dst: int, end: int, now: Checkpoint | None) -> None:
        """Let the empty ``dst`` share ``src[:end]``; ``now`` is the state there."""
        self._pages.fork(src, dst, end)
        if self._states is not None and now is not None:
            self._states.fork(src, dst, now)

    def truncate(self, seq_id: int, length: int, now: Checkpoint | None) -> None:
        """Forget all but the first ``length`` tokens; ``now`` is the state after them."""
        self._pages.truncate(seq_id, length)
        if self._states is not None and now is not None:
            self._states.put(seq_id, now)

    def cut(self, seq_id: int, start: int, end: int, length: int, rotate: Rotate) -> None:
        """See ``PagedKvCache.cut``; nothing can be cut out of a state."""
        assert self._states is None, "the context declares no cut"
        self._pages.cut(seq_id, start, end, length, rotate)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._pages.drop(seq_id)
        if self._states is not None:
            self._states.drop(seq_id)

    def export(self, seq_id: int, length: int) -> bytes:
        """The keys and values of a sequence, then its state."""
        pages = self._pages.export(seq_id, length)
        return pages if self._states is None else pages + self._states.export(seq_id)

    def load(self, seq_id: int, length: int, payload: bytes) -> None:
        """Fill an empty sequence with what ``export`` gave.

        Raises:
            InvalidSnapshot: the wrong size, or numbers that are infinite or none.
        """
        if self._states is None:
            self._pages.load(seq_id, length, payload)
            return
        split = len(payload) - self._states.n_bytes
        if split < 0:
            raise InvalidSnapshot(f"the payload has {len(payload)} bytes, the state alone takes {self._states.n_bytes}")
        self._states.load(seq_id, length, payload[split:])
        try:
            self._pages.load(seq_id, length, payload[:split])
        except BaseException:
            self._states.drop(seq_id)
            raise
