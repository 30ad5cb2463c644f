"""Random programs of context calls, legal and illegal, and what the contract says of each: a model in plain Python.

The model holds, for each sequence, one object a position; sequences that share storage share objects, so that the
positions that are taken are the distinct objects. Logits are those of the float64 reference, which is led along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from slm_conformance.bench import Bench, Rows
from slm_conformance.tolerance import relative_errors
from slm_core.errors import (
    BatchFull,
    ContextFull,
    InvalidPosition,
    InvalidSequence,
    InvalidSnapshot,
    InvalidToken,
    SlmError,
    UnsupportedEdit,
)
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos

N_CTX, N_SEQ_MAX, N_BATCH = 24, 3, 8
_KEPT = 100
"""The reference keeps what was dumped as sequences from this number on."""

Errors: TypeAlias = set[type[SlmError]]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens for one sequence, as a part of a batch.

    Attributes:
        seq_id: the sequence.
        shift: how far the first position is from the next one; 0 is right.
        tokens: what to append.
    """

    seq_id: int
    shift: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """``decode`` a batch of runs."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """``fork``."""

    src: int
    dst: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Truncate:
    """``truncate``."""

    seq_id: int
    index: int


@dataclass(frozen=True, slots=True)
class Cut:
    """``cut``."""

    seq_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Drop:
    """``drop``."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Clear:
    """``clear``."""


@dataclass(frozen=True, slots=True)
class Dump:
    """``dump``; the bytes are kept under ``name``."""

    seq_id: int
    name: int


@dataclass(frozen=True, slots=True)
class Restore:
    """``restore`` what was kept under ``name``, or that less its last byte; nothing where nothing was kept."""

    seq_id: int
    name: int
    damaged: bool


Step: TypeAlias = Decode | Fork | Truncate | Cut | Drop | Clear | Dump | Restore


class Slot:
    """One position's worth of storage."""

    __slots__ = ("token",)

    def __init__(self, token: int) -> None:
        self.token = token


@dataclass(frozen=True, slots=True)
class Held:
    """What a sequence holds.

    Attributes:
        slots: one a position.
        n_cut: tokens that cuts have removed; whoever decodes a dump again may need room for them.
    """

    slots: tuple[Slot, ...] = ()
    n_cut: int = 0


@dataclass(slots=True)
class ContractModel:
    """The contract, in lists.

    Attributes:
        n_vocab: vocabulary size V.
        edit_level: what the context declares.
        capabilities: likewise.
        held: what each sequence holds.
        dumps: what was dumped, by name.
    """

    n_vocab: int
    edit_level: EditLevel
    capabilities: frozenset[Capability]
    held: list[Held] = field(default_factory=lambda: [Held()] * N_SEQ_MAX)
    dumps: dict[int, Held] = field(default_factory=dict)

    @property
    def n_free(self) -> int:
        """Positions that no sequence holds."""
        return N_CTX - len({slot for held in self.held for slot in held.slots})

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """What a sequence holds."""
        return tuple(slot.token for slot in self.held[seq_id].slots)

    def length(self, seq_id: int) -> int:
        """Tokens of a sequence; 0 for one that does not exist."""
        return len(self.held[seq_id].slots) if 0 <= seq_id < N_SEQ_MAX else 0

    def positions(self, runs: Sequence[Run]) -> list[tuple[int, int, tuple[int, ...]]]:
        """Sequence, first position and tokens of each run."""
        lengths = {run.seq_id: self.length(run.seq_id) for run in runs}
        placed = []
        for run in runs:
            placed.append((run.seq_id, max(0, lengths[run.seq_id] + run.shift), run.tokens))
            lengths[run.seq_id] += len(run.tokens)
        return placed

    def play(self, step: Step) -> tuple[Errors, bool]:
        """Make a step, if it is legal.

        Returns:
            errors: those that a context may raise; none where it is legal.
            must: whether it must raise one, or may also do as it is told.
        """
        errors, must = self._errors(step)
        if not errors:
            self.make(step)
        return errors, must

    def make(self, step: Step) -> None:
        """Make a step that is legal."""
        match step:
            case Decode(runs):
                for run in runs:
                    self._set(run.seq_id, (*self.held[run.seq_id].slots, *map(Slot, run.tokens)))
            case Fork(src, dst, end):
                slots = self.held[src].slots[:end]
                shared = Capability.SHARED_FORK in self.capabilities
                self.held[dst] = Held(slots if shared else _fresh(slots), self.held[src].n_cut)
            case Truncate(seq_id, index):
                self._set(seq_id, self.held[seq_id].slots[:index])
            case Cut(seq_id, start, end):
                self._set(seq_id, self._without(seq_id, start, end), end - start)
            case Drop(seq_id):
                self.held[seq_id] = Held()
            case Clear():
                self.held = [Held()] * N_SEQ_MAX
            case Dump(seq_id, name):
                self.dumps[name] = self.held[seq_id]
            case Restore(seq_id, name, _) if name in self.dumps:
                self.held[seq_id] = Held(_fresh(self.dumps[name].slots), self.dumps[name].n_cut)

    def _set(self, seq_id: int, slots: tuple[Slot, ...], n_cut: int = 0) -> None:
        self.held[seq_id] = Held(slots, self.held[seq_id].n_cut + n_cut)

    def _without(self, seq_id: int, start: int, end: int) -> tuple[Slot, ...]:
        """A cut moves what comes after it, so that it can no longer be shared."""
        slots = self.held[seq_id].slots
        return slots if start == end else slots[:start] + _fresh(slots[end:])

    def _errors(self, step: Step) -> tuple[Errors, bool]:
        named = [run.seq_id for run in step.runs] if isinstance(step, Decode) else [_sequence(step)]
        errors: Errors = set() if all(0 <= seq_id < N_SEQ_MAX for seq_id in named) else {InvalidSequence}
        if isinstance(step, Fork) and not 0 <= step.dst < N_SEQ_MAX:
            errors.add(InvalidSequence)
        match step:
            case Decode(runs):
                errors |= self._decode_errors(runs)
            case Fork(src, dst, end):
                errors |= self._fork_errors(src, dst, end)
            case Truncate(seq_id, index):
                errors |= self._level_errors(EditLevel.TRUNCATE) | self._index_errors(seq_id, index)
            case Cut(seq_id, start, end):
                errors |= self._cut_errors(seq_id, start, end)
            case Restore(seq_id, name, damaged) if name in self.dumps:
                errors |= {InvalidSnapshot} if damaged else set()
                if not errors:
                    return self._restore_errors(seq_id, self.dumps[name])
        return errors, True

    def _decode_errors(self, runs: Sequence[Run]) -> Errors:
        n = sum(len(run.tokens) for run in runs)
        checks: list[tuple[type[SlmError], bool]] = [
            (BatchFull, n > N_BATCH),
            (ContextFull, n > self.n_free),
            (InvalidToken, any(token >= self.n_vocab for run in runs for token in run.tokens)),
            (InvalidPosition, self.positions(runs) != self.positions([Run(r.seq_id, 0, r.tokens) for r in runs])),
        ]
        return {error for error, applies in checks if applies}

    def _fork_errors(self, src: int, dst: int, end: int | None) -> Errors:
        errors = set() if end is None else self._index_errors(src, end)
        if src == dst or self.length(dst):
            errors.add(InvalidSequence)
        n = self.length(src) if end is None else end
        if Capability.SHARED_FORK not in self.capabilities and n > self.n_free:
            errors.add(ContextFull)
        return errors

    def _cut_errors(self, seq_id: int, start: int, end: int) -> Errors:
        errors = self._level_errors(EditLevel.CUT)
        errors |= self._index_errors(seq_id, start) | self._index_errors(seq_id, end)
        errors |= {InvalidPosition} if end < start else set()
        if errors or not 0 <= seq_id < N_SEQ_MAX:
            return errors
        return {ContextFull} if len(self._without(seq_id, start, end)) > self._room(seq_id, start, end) else set()

    def _room(self, seq_id: int, start: int, end: int) -> int:
        """Slots that a sequence may have after a cut: those that are free, its own, and those it goes on sharing."""
        others = {slot for i, held in enumerate(self.held) if i != seq_id for slot in held.slots}
        kept = self.held[seq_id].slots if start == end else self.held[seq_id].slots[:start]
        return N_CTX - len(others) + len(others & set(kept))

    def _restore_errors(self, seq_id: int, dumped: Held) -> tuple[Errors, bool]:
        free = self._room(seq_id, 0, N_CTX)
        if len(dumped.slots) > free:
            return {ContextFull}, True
        # Whoever decodes the dump again, or keeps what it replaces until it is done, may need more.
        peak = max(len(dumped.slots) + dumped.n_cut, self.length(seq_id))
        return ({ContextFull}, False) if peak > free else (set(), True)

    def _level_errors(self, level: EditLevel) -> Errors:
        return {UnsupportedEdit} if self.edit_level < level else set()

    def _index_errors(self, seq_id: int, index: int) -> Errors:
        return set() if 0 <= index <= self.length(seq_id) else {InvalidPosition}


def _fresh(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    return tuple(Slot(slot.token) for slot in slots)


def _sequence(step: Step) -> int:
    match step:
        case Fork(src, _, _):
            return src
        case Truncate() | Cut() | Drop() | Dump() | Restore():
            return step.seq_id
    return 0


class Mismatch(AssertionError):
    """A context did otherwise than the model; the message is a script that shows it."""


class Player:
    """Plays a program on a context, beside the model and the reference.

    Args:
        bench: makes the context.
        opening: the lines of Python that make the same model.
    """

    def __init__(self, bench: Bench, opening: str) -> None:
        self._bench = bench
        self._context = bench.context(n_ctx=N_CTX, n_seq_max=N_SEQ_MAX, n_batch=N_BATCH)
        self._reference = bench.reference()
        self._model = ContractModel(bench.model.info.n_vocab, self._context.edit_level, self._context.capabilities)
        self._dumps: dict[int, bytes] = {}
        kv = f"KvType({bench.kv_type.value!r})"
        self._script = [
            *_IMPORTS,
            *opening.splitlines(),
            f"context = model.new_context(ContextOptions({N_CTX}, {N_SEQ_MAX}, {N_BATCH}, {kv}, {kv}))",
        ]

    def play(self, program: Sequence[Step]) -> None:
        """Play all steps.

        Raises:
            Mismatch: with the script.
        """
        with self._context:
            for step in program:
                self._play(step)

    def _play(self, step: Step) -> None:
        if isinstance(step, Restore) and step.name not in self._dumps:
            return
        line, call = self._call(step)
        errors, must = self._model.play(step)
        wanted = " or ".join(sorted(error.__name__ for error in errors))
        try:
            rows = call(self._context)
        except SlmError as error:
            if not isinstance(error, tuple(errors)):
                found = f"raised {type(error).__name__} ({error})"
                self._fail(line, f"it {found}, the contract says {wanted or 'nothing is wrong with it'}")
            self._script.append(f"with suppress({type(error).__name__}):\n    {line}")
        except Exception as error:
            self._fail(line, f"it raised {type(error).__name__} ({error}), which is none of slm_core.errors")
        else:
            if errors and must:
                self._fail(line, f"it was accepted, the contract says {wanted}")
            self._script.append(line)
            if errors:
                self._model.make(step)
            self._compare_rows(rows, self._follow(step))
        self._compare_held()

    def _call(self, step: Step) -> tuple[str, Callable[[Context], Rows | None]]:
        """A step as a line of Python, and what it does."""
        match step:
            case Decode(runs):
                placed = self._model.positions(runs)
                arguments = "".join(f", {run!r}" for run in placed)
                return f"rows = decode(context{arguments})", lambda context: decode(context, *placed)
            case Dump(seq_id, name):
                return f"dump_{name} = context.dump({seq_id})", lambda context: self._keep(name, context.dump(seq_id))
            case Restore(seq_id, name, damaged):
                data = self._dumps[name][:-1] if damaged else self._dumps[name]
                line = f"context.restore({seq_id}, dump_{name}{'[:-1]' if damaged else ''})"
                return line, lambda context: _nothing(context.restore(seq_id, data))
        line, edit = _edit(step)
        return f"context.{line}", lambda context: _nothing(edit(context))

    def _keep(self, name: int, data: bytes) -> None:
        self._dumps[name] = data

    def _follow(self, step: Step) -> Rows | None:
        """Lead the reference along; returns the logits of a decode."""
        reference = self._reference
        match step:
            case Decode(runs) if any(run.tokens for run in runs):
                return np.concatenate([reference.decode(run.tokens, run.seq_id) for run in runs if run.tokens])
            case Fork(src, dst, end):
                reference.fork(src, dst, end)
            case Truncate(seq_id, index):
                reference.truncate(index, seq_id)
            case Cut(seq_id, start, end):
                reference.cut(start, end, seq_id)
            case Drop(seq_id):
                reference.drop(seq_id)
            case Clear():
                for seq_id in range(N_SEQ_MAX):
                    reference.drop(seq_id)
            case Dump(seq_id, name):
                reference.fork(seq_id, _KEPT + name)
            case Restore(seq_id, name, _):
                reference.fork(_KEPT + name, seq_id)
        return None

    def _compare_rows(self, rows: Rows | None, expected: Rows | None) -> None:
        if rows is None or expected is None:
            return
        if rows.shape != expected.shape:
            self._fail(f"assert rows.shape == {expected.shape}", f"decode gave logits of shape {rows.shape}")
        errors = relative_errors(rows, expected)
        i, allowed = int(np.argmax(np.where(np.isnan(errors), np.inf, errors))), self._bench.tolerance.row
        if not errors[i] <= allowed:
            k = int(np.argmax(np.abs(rows[i] - expected[i])))
            right, off = float(expected[i, k]), float(abs(rows[i, k] - expected[i, k]))
            line = f"assert abs(rows[{i}, {k}] - {right:.6g}) < {off / 2:.2g}  # by the float64 reference"
            self._fail(
                line, f"row {i} differs from the reference by {errors[i]:.1e} of its norm, allowed {allowed:.1e}"
            )

    def _compare_held(self) -> None:
        for seq_id in range(N_SEQ_MAX):
            found, wanted = self._context.tokens(seq_id), self._model.tokens(seq_id)
            if found != wanted:
                self._fail(f"assert context.tokens({seq_id}) == {wanted}", f"sequence {seq_id} holds {found}")
        if self._context.n_free != self._model.n_free:
            self._fail(f"assert context.n_free == {self._model.n_free}", f"n_free is {self._context.n_free}")

    def _fail(self, line: str, why: str) -> None:
        script = "\n".join([*self._script, f"{line}"])
        raise Mismatch(f"a program of context calls goes wrong in its last line: {why}\n\n{script}\n")


_IMPORTS = (
    "from contextlib import suppress",
    "from pathlib import Path",
    "from slm_conformance.programs import decode",
    "from slm_conformance.factories import make_tiny_model",
    "from slm_conformance.spec import make_backend",
    "from slm_core.errors import *",
    "from slm_core.types import ContextOptions, KvType, ModelOptions, Pos",
)


def decode(context: Context, *runs: tuple[int, int, Sequence[int]]) -> Rows:
    """Decode a batch of runs: sequence, first position, tokens; the logits of all, float32 [T, V]."""
    batch = context.new_batch()
    for seq_id, first, tokens in runs:
        batch.extend(tokens, Pos(seq_id, first), logits="all")
    return context.decode(batch).copy()


def _edit(step: Step) -> tuple[str, Callable[[Context], object]]:
    match step:
        case Fork(src, dst, end):
            return f"fork({src}, {dst}, {end})", lambda context: context.fork(src, dst, end)
        case Truncate(seq_id, index):
            return f"truncate(Pos({seq_id}, {index}))", lambda context: context.truncate(Pos(seq_id, index))
        case Cut(seq_id, start, end):
            line = f"cut(Pos({seq_id}, {start}), Pos({seq_id}, {end}))"
            return line, lambda context: context.cut(Pos(seq_id, start), Pos(seq_id, end))
        case Drop(seq_id):
            return f"drop({seq_id})", lambda context: context.drop(seq_id)
    return "clear()", lambda context: context.clear()


def _nothing(_: object) -> None:
    """An edit gives no logits."""
