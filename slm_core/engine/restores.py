"""Restores of dumps between the steps of an engine: a few parts a step, so that other requests get their tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from slm_core.engine.requests import Request


class Restores:
    """The requests whose sequences are being restored.

    Args:
        clock: a clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[int, tuple[Request, Iterator[None]]] = {}  # by request id, oldest first

    @property
    def requests(self) -> Sequence[Request]:
        """The requests, oldest restore first."""
        return [request for request, _ in self._running.values()]

    def __len__(self) -> int:
        """The number of requests."""
        return len(self._running)

    def add(self, request: Request, steps: Iterator[None]) -> None:
        """Add a request; ``steps`` restore its sequence."""
        self._running[request.id] = request, steps

    def remove(self, request: Request) -> None:
        """Give up the restore of a request, if there is one. The caller drops the sequence."""
        self._running.pop(request.id, None)

    def advance(self, seconds: float) -> Iterator[tuple[Request, Exception | None]]:
        """Make steps, oldest restore first: at least one, and more while they fit into ``seconds``.

        A step is expected to take as long as the longest step of this call.

        Yields:
            Each request whose restore is over, and the error of the restore, if any.
        """
        started, longest = self._clock(), 0.0
        while self._running and self._clock() - started + longest <= seconds:
            request, steps = next(iter(self._running.values()))
            before = self._clock()
            is_over, error = _advanced(steps)
            longest = max(longest, self._clock() - before)
            if is_over:
                self.remove(request)
                yield request, error


def timed(steps: Iterator[None], clock: Callable[[], float]) -> Generator[None, None, float]:
    """The same steps; the result is the time that they took, in seconds."""
    seconds = 0.0
    while True:
        started = clock()
        if next(steps, _END) is _END:
            return seconds + clock() - started
        seconds += clock() - started
        yield


_END = object()


def _advanced(steps: Iterator[None]) -> tuple[bool, Exception | None]:
    """Make a step; returns whether it was the last, and its error."""
    try:
        return next(steps, _END) is _END, None
    except Exception as error:  # a backend error concerns only the request
        return True, error
