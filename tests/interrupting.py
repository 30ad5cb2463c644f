"""Interrupts (Ctrl-C) at a chosen place of a call."""

from __future__ import annotations

import inspect
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from slm_core.interrupts import uninterrupted

ARRIVES_S = 10.0


def n_calls_of(call: Callable[[], object]) -> int:
    """The number of calls of Python functions of a call; see ``interrupted``."""
    return _watched(call, None)


def interrupted(call: Callable[[], object], stop: int) -> bool:
    """Make a call and send SIGINT at the ``stop``-th call of a Python function in it; whether the call returned.

    Waits until the interrupt is raised.
    """
    has_returned = False

    def noted() -> None:
        nonlocal has_returned
        call()
        has_returned = True

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if _watched(noted, stop + 1) <= stop:
            return True  # this time it made fewer calls
        with uninterrupted:  # raises an interrupt that is due
            pass
        time.sleep(ARRIVES_S)
    except KeyboardInterrupt:
        return has_returned
    finally:
        signal.signal(signal.SIGINT, before)
    raise AssertionError("the interrupt is lost")


def _watched(call: Callable[[], object], stop: int | None) -> int:
    n = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n
        if event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            n += 1
            if n == stop:
                signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return n
