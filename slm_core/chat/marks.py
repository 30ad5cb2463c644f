"""Marks: positions in a session for a rollback."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from slm_core.errors import InvalidMark
from slm_core.numerics import shown


class Mark:
    """An opaque position in a session for a rollback, made by ``Session.mark``."""

    __slots__ = ("__weakref__", "_marks")

    def __init__(self, marks: Marks) -> None:
        self._marks = weakref.ref(marks)

    def __repr__(self) -> str:
        marks = self._marks()
        place = None if marks is None else marks.known_place(self)
        return "<Mark: stale>" if place is None else f"<Mark: before token {place}>"

    def is_one_of(self, marks: Marks) -> bool:
        """Whether the mark is of this session."""
        return self._marks() is marks


class Marks:
    """The marks of one session and their positions in its history, by weak references."""

    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[Mark, int] = weakref.WeakKeyDictionary()

    def add(self, place: int) -> Mark:
        """A mark before the token at position ``place``."""
        mark = Mark(self)
        self._places[mark] = place
        return mark

    def known_place(self, mark: Mark) -> int | None:
        """The position of a mark; None for a stale one."""
        return self._places.get(mark)

    def place(self, mark: Mark) -> int:
        """The position of a mark.

        Raises:
            InvalidMark: the mark is stale, of another session, or not a mark.
        """
        if not isinstance(mark, Mark):
            raise InvalidMark(f"{shown(mark)} is not a mark (accepted: the result of mark(); truncate takes a length)")
        if not mark.is_one_of(self):
            raise InvalidMark("the mark is of another session")
        if mark not in self._places:
            raise InvalidMark("the mark is stale: its position was removed")
        return self._places[mark]

    def places(self) -> dict[Mark, int]:
        """The positions of all marks, for ``bring_back``."""
        return dict(self._places)

    def bring_back(self, places: Mapping[Mark, int]) -> None:
        """Restore the positions of marks."""
        self._places.update(places)

    def truncate(self, length: int) -> None:
        """Truncate the history to ``length``: later marks become stale."""
        for mark, position in self.places().items():
            if position > length:
                del self._places[mark]

    def remove(self, start: int, end: int) -> None:
        """Remove [start, end) of the history: marks within become stale, later marks move."""
        for mark, position in self.places().items():
            if start < position < end:
                del self._places[mark]
            elif position >= end:
                self._places[mark] = position - (end - start)
