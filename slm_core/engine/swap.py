"""Swap: dumps of preempted requests in memory, if restoring them is faster than computing their tokens again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator

from slm_core.engine.restores import timed
from slm_core.engine.store import PART_BYTES
from slm_core.protocols import Context
from slm_core.types import Capability

_WEIGHT = 0.5
"""The weight of the newest measurement in a running mean."""

_log = logging.getLogger(__name__)


class Swap:
    """Holds dumps in memory, within a budget.

    Args:
        context: the context of the sequences.
        budget_bytes: the largest number of bytes of all dumps.
        clock: a clock, in seconds.

    Attributes:
        held_bytes: the size of all dumps, in bytes.
    """

    def __init__(self, context: Context, budget_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._context = context
        self._budget = budget_bytes if Capability.KV_PAYLOAD in context.capabilities else 0
        self._clock = clock
        self._dumps: dict[int, bytes] = {}  # by request id
        self._seconds: dict[str, float] = {}  # running means of "dump" and "restore", per position
        self._bytes_per_position = 0.0
        self.held_bytes = 0

    def __contains__(self, request_id: int) -> bool:
        """Whether there is a dump of a request."""
        return request_id in self._dumps

    def seconds(self, n_positions: int) -> float | None:
        """Expected seconds of a dump and its restore: None before the first dump, infinity if there is no room."""
        if self.held_bytes + n_positions * self._bytes_per_position > self._budget or not self._budget:
            return float("inf")
        if "dump" not in self._seconds:
            return None
        return n_positions * (self._seconds["dump"] + self._seconds.get("restore", self._seconds["dump"]))

    def put(self, request_id: int, seq_id: int) -> bool:
        """Dump the sequence of a request; returns whether there is a dump.

        There is none for an empty sequence, without room, or if the context refuses it, with a warning.
        """
        started, n_positions = self._clock(), self._context.length(seq_id)
        if not n_positions:
            return False
        try:
            dump = self._context.dump(seq_id)
        except Exception as error:  # the tokens can be computed again without the dump
            _log.warning("a request that gives up its sequence will be computed again: the dump failed: %s", error)
            return False
        self._note("dump", (self._clock() - started) / n_positions)
        self._bytes_per_position = len(dump) / n_positions
        if self.held_bytes + len(dump) > self._budget:
            return False
        self._dumps[request_id] = dump
        self.held_bytes += len(dump)
        return True

    def bring_back(self, request_id: int, seq_id: int) -> Generator[None, None, bool]:
        """The steps that restore a request's dump into an empty sequence; the last one forgets the dump.

        The result is whether the sequence was restored. If the context refuses the dump, it is False, with a warning.
        """
        try:
            steps = self._context.restore_steps(seq_id, _parts(self._dumps[request_id]))
            seconds = yield from timed(steps, self._clock)
        except Exception as error:  # the tokens can be computed again without the dump
            _log.warning("a request that gave up its sequence is computed again: its dump was refused: %s", error)
            self.forget(request_id)
            return False
        self.forget(request_id)
        self._note("restore", seconds / self._context.length(seq_id))
        return True

    def forget(self, request_id: int) -> None:
        """Forget the dump of a request, if there is one."""
        self.held_bytes -= len(self._dumps.pop(request_id, b""))

    def _note(self, operation: str, seconds: float) -> None:
        mean = self._seconds.get(operation, seconds)
        self._seconds[operation] = (1 - _WEIGHT) * mean + _WEIGHT * seconds


def _parts(dump: bytes) -> Iterator[bytes]:
    for first in range(0, len(dump), PART_BYTES):
        yield dump[first : first + PART_BYTES]
