"""llama.cpp's log lines, routed to ``logging.getLogger("slm_llamacpp")``."""

from __future__ import annotations

import atexit
import ctypes
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

logger = logging.getLogger("slm_llamacpp")
logger.addHandler(logging.NullHandler())  # without configured logging, nothing goes to stderr

_CONTINUATION = 5
_LONGEST = 300  # characters of a reason: llama.cpp quotes whole texts of the file
_SPEAKER = re.compile(r"\A(\w+: )?(error loading model: )?")  # the function's name, and a constant prefix
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # ggml_log_level


class Complaint(NamedTuple):
    """A warning or an error of llama.cpp."""

    level: int
    line: str


class _ThreadState(threading.local):
    """The log of one thread: the unfinished line, and the list of its errors."""

    level = logging.DEBUG
    pending = ""
    complaints: list[Complaint] | None = None


_state = _ThreadState()


def receive(level: int, text: bytes | None, _user_data: int | None = None) -> None:
    """Receive log text from llama.cpp: one line, several lines, or a part of a line."""
    if level != _CONTINUATION:
        if _state.pending:
            _emit(_state.level, _state.pending)
        _state.level, _state.pending = _LEVELS.get(level, logging.DEBUG), ""
    *lines, _state.pending = (_state.pending + (text or b"").decode("utf-8", "replace")).split("\n")
    for line in lines:
        _emit(_state.level, line)


def _emit(level: int, line: str) -> None:
    if level >= logging.WARNING and _state.complaints is not None:
        _state.complaints.append(Complaint(level, line.strip()))
    logger.log(level, "%s", line)


@contextmanager
def collected() -> Iterator[list[Complaint]]:
    """The warnings and errors that llama.cpp logs in this thread while the ``with`` block runs."""
    before, _state.complaints = _state.complaints, []
    try:
        yield _state.complaints
    finally:
        _state.complaints = before


def reason_in(complaints: Sequence[Complaint]) -> str:
    """The cause in one line: the most informative of llama.cpp's error lines."""
    lines = [line for level, line in complaints if level >= logging.ERROR]
    informative = [line for line in lines if "error loading model: " in line] or lines[-1:] or ["it gave no reason"]
    reason = _SPEAKER.sub("", informative[0])
    return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."


def route(api: Any) -> None:
    """Route llama.cpp's log to ``receive`` until the interpreter ends."""
    callback = api.llama_log_callback(receive)
    api.llama_log_set(callback, ctypes.c_void_p(0))

    def stop(_kept_alive: object = callback) -> None:
        api.llama_log_set(api.llama_log_callback(0), ctypes.c_void_p(0))

    atexit.register(stop)
