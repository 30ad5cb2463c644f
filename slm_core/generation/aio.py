"""Blocking steps for programs on an event loop: each step runs in a worker thread, when it is requested."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

from slm_core.generation.events import Answer, Event

_Result = TypeVar("_Result")


class EventStream(Iterator[Event]):
    """A running generation: iterate with ``for`` or ``async for``, then read ``answer``.

    ``async for`` runs a step in a worker thread when the next event is requested, so a slow reader slows the model
    down. A cancelled task cancels the answer, and waits until the running batch is over: no thread continues in the
    background.
    """

    @property
    @abstractmethod
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            SessionError: the answer is not over yet.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the answer as soon as possible, in prefill within one batch. Any thread or task may call this."""

    @abstractmethod
    def show_events(self, shown: bool) -> None:
        """Turn events on or off from now on; without events, nothing is computed only for them."""

    @contextmanager
    def _without_events(self) -> Iterator[None]:
        self.show_events(False)
        try:
            yield
        finally:
            self.show_events(True)

    def run(self) -> Answer:
        """Iterate to the end; returns the answer."""
        with self._without_events():
            for _ in self:
                pass
        return self.answer

    async def arun(self) -> Answer:
        """Like ``run``, on an event loop."""
        with self._without_events():
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
    """Run ``step`` in a worker thread. If the task is cancelled, ``cancel`` the step and wait for its end."""
    running = asyncio.ensure_future(asyncio.to_thread(step))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel()
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue  # cancelled again: the step is cancelled already
        if not running.cancelled():
            running.exception()  # retrieve the exception: the task is cancelled anyway
        raise
