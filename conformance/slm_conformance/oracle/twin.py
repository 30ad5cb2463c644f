"""An oracle for models that the float64 reference does not run: the same engine decodes each history from the start.

The logits of a sequence depend on its history only. So they equal those of the history in a context that holds nothing
else (clauses 3, 5, 6, 7 and 8). Cuts are part of the history and are repeated (clause 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.runs import Run, image_offsets
from slm_core.protocols import Batch, Context
from slm_core.types import EditLevel, LogitsSelection, Pos

Rows: TypeAlias = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class _Removed:
    """A cut of [start, end)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A run that was decoded: tokens, or embedding rows [n, E]."""

    run: Run
    rows: NDArray[np.float32] | None

    def first(self, n: int) -> _Inputs:
        """The first ``n`` inputs."""
        run = replace(self.run, tokens=self.run.tokens[:n])
        return _Inputs(run, None if self.rows is None else self.rows[:n])


_History: TypeAlias = tuple[_Inputs | _Removed, ...]


class Twin:
    """Histories of any number of sequences. For new logits, the whole history is decoded again.

    Args:
        context: an empty context of the model with one sequence and room for each history.
    """

    name: ClassVar[str] = "the same history decoded alone"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._histories: dict[int, _History] = {}

    @property
    def edit_level(self) -> EditLevel:
        """The edit level of the context."""
        return self._context.edit_level

    def length(self, seq_id: int = 0) -> int:
        """The number of tokens of a sequence."""
        return _length(self._histories.get(seq_id, ()))

    def decode(self, tokens: Sequence[int], seq_id: int = 0) -> Rows:
        """Append tokens to a sequence; returns the logits after each, float32 [T, V]."""
        return self.append(Run(seq_id, 0, tuple(tokens)))

    def embed(self, tokens: Sequence[int], seq_id: int = 0) -> Rows:
        """Append tokens to a sequence; returns their hidden states, float32 [T, E]."""
        return self.append(Run(seq_id, 0, tuple(tokens)), hidden=True)

    def append(self, run: Run, rows: NDArray[np.float32] | None = None, *, hidden: bool = False) -> Rows:
        """Append a run; returns the logits after each input, [T, V], or its hidden state [T, E].

        Args:
            run: the run; its ``seq_id`` names a history of the twin.
            rows: embedding rows instead of the tokens, [T, E], at most ``n_batch``.
            hidden: whether to return hidden states.
        """
        most = self._context.n_batch
        if len(run.tokens) > most:
            parts = [replace(run, tokens=run.tokens[i : i + most]) for i in range(0, len(run.tokens), most)]
            return np.concatenate([self.append(part, hidden=hidden) for part in parts])
        before = self._histories.get(run.seq_id, ())
        self._histories[run.seq_id] = (*before, _Inputs(run, rows))
        context, last = self._context, len(before)
        context.drop(0)
        merged = context.new_batch()
        for i, item in enumerate(self._histories[run.seq_id]):
            if isinstance(item, _Inputs):
                merged = self._batched(merged, item, has_logits=i == last)
                continue
            context.decode(merged)
            merged.clear()
            context.cut(Pos(0, item.start), Pos(0, item.end))
        return (context.embed(merged) if hidden else context.decode(merged)).copy()

    def fork(self, src: int, dst: int, end: int | None = None) -> None:
        """Make ``dst`` a copy of ``src[:end]``."""
        history = self._histories.get(src, ())
        self._histories[dst] = history if end is None else _truncated(history, end)

    def truncate(self, length: int, seq_id: int = 0) -> None:
        """Forget the tokens from position ``length`` on."""
        self.fork(seq_id, seq_id, length)

    def cut(self, start: int, end: int, seq_id: int = 0) -> None:
        """Forget [start, end); later tokens move down."""
        history = self._histories.get(seq_id, ())
        if end == _length(history):
            self.truncate(start, seq_id)
        elif start < end:
            self._histories[seq_id] = (*history, _Removed(start, end))

    def drop(self, seq_id: int = 0) -> None:
        """Forget a sequence."""
        self._histories.pop(seq_id, None)

    def _batched(self, batch: Batch, inputs: _Inputs, *, has_logits: bool) -> Batch:
        """Add a run to a batch. If there is no room, the batch is decoded first."""
        n = len(inputs.run.tokens)
        if len(batch) + n > self._context.n_batch:
            self._context.decode(batch)
            batch.clear()
        first = self._context.length(0) + len(batch)
        add_run(batch, replace(inputs.run, seq_id=0), first, inputs.rows, has_logits=has_logits)
        return batch


Oracle: TypeAlias = Reference | Twin
"""An oracle of the scenarios: see ``Bench.oracle``."""


def add_run(batch: Batch, run: Run, first: int, rows: NDArray[np.float32] | None, *, has_logits: bool) -> None:
    """Add a run to a batch from position ``first`` on: ``rows`` if given, else its tokens."""
    start, n = Pos(run.seq_id, first), len(run.tokens)
    logits: LogitsSelection = "all" if has_logits else "none"
    if rows is None:
        batch.extend(run.tokens, start, logits=logits)
    else:
        offsets = np.array(image_offsets(n), np.int32) if run.kind == "image" else None
        batch.add_embeddings(rows, start, offsets=offsets, logits=logits)
    if run.block and n > 1:
        batch.join_block(n)


def _length(history: _History) -> int:
    return sum(len(one.run.tokens) if isinstance(one, _Inputs) else one.start - one.end for one in history)


def _truncated(history: _History, length: int) -> _History:
    """The history of the first ``length`` tokens, as if there had been no other tokens."""
    if length <= 0 or not history:
        return ()
    *before, last = history
    if isinstance(last, _Removed):
        if length <= last.start:  # the tokens that were cut came after the first ``length``
            return _truncated(tuple(before), length)
        return (*_truncated(tuple(before), length + last.end - last.start), last)
    n_before = _length(tuple(before))
    if length <= n_before:
        return _truncated(tuple(before), length)
    return (*before, last.first(length - n_before))
