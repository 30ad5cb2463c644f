"""The terminal: consoles, text, JSON, progress bars and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

LONG_PROMPT = 256
"""The shortest prompt with a progress bar, in tokens."""

_WIDTH_OF_PIPES = 120
_colours_are_off = ContextVar("colours_are_off", default=False)
_TERMINAL_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Cancellable(Protocol):
    """An object that can be cancelled."""

    def cancel(self) -> None:
        """Stop as soon as possible."""
        ...


def out() -> Console:
    """Standard output. Colours only on a terminal, and not with ``NO_COLOR``."""
    return _console(stderr=False)


def err() -> Console:
    """Standard error."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() else _WIDTH_OF_PIPES
    return Console(stderr=stderr, highlight=False, width=width, no_color=_colours_are_off.get() or None)


@contextmanager
def colours(*, off: bool) -> Iterator[None]:
    """Inside this block, new consoles have no colours if ``off``; otherwise the environment decides."""
    token = _colours_are_off.set(off)
    try:
        yield
    finally:
        _colours_are_off.reset(token)


def printable(text: str) -> str:
    """Text without the control characters that a terminal obeys; tabs and line feeds stay."""
    return _TERMINAL_CONTROLS.sub("", text)


def replace_closed_streams() -> None:
    """Open the null device in place of standard streams that the caller closed (``slm ... >&-`` in a shell).

    Python has None for a closed stream. The first file that is opened would also get its file descriptor: a model file
    that is written would receive what engines print on standard output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # open until Python exits


def use_utf8_in_pipes() -> None:
    """Make pipes and redirected files UTF-8 on Windows, as Python 3.15 does: a code page lacks most of Unicode."""
    if sys.platform != "win32" or "PYTHONIOENCODING" in os.environ:
        return
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8")


def complain(message: str) -> None:
    """Print an error in one line on standard error."""
    text = Text("error: ", style="bold red") + Text(printable(" ".join(message.split())))
    err().print(text, soft_wrap=True)


def note(message: str) -> None:
    """Print a note of the program on standard error, in another style than the model's text."""
    err().print(Text(printable(message), style="dim"), soft_wrap=True)


def write(console: Console, text: str, style: str = "") -> None:
    """Write streamed text at once; on a terminal, without control characters."""
    if not console.is_terminal:
        console.file.write(text)
    elif text := printable(text):
        console.print(Text(text, style=style), end="", soft_wrap=True)
    console.file.flush()


def print_json(value: object) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


@contextmanager
def progress_of(label: str) -> Iterator[Callable[[float], None] | None]:
    """A progress bar on standard error while something loads; None if it is not a terminal."""
    console = err()
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda done: bar.update(task, completed=done)


class PrefillBar:
    """A progress bar on standard error while a long prompt is decoded, if it is a terminal.

    Call it with the number of decoded tokens and their total.
    """

    def __init__(self) -> None:
        self._console = err()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def __call__(self, done: int, total: int) -> None:
        """Show the progress; the bar disappears at the end."""
        if not self._console.is_terminal or total < LONG_PROMPT:
            return
        if self._bar is None and done < total:
            columns = (TextColumn("Reading"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        if done >= total:
            self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def stopping(running: Cancellable) -> Iterator[None]:
    """Inside this block, Ctrl-C cancels ``running``; a second Ctrl-C raises ``KeyboardInterrupt``."""
    pressed = False

    def cancel(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        running.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
