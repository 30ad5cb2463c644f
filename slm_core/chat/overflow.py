"""What a chat does when its messages, and room for an answer, are more than the context holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slm_core.errors import ContextFull, InvalidOption
from slm_core.types import Message, Role

NAMES = ("error", "truncate_middle", "shift", "summarize")
_ANSWER_SHARE = 4  # an answer without a limit has room for a quarter of the context
_KEPT_SHARE = 2  # where what is kept is computed again, it is half: so that it does not happen at every turn


@dataclass(frozen=True, slots=True)
class Summarize:
    """The policy "summarize", with its function.

    Attributes:
        function: from the messages that are dropped to the one that takes their place; it must not use the chat.

    Raises:
        InvalidOption: that is no function.
    """

    function: Callable[[Sequence[Message]], Message]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidOption(f"Summarize({self.function!r}) (accepted: a function)")


Overflow: TypeAlias = str | Summarize
"""A policy by name, or ``Summarize``.

- "error": ``ContextFull`` is raised, nothing changes.
- "truncate_middle": system message and the last turns stay, as many as fill half of the context; they are computed
  again.
- "shift": the oldest turns are dropped, as few as give room; they are cut out of the KV cache where the context can do
  that (what follows keeps what it saw), else what is kept is computed again.
- ``Summarize``: as "truncate_middle", with a message in place of what is dropped.

The system message and the last turn, from the last user's message on, are never dropped.
"""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Messages that fit.

    Attributes:
        messages: the kept messages.
        dropped: the dropped messages.
        start: the index of the first dropped message.
        summary: the message in their place.
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
    """Drop turns until the rest fits.

    Args:
        messages: all of them, the last turn at the end.
        overflow: how.
        count: the tokens that messages take.
        room: positions that they may take.
        reserve: positions for the answer, of these.

    Raises:
        ContextFull: even system message and last turn do not fit.
    """
    name = name_of(overflow)
    if name == "error" or count(messages) + reserve <= room:
        return Fitted(tuple(messages))
    first, ends = _turns(messages)
    target = room - reserve if name == "shift" else min(room - reserve, room // _KEPT_SHARE)
    kept = [(*messages[:first], *messages[end:]) for end in ends]
    fitting = bisect_left(kept, True, key=lambda rest: count(rest) <= target)
    end = ends[min(fitting, len(ends) - 1)]
    rest = (*messages[:first], *messages[end:])
    dropped, summary = tuple(messages[first:end]), None
    if isinstance(overflow, Summarize) and dropped:
        summary = overflow.function(dropped)
        rest = (*messages[:first], summary, *messages[end:])
    if (needed := count(rest)) > room - min(reserve, 1):
        raise ContextFull(needed + min(reserve, 1), room)
    return Fitted(rest, dropped, first, summary)


def _turns(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """The start of the first turn, and the ends of all turns up to which messages may be dropped; 0 turns, too."""
    first = 1 if messages and messages[0].role is Role.SYSTEM else 0
    begins = [i for i, message in enumerate(messages) if i > first and message.role is Role.USER]
    return first, [first, *begins]
