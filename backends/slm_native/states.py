"""The states of recurrent layers, of the same size for every length of a sequence.

A state is immutable: a batch reads the states before it and makes new ones. So forks share states, and a failed batch
leaves the old ones in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import RecurrentSpec
from slm_core.container import check_numbers
from slm_core.context.payload import Section
from slm_native.kernels import Device, Ops
from slm_native.kv import Array, Run

N_CHECKPOINTS = 6
"""Checkpoints per sequence. The gaps between them grow with the distance from the end, so that after a truncation of n
tokens at most a small multiple of n tokens is decoded again."""

Parts: TypeAlias = tuple[Array, ...]
"""The state of one layer for B sequences: arrays [B, ...]."""
State: TypeAlias = tuple[Parts, ...]
"""The state of one sequence: for each recurrent layer its arrays [1, ...]."""


class Checkpoint(NamedTuple):
    """The state after the first ``position`` tokens of a sequence."""

    position: int
    state: State


@dataclass(frozen=True, slots=True, eq=False)
class StateGroup:
    """The sequences of a batch that have the same number of tokens.

    Attributes:
        seq_ids: the sequences [B].
        rows: indices of their tokens in the batch [B * T], sequence by sequence; a slice if contiguous.
        before: the states before the batch [B].
        after: the states after the batch, for each layer its arrays [B, ...]; filled in by the forward pass.
        carried: the first layer's values, which later layers read in this batch.
    """

    seq_ids: Sequence[int]
    rows: slice | NDArray[np.intp]
    before: Sequence[State]
    after: list[Parts] = field(default_factory=list)
    carried: list[Array] = field(default_factory=list)

    def parts(self, layer: int, ops: Ops) -> Parts:
        """The state of a layer before the batch: arrays [B, ...]."""
        if len(self.before) == 1:
            return self.before[0][layer]
        several = zip(*(state[layer] for state in self.before), strict=True)
        return tuple(ops.concatenated(part) for part in several)

    def states(self) -> list[State]:
        """The states after the batch [B]; copied if B > 1, so that each can be freed on its own."""
        if len(self.before) == 1:
            return [tuple(self.after)]
        n = range(len(self.before))
        return [tuple(tuple(part[i : i + 1] * 1 for part in parts) for parts in self.after) for i in n]


def in_order(ops: Ops, groups: Sequence[StateGroup], parts: Sequence[Array]) -> Array:
    """The results of all groups [B * T, width], reordered as in the batch."""
    if len(groups) == 1 and isinstance(groups[0].rows, slice):
        return parts[0]
    n_tokens = sum(len(part) for part in parts)
    rows = np.concatenate([np.arange(n_tokens)[group.rows] for group in groups])
    return ops.rows(ops.concatenated(parts), np.argsort(rows))


class StatePool:
    """The states of a context's sequences: the current one of each, and a few checkpoints.

    Args:
        specs: the recurrent layers.
        n_seq_max: number of sequences.
        device: the device of the states.
    """

    def __init__(self, specs: Sequence[RecurrentSpec], n_seq_max: int, device: Device) -> None:
        self._shapes = [spec.state_shapes for spec in specs]
        self._device = device
        self._empty: State = tuple(
            tuple(device.from_host(np.zeros((1, *shape), np.float32)) for shape in shapes) for shapes in self._shapes
        )
        self._held: list[tuple[Checkpoint, ...]] = [()] * n_seq_max

    def plan(self, runs: Sequence[Run]) -> list[StateGroup]:
        """Group the sequences of a batch by their number of tokens."""
        groups: dict[int, list[Run]] = {}
        for run in runs:
            groups.setdefault(run.n_held - run.start, []).append(run)
        return [
            StateGroup([run.seq_id for run in group], _rows(group), [self._current(run.seq_id) for run in group])
            for group in groups.values()
        ]

    def commit(self, groups: Sequence[StateGroup], runs: Sequence[Run]) -> None:
        """Make the batch's states current, after it has run; the previous states become checkpoints."""
        lengths = {run.seq_id: run.n_held for run in runs}
        for group in groups:
            for seq_id, state in zip(group.seq_ids, group.states(), strict=True):
                self.put(seq_id, Checkpoint(lengths[seq_id], state))

    def put(self, seq_id: int, checkpoint: Checkpoint) -> None:
        """Set a sequence's state and drop later checkpoints."""
        before = [earlier for earlier in self._held[seq_id] if earlier.position < checkpoint.position]
        self._held[seq_id] = _thinned((*before, checkpoint))

    def nearest(self, seq_id: int, length: int) -> Checkpoint:
        """The latest checkpoint within the first ``length`` tokens of a sequence."""
        before = [checkpoint for checkpoint in self._held[seq_id] if checkpoint.position <= length]
        return before[-1] if before else Checkpoint(0, self._empty)

    def fork(self, src: int, dst: int, now: Checkpoint) -> None:
        """Let the empty ``dst`` share the checkpoints of ``src`` up to ``now``."""
        self._held[dst] = self._held[src]
        self.put(dst, now)

    def drop(self, seq_id: int) -> None:
        """Drop all states of a sequence."""
        self._held[seq_id] = ()

    def export(self, seq_id: int) -> Iterator[bytes]:
        """The current state of a sequence: the arrays of each layer, float32, one piece each."""
        state = self._current(seq_id)
        return (self._device.to_host(part).tobytes() for parts in state for part in parts)

    def sections(self, parts: list[Array]) -> list[Section]:
        """The sections of a payload of ``export``.

        Args:
            parts: list to which the arrays of each layer are appended, in order, for ``exchange``.
        """

        def write(shape: tuple[int, ...], _: int, data: bytes) -> None:
            numbers = np.frombuffer(data, "<f4").reshape(1, *shape)
            check_numbers(numbers, "the state")
            parts.append(self._device.from_host(numbers.copy()))

        return [Section(1, 4 * math.prod(shape), partial(write, shape)) for shape in chain(*self._shapes)]

    def exchange(self, seq_id: int, length: int, parts: Sequence[Array]) -> None:
        """Replace all states of a sequence by the state after ``length`` tokens.

        Args:
            seq_id: the sequence.
            length: its number of tokens.
            parts: the arrays that ``sections`` collected.
        """
        flat = iter(parts)
        self.hold(seq_id, (Checkpoint(length, tuple(tuple(next(flat) for _ in shapes) for shapes in self._shapes)),))

    def held(self, seq_id: int) -> tuple[Checkpoint, ...]:
        """The checkpoints of a sequence; the last is the current state."""
        return self._held[seq_id]

    def hold(self, seq_id: int, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Replace the checkpoints of a sequence."""
        self._held[seq_id] = checkpoints

    def _current(self, seq_id: int) -> State:
        checkpoints = self._held[seq_id]
        return checkpoints[-1].state if checkpoints else self._empty


def _thinned(checkpoints: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
    """At most ``N_CHECKPOINTS`` checkpoints and the current state.

    Drops the checkpoint whose removal leaves the smallest gap, relative to its distance from the end. The state before
    the last batch always stays: speculative decoding truncates a part of this batch.
    """
    if len(checkpoints) <= N_CHECKPOINTS + 1:
        return checkpoints
    positions, now = [0, *(checkpoint.position for checkpoint in checkpoints)], checkpoints[-1].position
    gaps = [(after - before) / (now - before) for before, after in zip(positions[:-3], positions[2:-1], strict=True)]
    least = gaps.index(min(gaps))
    return (*checkpoints[:least], *checkpoints[least + 1 :])


def _rows(runs: Sequence[Run]) -> slice | NDArray[np.intp]:
    if len(runs) == 1:
        return runs[0].rows
    return np.concatenate(
        [np.arange(run.rows.start, run.rows.stop) if isinstance(run.rows, slice) else run.rows for run in runs]
    )
