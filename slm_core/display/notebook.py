"""A progress bar in notebooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from slm_core.display.blocks import usage_bar
from slm_core.display.html import Html, element
from slm_core.display.text import count

_REFRESH_S = 0.1


def in_notebook() -> bool:
    """Whether the program runs in a Jupyter kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookProgressBar:
    """The number of answered requests: a block of HTML, without widgets, replaced at most ten times a second.

    Args:
        total: the number of requests.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._n_done = 0
        self._started = self._shown_at = time.monotonic()
        self._handle: Any = None

    def __enter__(self) -> Callable[[int], None]:
        from IPython.display import display

        self._started = self._shown_at = time.monotonic()
        self._handle = display(self, display_id=True)  # type: ignore[no-untyped-call]  # IPython has no types here
        return self._advance

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.update(self)

    def __repr__(self) -> str:
        return f"{self._n_done:,} of {count(self._total, 'answer')}"

    def _repr_html_(self) -> Html:
        seconds = time.monotonic() - self._started
        left = seconds / self._n_done * (self._total - self._n_done) if self._n_done else 0.0
        words = f"{self!r}, {seconds:.0f} s" + (f", about {left:.0f} s left" if left >= 1 else "")
        bar = usage_bar([("answered", self._n_done), ("to do", self._total - self._n_done)])
        return element("div", bar, words, style="max-width:480px;font-size:85%")

    def _advance(self, n_done: int) -> None:
        changed, self._n_done = n_done != self._n_done, n_done
        now = time.monotonic()
        if changed and now - self._shown_at >= _REFRESH_S:
            self._shown_at = now
            self._handle.update(self)
