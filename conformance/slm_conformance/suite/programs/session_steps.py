"""Calls of sessions, as steps of random programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from slm_conformance.suite.programs.answer_model import Every


@dataclass(frozen=True, slots=True)
class Append:
    """``append_tokens``, or ``append`` of a text that spells a control token."""

    slot: int
    tokens: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """``generate`` with numbered options, or with the session's (None); then read ``n_read`` events."""

    slot: int
    options: int | None
    criterion: Every | None
    n_read: int
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class ReadOn:
    """Read more of the last answer. It may be cancelled first."""

    slot: int
    n_read: int
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class MarkHere:
    """``mark``; marks are numbered."""

    slot: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """``rollback`` to one of the session's valid marks, counted from the last; or to any mark, even invalid ones."""

    slot: int
    mark: int
    any_mark: bool = False


@dataclass(frozen=True, slots=True)
class Shorten:
    """``truncate`` by a number of tokens; -1 is one more than the session has."""

    slot: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Remove:
    """``remove`` the tokens between two marks, chosen as for a rollback."""

    slot: int
    start: int
    end: int
    exact: bool
    any_mark: bool = False


@dataclass(frozen=True, slots=True)
class ForkTo:
    """``fork`` into a slot that is closed."""

    slot: int
    dst: int


@dataclass(frozen=True, slots=True)
class DumpAs:
    """``dump``, stored as ``name``."""

    slot: int
    name: int


@dataclass(frozen=True, slots=True)
class RestoreTo:
    """``Session.restore`` the dump ``name``, or the dump without its last byte, into a closed slot."""

    slot: int
    name: int
    damaged: bool


@dataclass(frozen=True, slots=True)
class ScratchBranch:
    """``scratch_branch``: remove ``n_back`` tokens, append and answer in it, and perhaps raise."""

    slot: int
    tokens: tuple[int, ...]
    n_back: int
    fails: bool


@dataclass(frozen=True, slots=True)
class ScoreOf:
    """``score`` of some tokens."""

    slot: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """``completions``, two of them."""

    slot: int
    options: int


@dataclass(frozen=True, slots=True)
class Look:
    """``next_logits``, perhaps with expected tokens."""

    slot: int
    expected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """``close``."""

    slot: int


Step: TypeAlias = (
    Append
    | Answer
    | ReadOn
    | MarkHere
    | Rollback
    | Shorten
    | Remove
    | ForkTo
    | DumpAs
    | RestoreTo
    | ScratchBranch
    | ScoreOf
    | Complete
    | Look
    | CloseSlot
)
