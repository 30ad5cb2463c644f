"""Overflow policies: dropping messages when a chat and its answer do not fit into the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slm_core.errors import ContextFull, InvalidOption
from slm_core.types import Message, Role

NAMES = ("error", "truncate_middle", "shift", "summarize")
_ANSWER_SHARE = 4  # an answer without a limit has room for a quarter of the context
_KEPT_SHARE = 2  # policies that compute kept messages again keep half, so that not every turn overflows


@dataclass(frozen=True, slots=True)
class Summarize:
    """The policy "summarize", with its function.

    Attributes:
        function: returns the message that replaces the dropped messages; it must not use the chat.

    Raises:
        InvalidOption: ``function`` is not callable.
    """

    function: Callable[[Sequence[Message]], Message]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidOption(f"Summarize({self.function!r}) (accepted: a function)")


Overflow: TypeAlias = str | Summarize
"""A policy by name, or ``Summarize``.

- "error": ``ContextFull`` is raised, nothing changes.
- "truncate_middle": the system message and the last turns stay, up to half of the context; they are computed again.
- "shift": the oldest turns are dropped until there is room. If the context can cut, they are cut out of the KV cache,
  and later tokens keep their values; otherwise the kept messages are computed again.
- ``Summarize``: like "truncate_middle", with a message that replaces the dropped messages.

The system message and the last turn, from the last user's message on, are never dropped.
"""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Messages that fit.

    Attributes:
        messages: the kept messages.
        dropped: the dropped messages.
        start: the index of the first dropped message.
        summary: the message that replaces the dropped messages.
    """

    messages: tuple[Message, ...]
    dropped: tuple[Message, ...] = ()
    start: int = 0
    summary: Message | None = None


def name_of(overflow: Overflow) -> str:
    """The name of a policy.

    Raises:
        InvalidOption: an unknown policy, or a policy that needs a function.
    """
    if isinstance(overflow, Summarize):
        return "summarize"
    if overflow == "summarize":
        raise InvalidOption("overflow='summarize' needs a function: pass overflow=Summarize(function)")
    if overflow not in NAMES:
        raise InvalidOption(f"overflow={overflow!r} (accepted: {', '.join(NAMES[:-1])}, Summarize(function))")
    return overflow


def reserved(n_ctx: int, max_tokens: int | None) -> int:
    """Positions kept free for an answer: its ``max_tokens``, at most a quarter of the context."""
    quarter = n_ctx // _ANSWER_SHARE
    return quarter if max_tokens is None else min(max_tokens, quarter)


def fit(
    messages: Sequence[Message],
    overflow: Overflow,
    count: Callable[[Sequence[Message]], int],
    room: int,
    reserve: int,
) -> Fitted:
    """Drop turns until the messages fit.

    Args:
        messages: all messages, up to the last turn.
        overflow: the policy.
        count: returns the number of tokens of messages.
        room: the largest number of positions for messages and answer.
        reserve: positions of ``room`` for the answer.

    Raises:
        ContextFull: the system message and the last turn alone do not fit.
    """
    name = name_of(overflow)
    if name == "error" or count(messages) + reserve <= room:
        return Fitted(tuple(messages))
    first, ends = _turns(messages)
    target = room - reserve if name == "shift" else min(room - reserve, room // _KEPT_SHARE)
    kept = [(*messages[:first], *messages[end:]) for end in ends]
    fitting = bisect_left(kept, True, key=lambda remaining: count(remaining) <= target)
    end = ends[min(fitting, len(ends) - 1)]
    remaining = (*messages[:first], *messages[end:])
    dropped, summary = tuple(messages[first:end]), None
    if isinstance(overflow, Summarize) and dropped:
        summary = overflow.function(dropped)
        remaining = (*messages[:first], summary, *messages[end:])
    if (needed := count(remaining)) > room - min(reserve, 1):
        raise ContextFull(needed + min(reserve, 1), room)
    return Fitted(remaining, dropped, first, summary)


def _turns(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """The start of the first turn, and the indices up to which messages may be dropped: this start and turn ends."""
    first = 1 if messages and messages[0].role is Role.SYSTEM else 0
    begins = [i for i, message in enumerate(messages) if i > first and message.role is Role.USER]
    return first, [first, *begins]
