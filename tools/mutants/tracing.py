"""The lines of some files that a test runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


class Lines:
    """Collects lines while ``recording``; a function is no longer traced once all its lines are known.

    Args:
        files: the names of the files, as in ``co_filename``.
    """

    def __init__(self, files: frozenset[str]) -> None:
        self._files = files
        self._open: dict[CodeType, set[int]] = {}
        self._seen: dict[str, set[int]] = {}

    @contextmanager
    def recording(self) -> Iterator[dict[str, set[int]]]:
        """The lines that the ``with`` block runs, by file, in this and new threads."""
        self._open, self._seen = {}, {}
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield self._seen
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        unseen = self._open.get(code)
        if unseen is None:
            unseen = self._open[code] = {line for _, _, line in code.co_lines() if line is not None}
            unseen.discard(code.co_firstlineno)
        if not unseen:
            return None
        lines = self._seen.setdefault(code.co_filename, set())

        def step(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
                unseen.discard(frame.f_lineno)
            return step

        return step
