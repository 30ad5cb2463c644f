"""Steps that block, for programs on an event loop: each runs in a worker thread, and none before it is asked for."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

from slm_core.generation.events import Answer, Event

_Result = TypeVar("_Result")


class EventStream(Iterator[Event]):
    """An answer in the making, for ``for`` and ``async for``; then ask for ``answer``.

    ``async for`` takes a step in a worker thread when the next event is wanted, so a slow reader holds the model
    back. A task that is cancelled cancels the answer, and goes on with being cancelled once the batch that runs is
    over: nothing works on behind it.
    """

    @property
    @abstractmethod
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            SessionError: it is not over yet.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End it as soon as possible, from any thread or task; in prefill, within one batch."""

    @abstractmethod
    def show_events(self, shown: bool) -> None:
        """Whether events go to anybody, from now on; where none does, nothing is computed for them alone."""

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self.show_events(False)
        try:
            yield
        finally:
            self.show_events(True)

    def run(self) -> Answer:
        """Iterate to the end; returns the answer."""
        with self._unseen():
            for _ in self:
                pass
        return self.answer

    async def arun(self) -> Answer:
        """The same for a program on an event loop."""
        with self._unseen():
            async for _ in self:
                pass
        return self.answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await in_thread(lambda: next(self, None), self.cancel)
        if event is None:
            raise StopAsyncIteration
        return event


async def in_thread(step: Callable[[], _Result], cancel: Callable[[], None]) -> _Result:
    """Run ``step`` in a worker thread. Where the task is cancelled, ``cancel`` the step and wait until it is over."""
    running = asyncio.ensure_future(asyncio.to_thread(step))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel()
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue  # cancelled once more: the step ends no sooner for it
        if not running.cancelled():
            running.exception()  # seen: the task is cancelled, whatever became of the step
        raise
