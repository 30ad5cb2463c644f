"""Copies of a conversation, to which it can go back."""

from __future__ import annotations

from dataclasses import dataclass

from slm_core.chat import Chat
from slm_core.errors import ContextFull, InvalidOption, InvalidSequence
from slm_core.types import Message


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a conversation.

    Attributes:
        messages: its messages.
        chat: a fork with its KV cache; None if the messages have to be computed again.
        reason: why there is no fork, or "".
    """

    messages: tuple[Message, ...]
    chat: Chat | None
    reason: str = ""

    @classmethod
    def of(cls, chat: Chat) -> Copy:
        """A copy of a chat: a fork, if a sequence of the context is free and there is room."""
        try:
            return cls(chat.messages, chat.fork())
        except InvalidSequence:
            return cls(chat.messages, None, "no sequence of the context is free")
        except ContextFull:
            return cls(chat.messages, None, "the context has no room for a fork")

    def close(self) -> None:
        """Close the fork."""
        if self.chat is not None:
            self.chat.close()


class Copies:
    """The copies of a conversation by name."""

    def __init__(self) -> None:
        self._copies: dict[str, Copy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def __getitem__(self, name: str) -> Copy:
        """The copy of that name.

        Raises:
            InvalidOption: there is none.
        """
        if name not in self._copies:
            raise InvalidOption(f"there is no copy {name!r} (accepted: {', '.join(self.names) or 'none yet: /fork'})")
        return self._copies[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names, oldest first."""
        return tuple(self._copies)

    def keep(self, name: str, copy: Copy) -> str:
        """Keep a copy under a name, in place of another copy; "" for the next number. Returns the name."""
        name = name or str(next(n for n in range(1, len(self) + 2) if str(n) not in self._copies))
        if name in self._copies:
            self._copies.pop(name).close()
        self._copies[name] = copy
        return name

    def replace(self, name: str, copy: Copy) -> None:
        """Put a copy in the place of another, whose fork is in use elsewhere."""
        self._copies[name] = copy

    def drop_forks(self, reason: str) -> None:
        """Close all forks; the messages stay."""
        for name, copy in self._copies.items():
            copy.close()
            self._copies[name] = Copy(copy.messages, None, copy.reason or reason)

    def clear(self) -> None:
        """Drop all copies."""
        self.drop_forks("")
        self._copies.clear()
