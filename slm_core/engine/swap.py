"""Dumps of requests that gave up their sequences, where bringing them back is sooner than computing them again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from slm_core.protocols import Context
from slm_core.types import Capability

_WEIGHT = 0.5
"""Of the newest measurement in a running mean."""

_log = logging.getLogger(__name__)


class Swap:
    """Holds dumps in memory, within a budget.

    Args:
        context: whose sequences are dumped.
        budget_bytes: of all dumps together.
        clock: seconds.

    Attributes:
        held_bytes: of the dumps that are held now.
    """

    def __init__(self, context: Context, budget_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._context = context
        self._budget = budget_bytes if Capability.KV_PAYLOAD in context.capabilities else 0
        self._clock = clock
        self._dumps: dict[int, bytes] = {}  # by request id
        self._seconds: dict[str, float] = {}  # of a position, running means: "dump" and "restore"
        self._bytes_per_position = 0.0
        self.held_bytes = 0

    def __contains__(self, request_id: int) -> bool:
        """Whether there is a dump of a request."""
        return request_id in self._dumps

    def seconds(self, n_positions: int) -> float | None:
        """What a dump and its restore will take, None before the first one; infinity where there is no room for it."""
        if self.held_bytes + n_positions * self._bytes_per_position > self._budget or not self._budget:
            return float("inf")
        if "dump" not in self._seconds:
            return None
        return n_positions * (self._seconds["dump"] + self._seconds.get("restore", self._seconds["dump"]))

    def put(self, request_id: int, seq_id: int) -> bool:
        """Dump the sequence of a request; returns whether there was room."""
        started, n_positions = self._clock(), self._context.length(seq_id)
        dump = self._context.dump(seq_id)
        self._note("dump", (self._clock() - started) / n_positions)
        self._bytes_per_position = len(dump) / n_positions
        if self.held_bytes + len(dump) > self._budget:
            return False
        self._dumps[request_id] = dump
        self.held_bytes += len(dump)
        return True

    def bring_back(self, request_id: int, seq_id: int) -> bool:
        """Restore a request's dump into an empty sequence; where the context refuses, it is reported, and False.

        The dump is held no longer.
        """
        dump = self._dumps[request_id]
        self.forget(request_id)
        started = self._clock()
        try:
            self._context.restore(seq_id, dump)
        except Exception as error:  # it can be computed again, whatever the engine made of it
            _log.warning("a request that gave up its sequence is computed again: its dump was refused: %s", error)
            return False
        self._note("restore", (self._clock() - started) / self._context.length(seq_id))
        return True

    def forget(self, request_id: int) -> None:
        """Hold a request's dump no longer; a no-op where there is none."""
        self.held_bytes -= len(self._dumps.pop(request_id, b""))

    def _note(self, what: str, seconds: float) -> None:
        before = self._seconds.get(what, seconds)
        self._seconds[what] = (1 - _WEIGHT) * before + _WEIGHT * seconds
