"""Interrupts (Ctrl-C) at a chosen place of a call."""

from __future__ import annotations

import inspect
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

ARRIVES_S = 5.0
"""Seconds to wait for an interrupt after all calls. An interrupt that is not raised by then is lost."""


def n_calls_of(call: Callable[[], object]) -> int:
    """The number of Python functions that a call calls, as ``interrupted`` counts them."""
    return _watched(call, None)


def interrupted(call: Callable[[], object], stop: int, following: Callable[[], object]) -> bool:
    """Make a call, send SIGINT at the ``stop``-th call of a Python function in it, and wait until it is raised.

    Generators do not count: Python resumes an abandoned generator once more, and ignores its exceptions.

    Args:
        call: the call.
        stop: the number of the call of a function, from 1.
        following: the next call. If ``call`` has returned, the interrupt may be raised in this call.

    Returns:
        Whether the call returned before the interrupt was raised.

    Raises:
        AssertionError: the interrupt is lost.
    """
    has_returned = False

    def tracked_call() -> None:
        nonlocal has_returned
        call()
        has_returned = True

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if _watched(tracked_call, stop + 1) <= stop:
            return True  # this time the call called fewer functions
        following()
        time.sleep(ARRIVES_S)
    except KeyboardInterrupt:
        return has_returned
    finally:
        signal.signal(signal.SIGINT, handler)
    raise AssertionError("the call has returned, and the interrupt is lost")


def _watched(call: Callable[[], object], stop: int | None) -> int:
    n = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n
        if event != "call" or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        n += 1
        if n == stop:
            signal.raise_signal(signal.SIGINT)

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return n
