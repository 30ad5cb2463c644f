"""Calls of chats and oracles, as steps of random programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from slm_conformance.suite.programs.answer_model import Every


@dataclass(frozen=True, slots=True)
class Say:
    """``stream`` a message, or ``regenerate`` if it is empty, and read ``n_read`` events."""

    slot: int
    text: str
    criterion: Every | None
    n_read: int


@dataclass(frozen=True, slots=True)
class Resume:
    """``resume`` a paused stream, and continue to read; perhaps cancel it first."""

    slot: int
    n_read: int
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class Edit:
    """``edit`` a message."""

    slot: int
    i: int
    text: str


@dataclass(frozen=True, slots=True)
class Delete:
    """``delete`` a message."""

    slot: int
    i: int


@dataclass(frozen=True, slots=True)
class Forget:
    """``forget`` a message."""

    slot: int
    i: int


@dataclass(frozen=True, slots=True)
class ForkChat:
    """``fork`` into a slot that is closed."""

    slot: int
    dst: int


@dataclass(frozen=True, slots=True)
class Ask:
    """An oracle's ``ask``, with options by number."""

    slot: int
    text: str
    options: int
    criterion: Every | None


@dataclass(frozen=True, slots=True)
class Choose:
    """An oracle's ``choose`` between texts."""

    slot: int
    text: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DumpChat:
    """``dump``, stored as ``name``."""

    slot: int
    name: int


@dataclass(frozen=True, slots=True)
class RestoreChat:
    """``Chat.restore`` the dump ``name`` into a closed slot, in another context."""

    slot: int
    name: int


@dataclass(frozen=True, slots=True)
class LookAt:
    """The next logits."""

    slot: int


@dataclass(frozen=True, slots=True)
class CloseChat:
    """``close``."""

    slot: int


ChatStep: TypeAlias = (
    Say | Resume | Edit | Delete | Forget | ForkChat | Ask | Choose | DumpChat | RestoreChat | LookAt | CloseChat
)
