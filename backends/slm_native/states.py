"""The states of recurrent layers, of the same size for every length of a sequence.

A state never changes: a batch reads the states before it and makes new ones. So forks share them, and what was true
before a batch is true again if it fails.
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
"""Earlier states that a sequence keeps, about as far apart as they lie behind: to forget n tokens takes decoding a few
times n again at most."""

Parts: TypeAlias = tuple[Array, ...]
"""What a layer remembers of B sequences, [B, ...] each."""
State: TypeAlias = tuple[Parts, ...]
"""Of each recurrent layer its parts, [1, ...] each."""


class Checkpoint(NamedTuple):
    """The state after the first ``position`` tokens of a sequence."""

    position: int
    state: State


@dataclass(frozen=True, slots=True, eq=False)
class StateGroup:
    """Sequences that bring equally many tokens.

    Attributes:
        seq_ids: the sequences [B].
        rows: their tokens in the batch [B * T], sequence by sequence; a slice where they lie like that.
        before: the states before the batch [B].
        after: the states after it, of each layer its parts [B, ...]; the forward pass fills them in.
        carried: the first layer's output for later layers, in this batch.
    """

    seq_ids: Sequence[int]
    rows: slice | NDArray[np.intp]
    before: Sequence[State]
    after: list[Parts] = field(default_factory=list)
    carried: list[Array] = field(default_factory=list)

    def parts(self, layer: int, ops: Ops) -> Parts:
        """The state of a layer before the batch, [B, ...] each."""
        if len(self.before) == 1:
            return self.before[0][layer]
        several = zip(*(state[layer] for state in self.before), strict=True)
        return tuple(ops.concatenated(part) for part in several)

    def states(self) -> list[State]:
        """The states after the batch [B]; those of several sequences are copied, so that each goes by itself."""
        if len(self.before) == 1:
            return [tuple(self.after)]
        n = range(len(self.before))
        return [tuple(tuple(part[i : i + 1] * 1 for part in parts) for parts in self.after) for i in n]


def in_order(ops: Ops, groups: Sequence[StateGroup], parts: Sequence[Array]) -> Array:
    """What was made of each group's rows, [B * T, width], in the order of the batch."""
    if len(groups) == 1 and isinstance(groups[0].rows, slice):
        return parts[0]
    n_tokens = sum(len(part) for part in parts)
    places = np.concatenate([np.arange(n_tokens)[group.rows] for group in groups])
    return ops.rows(ops.concatenated(parts), np.argsort(places))


class StatePool:
    """The states of a context's sequences, the current one of each and a few earlier ones.

    Args:
        specs: the recurrent layers.
        n_seq_max: sequences.
        device: the states' device.
    """

    def __init__(self, specs: Sequence[RecurrentSpec], n_seq_max: int, device: Device) -> None:
        self._shapes = [spec.state_shapes for spec in specs]
        self._device = device
        self._empty: State = tuple(
            tuple(device.from_host(np.zeros((1, *shape), np.float32)) for shape in shapes) for shapes in self._shapes
        )
        self._held: list[tuple[Checkpoint, ...]] = [()] * n_seq_max

    def plan(self, runs: Sequence[Run]) -> list[StateGroup]:
        """The sequences of a batch, grouped by their number of tokens."""
        groups: dict[int, list[Run]] = {}
        for run in runs:
            groups.setdefault(run.n_held - run.start, []).append(run)
        return [
            StateGroup([run.seq_id for run in group], _rows(group), [self._current(run.seq_id) for run in group])
            for group in groups.values()
        ]

    def commit(self, groups: Sequence[StateGroup], runs: Sequence[Run]) -> None:
        """A batch has run: its states are current from now on, and the earlier ones become checkpoints."""
        lengths = {run.seq_id: run.n_held for run in runs}
        for group in groups:
            for seq_id, state in zip(group.seq_ids, group.states(), strict=True):
                self.put(seq_id, Checkpoint(lengths[seq_id], state))

    def put(self, seq_id: int, checkpoint: Checkpoint) -> None:
        """Set a sequence's state; later checkpoints are dropped."""
        before = [held for held in self._held[seq_id] if held.position < checkpoint.position]
        self._held[seq_id] = _thinned((*before, checkpoint))

    def nearest(self, seq_id: int, length: int) -> Checkpoint:
        """The last state that is kept of a sequence's first ``length`` tokens."""
        before = [held for held in self._held[seq_id] if held.position <= length]
        return before[-1] if before else Checkpoint(0, self._empty)

    def fork(self, src: int, dst: int, now: Checkpoint) -> None:
        """Let the empty ``dst`` share the states of ``src`` up to ``now``."""
        self._held[dst] = self._held[src]
        self.put(dst, now)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._held[seq_id] = ()

    def export(self, seq_id: int) -> Iterator[bytes]:
        """The state of a sequence: the parts of each layer, float32, a piece each."""
        state = self._current(seq_id)
        return (self._device.to_host(part).tobytes() for parts in state for part in parts)

    def sections(self, parts: list[Array]) -> list[Section]:
        """What takes in what ``export`` gave.

        Args:
            parts: the parts of each layer are appended to it, in order, for ``exchange``.
        """

        def write(shape: tuple[int, ...], _: int, data: bytes) -> None:
            numbers = np.frombuffer(data, "<f4").reshape(1, *shape)
            check_numbers(numbers, "the state")
            parts.append(self._device.from_host(numbers.copy()))

        return [Section(1, 4 * math.prod(shape), partial(write, shape)) for shape in chain(*self._shapes)]

    def exchange(self, seq_id: int, length: int, parts: Sequence[Array]) -> None:
        """A sequence of ``length`` tokens has this state, and no other."""
        flat = iter(parts)
        self.hold(seq_id, (Checkpoint(length, tuple(tuple(next(flat) for _ in shapes) for shapes in self._shapes)),))

    def held(self, seq_id: int) -> tuple[Checkpoint, ...]:
        """The states that a sequence holds, the current one last."""
        return self._held[seq_id]

    def hold(self, seq_id: int, checkpoints: tuple[Checkpoint, ...]) -> None:
        """A sequence holds these states."""
        self._held[seq_id] = checkpoints

    def _current(self, seq_id: int) -> State:
        held = self._held[seq_id]
        return held[-1].state if held else self._empty


def _thinned(held: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
    """At most so many checkpoints and the current state: the gap that is left is small for how far behind it lies.

    The state before the last batch stays, for what takes back a part of it, as speculation does.
    """
    if len(held) <= N_CHECKPOINTS + 1:
        return held
    positions, now = [0, *(checkpoint.position for checkpoint in held)], held[-1].position
    gaps = [(after - before) / (now - before) for before, after in zip(positions[:-3], positions[2:-1], strict=True)]
    least = gaps.index(min(gaps))
    return (*held[:least], *held[least + 1 :])


def _rows(runs: Sequence[Run]) -> slice | NDArray[np.intp]:
    if len(runs) == 1:
        return runs[0].rows
    return np.concatenate(
        [np.arange(run.rows.start, run.rows.stop) if isinstance(run.rows, slice) else run.rows for run in runs]
    )
