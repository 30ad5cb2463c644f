"""Makes random programs of chat calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from slm_conformance.suite.programs.answer_model import Every
from slm_conformance.suite.programs.chat_programs import N_SLOTS
from slm_conformance.suite.programs.chat_steps import (
    Ask,
    ChatStep,
    Choose,
    CloseChat,
    Delete,
    DumpChat,
    Edit,
    Forget,
    ForkChat,
    LookAt,
    RestoreChat,
    Resume,
    Say,
)
from slm_core.generation import StoppingAction

_Value = TypeVar("_Value")

N_PARTS = 10
_N_OPTIONS = 3
_ACTIONS = (*StoppingAction, StoppingAction.PAUSE, StoppingAction.PAUSE, None, None)
_TEXTS = ("the dog", "on", "<|im_end|>", "é 🙂", " you\n")


class ChatProgramMaker:
    """Makes programs of parts; a part is a few related steps.

    Args:
        seed: equal programs for an equal seed.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._parts: dict[Callable[[int], Sequence[ChatStep]], int] = {
            self._talk: 3,
            self._interrupted: 3,
            self._change: 3,
            self._ask: 2,
            self._fork: 2,
            self._dump: 2,
            self._odd: 1,
        }

    def make(self) -> list[ChatStep]:
        """A program."""
        program: list[ChatStep] = []
        weights = np.array(list(self._parts.values()), float)
        for i in self._rng.choice(len(weights), N_PARTS, p=weights / weights.sum()):
            program += list(self._parts)[i](self._slot())
        return program

    # Parts.

    def _talk(self, slot: int) -> Sequence[ChatStep]:
        return [Say(slot, self._text(), self._criterion(), 99), *([LookAt(slot)] if self._rarely(0.5) else [])]

    def _interrupted(self, slot: int) -> Sequence[ChatStep]:
        """An answer that is paused, abandoned or cancelled, and the steps after it."""
        pause = Every(1 + self._below(3), StoppingAction.PAUSE) if self._rarely(0.5) else None
        steps: list[ChatStep] = [Say(slot, self._text(), pause, 1 + self._below(3))]
        steps += [Resume(slot, 1)] if self._rarely(0.3) else []
        resume = Resume(slot, 99, cancel=self._rarely(0.3))
        return [*steps, resume] if self._rarely(0.4) else [*steps, *self._one_of([self._change, self._ask])(slot)]

    def _change(self, slot: int) -> Sequence[ChatStep]:
        i = self._below(6) - 2
        edit = Edit(slot, i, self._one_of(_TEXTS))
        changes: list[ChatStep] = [edit, Delete(slot, i), Forget(slot, i), Forget(slot, i)]
        change = self._one_of(changes)
        look: list[ChatStep] = [LookAt(slot)]
        return [*(look if self._rarely(0.4) else []), change, *(look if self._rarely(0.6) else [])]

    def _ask(self, slot: int) -> Sequence[ChatStep]:
        ask = Ask(slot, self._one_of(_TEXTS), self._below(_N_OPTIONS), self._criterion())
        questions: list[ChatStep] = [ask, ask, Choose(slot, self._one_of(_TEXTS), ("on", "in<|im_end|>", "you"))]
        return [self._one_of(questions), *([LookAt(slot)] if self._rarely(0.5) else [])]

    def _fork(self, slot: int) -> Sequence[ChatStep]:
        dst = (slot + 1 + self._below(N_SLOTS - 1)) % N_SLOTS
        steps: list[ChatStep] = [CloseChat(dst)] if self._rarely(0.8) else []
        steps += [ForkChat(slot, dst), Say(dst, self._text(), None, 99)]
        return [*steps, Say(slot, self._text(), None, 99)]

    def _dump(self, slot: int) -> Sequence[ChatStep]:
        name, dst = self._below(2), self._below(N_SLOTS)
        steps: list[ChatStep] = [DumpChat(slot, name), *self._odd(slot), CloseChat(dst), RestoreChat(dst, name)]
        return [*steps, Say(dst, self._text(), None, 99)]

    def _odd(self, slot: int) -> Sequence[ChatStep]:
        odd: list[ChatStep] = [LookAt(slot), CloseChat(slot), Delete(slot, 9), Say(slot, self._text(), None, 99)]
        return [self._one_of(odd)]

    # Elements of steps.

    def _text(self) -> str:
        """A message; "" to regenerate the last answer."""
        return "" if self._rarely(0.25) else self._one_of(_TEXTS)

    def _slot(self) -> int:
        return 0 if self._rarely(0.6) else self._below(N_SLOTS)

    def _criterion(self) -> Every | None:
        return Every(1 + self._below(3), self._one_of(_ACTIONS)) if self._rarely(0.35) else None

    def _one_of(self, values: Sequence[_Value]) -> _Value:
        return values[self._below(len(values))]

    def _below(self, n: int) -> int:
        return int(self._rng.integers(n))

    def _rarely(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)


def plainer(step: ChatStep) -> Iterator[ChatStep]:
    """Simpler steps to replace a step."""
    if isinstance(step, Say | Ask) and step.criterion is not None:
        yield dataclasses.replace(step, criterion=None)
    if isinstance(step, Say | Ask | Edit) and len(step.text) > 2:
        yield dataclasses.replace(step, text="on")
