"""Makes random programs of session calls, and simplifies the steps of failing ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from slm_conformance.suite.programs.answer_model import Every
from slm_conformance.suite.programs.session_programs import N_SLOTS
from slm_conformance.suite.programs.session_steps import (
    Answer,
    Append,
    CloseSlot,
    Complete,
    DumpAs,
    ForkTo,
    Look,
    MarkHere,
    ReadOn,
    Remove,
    RestoreTo,
    Rollback,
    ScoreOf,
    ScratchBranch,
    Shorten,
    Step,
)
from slm_core.generation import StoppingAction

_Value = TypeVar("_Value")

N_PARTS = 16
_N_OPTIONS = 8
_ACTIONS = (*StoppingAction, StoppingAction.PAUSE, StoppingAction.PAUSE, None)
_TEXTS = ("a<|im_end|>", "bé", "<|im_start|>user\n")


class SessionProgramMaker:
    """Makes programs of parts; a part is a few related steps.

    Args:
        n_vocab: vocabulary size V.
        seed: equal programs for an equal seed.
    """

    def __init__(self, n_vocab: int, seed: int) -> None:
        self._n_vocab = n_vocab
        self._rng = np.random.default_rng(seed)
        self._parts: dict[Callable[[int], Sequence[Step]], int] = {
            self._append: 3,
            self._answer: 3,
            self._interrupted: 4,
            self._go_back: 3,
            self._remove: 5,
            self._fork: 3,
            self._dump: 3,
            self._look_aside: 2,
            self._odd: 3,
        }

    def make(self) -> list[Step]:
        """A program; its sessions begin with some tokens."""
        program: list[Step] = [Append(slot, self._tokens(6)) for slot in range(N_SLOTS - 1)]
        weights = np.array(list(self._parts.values()), float)
        for i in self._rng.choice(len(weights), N_PARTS, p=weights / weights.sum()):
            program += list(self._parts)[i](self._slot())
        return program

    # Parts.

    def _append(self, slot: int) -> Sequence[Step]:
        return [Append(slot, text=self._one_of(_TEXTS)) if self._rarely(0.2) else Append(slot, self._tokens(4))]

    def _answer(self, slot: int) -> Sequence[Step]:
        return [self._asked(slot, 99), *([self._look(slot)] if self._rarely(0.3) else [])]

    def _interrupted(self, slot: int) -> Sequence[Step]:
        """An answer that is paused or abandoned, something else, and the rest of the answer."""
        pause = Every(1 + self._below(3), StoppingAction.PAUSE)
        begun = self._asked(slot, 1 + self._below(3)) if self._rarely(0.3) else self._asked(slot, 99, pause)
        between = self._one_of([self._look_aside, self._fork, self._dump, self._odd, self._odd])(slot)
        resume = (
            Answer(slot, None, self._criterion(), 99)
            if self._rarely(0.7)
            else ReadOn(slot, 99, cancel=self._rarely(0.3))
        )
        return [begun, *between, resume]

    def _go_back(self, slot: int) -> Sequence[Step]:
        steps: list[Step] = [MarkHere(slot), *self._append(slot), *self._answer(slot)]
        steps += [MarkHere(slot)] if self._rarely(0.6) else []
        steps += self._look_aside(slot) if self._rarely(0.5) else []
        return [*steps, Rollback(slot, self._below(3)), *self._append(slot), Rollback(slot, 0)]

    def _remove(self, slot: int) -> Sequence[Step]:
        steps: list[Step] = [MarkHere(slot), *self._append(slot), MarkHere(slot), *self._append(slot), MarkHere(slot)]
        steps += [self._look(slot)] if self._rarely(0.8) else []
        first, second = self._one_of([(1, 2), (1, 2), (1, 3), (0, 2), (0, 1), (1, 1), (2, 3)])
        steps += [Remove(slot, first, second, exact=self._rarely(0.5), any_mark=self._rarely(0.1))]
        steps += [self._look(slot)] if self._rarely(0.7) else []
        return [*steps, Rollback(slot, self._below(3), any_mark=self._rarely(0.2))]

    def _fork(self, slot: int) -> Sequence[Step]:
        dst = (slot + 1 + self._below(N_SLOTS - 1)) % N_SLOTS
        steps: list[Step] = [CloseSlot(dst)] if self._rarely(0.7) else []
        steps += self._append(slot) if self._rarely(0.4) else []
        return [*steps, ForkTo(slot, dst), Answer(dst, None, self._criterion(), 99), Answer(slot, None, None, 99)]

    def _dump(self, slot: int) -> Sequence[Step]:
        name, dst = self._below(2), self._below(N_SLOTS)
        steps: list[Step] = [DumpAs(slot, name), *self._odd(slot)]
        steps += [CloseSlot(dst), RestoreTo(dst, name, damaged=self._rarely(0.1))]
        return [*steps, Answer(dst, None, self._criterion(), 99)]

    def _look_aside(self, slot: int) -> Sequence[Step]:
        scratch_branch = ScratchBranch(slot, self._tokens(3), self._below(4), fails=self._rarely(0.4))
        asides: tuple[Step, ...] = (
            scratch_branch,
            scratch_branch,
            ScoreOf(slot, self._tokens(3)),
            Complete(slot, self._below(_N_OPTIONS)),
        )
        return [*([self._look(slot)] if self._rarely(0.4) else []), self._one_of(asides)]

    def _odd(self, slot: int) -> Sequence[Step]:
        odd: tuple[Step, ...] = (
            Append(slot, self._tokens(30)),
            Append(slot, self._tokens(60)),
            Rollback(slot, self._below(6), any_mark=True),
            Shorten(slot, self._below(8) - 1),
            CloseSlot(slot),
            self._look(slot),
            Answer(slot, self._below(_N_OPTIONS), None, 99),
            MarkHere(slot),
            Remove(slot, 1, 2, exact=self._rarely(0.5)),
            Remove(slot, 0, 1, exact=self._rarely(0.5)),
        )
        return [self._one_of(odd)]

    # Elements of steps.

    def _look(self, slot: int) -> Look:
        return Look(slot, self._tokens(6) if self._rarely(0.5) else ())

    def _asked(self, slot: int, n_read: int, criterion: Every | None = None) -> Answer:
        options = None if self._rarely(0.5) else self._below(_N_OPTIONS)
        return Answer(slot, options, criterion or self._criterion(), n_read, drafts=self._rarely(0.25))

    def _slot(self) -> int:
        """A slot; usually the first, so that it gets a history."""
        return 0 if self._rarely(0.6) else self._below(N_SLOTS)

    def _criterion(self) -> Every | None:
        return Every(1 + self._below(4), self._one_of(_ACTIONS)) if self._rarely(0.4) else None

    def _tokens(self, most: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, self._n_vocab, 1 + self._below(most)).tolist())

    def _one_of(self, values: Sequence[_Value]) -> _Value:
        return values[self._below(len(values))]

    def _below(self, n: int) -> int:
        return int(self._rng.integers(n))

    def _rarely(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)


def plainer(step: Step) -> Iterator[Step]:
    """Simpler steps to replace a step."""
    if isinstance(step, ScratchBranch) and step.n_back:
        yield dataclasses.replace(step, n_back=0)
    if isinstance(step, Look) and step.expected:
        yield Look(step.slot)
    if isinstance(step, Append | ScratchBranch | ScoreOf) and len(step.tokens) > 1:
        yield dataclasses.replace(step, tokens=step.tokens[:1])
    if isinstance(step, Answer):
        if step.drafts:
            yield dataclasses.replace(step, drafts=False)
        if step.criterion is not None:
            yield dataclasses.replace(step, criterion=None)
