"""How a caller reads a turn of a chat, and holds the chat meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from slm_core.chat.guard import Guard
from slm_core.chat.tools import RunningTurn
from slm_core.display import preview, signature
from slm_core.errors import ChatBusy, SessionError
from slm_core.generation import Answer, Event, EventStream, StoppingCriterion
from slm_core.generation.aio import in_thread
from slm_core.generation.events import Overflowed
from slm_core.interrupts import uninterrupted


class Caller:
    """The thread that calls, and on an event loop its task."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._task: asyncio.Task[Any] | None = asyncio.current_task() if on_event_loop() else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Caller) and (self._thread, self._task) == (other._thread, other._task)

    def __hash__(self) -> int:
        return hash((self._thread, self._task))

    @property
    def is_alive(self) -> bool:
        """Whether the thread, or the task, has not ended."""
        return self._thread.is_alive() if self._task is None else not self._task.done()


class ChatStream(EventStream):
    """A turn of a chat: iterate over its events, then read ``answer``, the last answer.

    If tools have to be awaited, iterate with ``async for``, which runs the calls of one answer concurrently.

    The stream holds its chat until the turn is over, cancelled, or the stream is garbage: calls of other threads and
    tasks raise ``ChatBusy``. A call of the thread or task that reads it ends the turn. On an event loop a stream begins
    with its first event, so that the loop never waits for the context.

    Args:
        begin: begins the turn.
        guard: keeps other threads out of the chat during a step.
    """

    def __init__(self, begin: Callable[[], RunningTurn], guard: Guard) -> None:
        self._begin = begin
        self._guard = guard
        self._turn: RunningTurn | None = None
        self._reader = Caller()
        self._cancelled = False
        self._failed = False
        self._shown = True
        if not on_event_loop():
            self._begun()

    def __repr__(self) -> str:
        state = "over" if self.over else "paused" if self.paused else "running"
        return signature(self, state, preview(self.text))

    @property
    def answer(self) -> Answer:
        """The last answer, with the earlier rounds and the results of their calls.

        Raises:
            SessionError: the turn is not over yet.
        """
        if self._turn is None:
            raise SessionError("there is no answer yet, because the turn has not begun: iterate the stream to its end")
        return self._turn.answer

    @property
    def over(self) -> bool:
        """Whether the turn is over."""
        return self._turn is not None and self._turn.over

    @property
    def text(self) -> str:
        """The content so far of the current or last answer."""
        return "" if self._turn is None else self._turn.text

    @property
    def overflowed(self) -> Overflowed | None:
        """Messages dropped to make room for that answer, if any."""
        return None if self._turn is None else self._turn.overflowed

    @property
    def paused(self) -> bool:
        """Whether a stopping criterion paused it."""
        return self._turn is not None and self._turn.paused

    @property
    def held_by_another(self) -> bool:
        """Whether another live thread or task reads the turn, and has not cancelled it."""
        ended = self.over or self._failed or self._cancelled
        return not ended and self._reader.is_alive and self._reader != Caller()

    def cancel(self) -> None:
        """Cancel the turn as soon as possible; the text so far becomes the answer. Any thread may call this."""
        self._cancelled = True
        if self._turn is not None:
            self._turn.cancel()

    def show_events(self, shown: bool) -> None:
        """Turn events on or off from now on."""
        self._shown = shown
        if self._turn is not None:
            self._turn.show_events(shown)

    def resume(
        self, stopping_criteria: Sequence[StoppingCriterion] | None = None, *, timeout: float | None = None
    ) -> Self:
        """Resume after a pause, as if there had been none. None keeps the stopping criteria or the timeout.

        New values apply to the paused answer, not to later answers of the turn.
        """
        if self._turn is not None:
            self._turn.resume(stopping_criteria, timeout=timeout)
        return self

    def run(self) -> Answer:
        """Iterate to the end; returns the answer. If anything raises, the chat is as before the turn.

        Raises:
            SessionError: a tool has to be awaited; nothing changed.
            ChatBusy: another thread is inside the turn, which goes on.
        """
        with uninterrupted:
            try:
                with uninterrupted.paused():
                    with self._guard.block():
                        self._begun().check_nothing_awaited()
                    return super().run()
            except ChatBusy:  # another thread is inside the turn, which goes on
                raise
            except BaseException:
                if self._turn is not None:
                    self._turn.undo()
                raise

    def __next__(self) -> Event:
        self._reader = Caller()
        event = self._next_event()
        if event is None:
            raise StopIteration
        return event

    async def __anext__(self) -> Event:
        self._reader = Caller()
        turn = await in_thread(self._begun, self.cancel) if self._turn is None else self._turn
        await turn.arun_tools()
        event = await in_thread(self._next_event, self.cancel)  # the worker thread does not become the reader
        if event is None:
            raise StopAsyncIteration
        return event

    def _next_event(self) -> Event | None:
        with self._guard.block():
            try:
                return next(self._begun(), None)
            except BaseException:
                self._failed = True
                raise

    def _begun(self) -> RunningTurn:
        """The turn, which begins with the first call."""
        if self._turn is None:
            with self._guard.block():
                try:
                    self._turn = self._begin()
                except BaseException:
                    self._failed = True
                    raise
            self._turn.show_events(self._shown)
            if self._cancelled:
                self._turn.cancel()
        return self._turn


def on_event_loop() -> bool:
    """Whether the thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
