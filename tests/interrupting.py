"""Interrupts at a chosen place of a call of slm_core, which leaves them to its next block."""

from __future__ import annotations

from collections.abc import Callable

from slm_conformance.suite import interrupting
from slm_conformance.suite.interrupting import n_calls_of
from slm_core.interrupts import uninterrupted

__all__ = ["interrupted", "n_calls_of"]


def interrupted(call: Callable[[], object], stop: int) -> bool:
    """See ``interrupting.interrupted``."""
    return interrupting.interrupted(call, stop, uninterrupted(lambda: None))
