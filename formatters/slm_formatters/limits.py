"""Limits on the resources of a template. Templates are untrusted, because they come with model files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime

from slm_core.errors import TemplateError


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one rendering; exceeding one raises ``TemplateError``.

    Attributes:
        seconds: wall-clock time.
        characters: the length of a text, and the total length of texts in a list or mapping.
        depth: the nesting depth of lists and mappings.
    """

    seconds: float = 5.0
    characters: int = 1 << 22
    depth: int = 200


_WORK_FACTOR = 32
"""The largest number of characters and items that one rendering builds, as a multiple of ``Limits.characters``."""


class Run:
    """The resource account of one rendering: its deadline, its work so far, and its clock.

    Args:
        limits: the limits.
        now: the time for ``strftime_now``; None for the real time.
    """

    def __init__(self, limits: Limits, now: datetime | None = None) -> None:
        self.limits = limits
        self.now = now
        self._deadline = time.monotonic() + limits.seconds
        self._work_left = _WORK_FACTOR * limits.characters

    def spend(self, work: int = 1) -> None:
        """Add ``work`` characters or items to the account, before they are built."""
        self._work_left -= work
        if self._work_left < 0:
            raise TemplateError(
                f"the chat template builds more than {_WORK_FACTOR * self.limits.characters} characters"
            )
        if time.monotonic() > self._deadline:
            raise TemplateError(f"the chat template takes longer than {self.limits.seconds:g} seconds")

    def build(self, work: int, length: int | None = None) -> None:
        """Add ``work`` characters of a text to the account, before it is built; ``length`` is its total length."""
        if (work if length is None else length) > self.limits.characters:
            raise TemplateError(f"the chat template builds a text of more than {self.limits.characters} characters")
        self.spend(work)

    def check(self, value: object) -> None:
        """Refuse a list or mapping that nests too deep, or is too large as text."""
        size = self._size(value, self.limits.depth)
        if size > self.limits.characters:
            raise TemplateError(f"the chat template builds data of more than {self.limits.characters} characters")

    def _size(self, value: object, depth: int) -> int:
        """The approximate length of ``value`` as text; shared parts count each time, because text repeats them."""
        if isinstance(value, str):
            return len(value) + 1
        if not isinstance(value, (list, tuple, dict)):
            return 1
        if depth == 0:
            raise TemplateError(f"the chat template nests data deeper than {self.limits.depth}")
        self.spend(len(value) + 1)
        if isinstance(value, dict):
            return 1 + sum(self._size(key, depth - 1) + self._size(item, depth - 1) for key, item in value.items())
        return 1 + sum(self._size(item, depth - 1) for item in value)


_RUN: ContextVar[Run] = ContextVar("run")


def current() -> Run:
    """The current rendering of this thread."""
    return _RUN.get()


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Make ``run`` the current rendering."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)
