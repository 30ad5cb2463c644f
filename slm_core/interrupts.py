"""Calls that no signal handler breaks off half-way: Ctrl-C, an alarm, a request to end.

Python runs signal handlers in the main thread, between any two instructions. If the handler of Ctrl-C raised between an
engine's change and the record of it, the two would differ from then on. So handlers wait until they may raise.
"""

from __future__ import annotations

# Functions of ``signal`` make enums of numbers, which would cost each call of a context 11 µs.
import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[[int, FrameType | None], Any]
_NUMBERS = [signal.SIGINT, signal.SIGTERM]
"""The signals whose handlers raise exceptions in programs."""
if sys.platform != "win32":
    _NUMBERS.append(signal.SIGALRM)
_SOON_S = 0.02
"""Seconds after which a postponed signal is sent to the main thread again."""
_WAIT_S = 0.1  # see ``wait_s``


class _Uninterrupted:
    """A block of the main thread in which handlers of signals wait; blocks may be nested.

    - If the outermost block ends with an exception, the handlers run, and an exception that they raise replaces it.
    - If it ends without one, the handlers run, too. If one raises, the exception is postponed, because a call that
    raises must not have changed anything: the next block raises it instead of beginning. If no block begins soon, the
    main thread gets the signal again.
    - ``check`` runs the handlers within a block, and ``paused`` lets them run at any time.

    Handlers run in the main thread only, so a block of another thread needs nothing. As a decorator, it makes the body
    of a function such a block.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Handler] = {}
        self._arrived: list[int] = []
        self._hooks: list[Callable[[int], None]] = []
        self._postponed: int | None = None
        self._mutex = threading.Lock()

    def __enter__(self) -> None:
        if not _is_main_thread():
            return
        if self._depth == 0:
            self._raise_postponed()
            self._replace_handlers()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._depth or not _is_main_thread():
            return
        if self._depth > 1:
            self._depth -= 1
            return
        postpones = kind is None or issubclass(kind, StopIteration)
        try:
            self._end(postpones=postpones)
            while self._arrived:  # signals that came while the block ended
                self._replace_handlers()
                self._end(postpones=postpones)
        finally:
            self._depth = 0

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def block(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return block

    @contextmanager
    def closing(self) -> Iterator[None]:
        """A block that frees or restores something: it begins even if an exception is postponed, which stays so."""
        number = self._take_postponed() if _is_main_thread() else None
        try:
            with self:
                yield
        finally:
            if number is not None:
                self._postpone(number)

    def check(self) -> None:
        """Run the handlers of the signals that have come; call it where an exception leaves everything as it was.

        While an exception is handled, this does nothing: its handler may be restoring what was changed.
        """
        if self._arrived and _is_main_thread() and sys.exc_info()[0] is None:
            self._run(self._handlers, postpones=False)

    def paused(self) -> _Pause:
        """A block in which handlers run at any time: it may wait for long, and it may raise."""
        return _Pause(self)

    def pause(self) -> int:
        """Let handlers run at any time, for ``go_on`` with the result; 0 if this is not in a block."""
        if not self._depth or not _is_main_thread():
            return 0
        self.check()
        depth, self._depth = self._depth, 0
        self._restore_handlers()
        while self._arrived:  # signals that came while the block was left
            self._replace_handlers()
            self._end(postpones=False)
        return depth

    def go_on(self, depth: int) -> None:
        """Let handlers wait again."""
        if not depth:
            return
        try:
            self._replace_handlers()
        except BaseException:
            self._replace_handlers()
            raise
        finally:
            self._depth = depth

    @contextmanager
    def calling(self, hook: Callable[[int], None]) -> Iterator[None]:
        """Within this block, which is in another one, call ``hook`` with the number of signals that have come."""
        if not _is_main_thread():
            yield
            return
        self._hooks.append(hook)
        try:
            yield
        finally:
            self._hooks.remove(hook)

    def forget(self) -> None:
        """End all blocks, in a forked process."""
        if self._depth:
            self._depth = 0
            self._restore_handlers()
        self._arrived, self._hooks, self._postponed = [], [], None
        self._mutex = threading.Lock()

    def _replace_handlers(self) -> None:
        handlers: dict[int, Handler] = {
            number: handler for number in _NUMBERS if callable(handler := _signal.getsignal(number))
        }
        self._handlers = handlers
        try:
            for number in handlers:
                _signal.signal(number, self._record)
        except BaseException:  # raised by the handler of a signal whose handler is not replaced yet
            self._restore_handlers()
            raise

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)

    def _end(self, *, postpones: bool) -> None:
        try:
            if self._arrived:
                self._run(self._handlers, postpones=postpones)
        finally:
            self._restore_handlers()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)
        if self._hooks:
            self._hooks[-1](len(self._arrived))

    def _run(self, handlers: dict[int, Handler], *, postpones: bool) -> None:
        arrived, self._arrived = self._arrived, []
        for number in arrived:
            try:
                handlers[number](number, None)
            except BaseException:
                if not postpones:
                    raise
                self._postpone(number)

    def _postpone(self, number: int) -> None:
        self._postponed = number
        self._send_soon()

    def _send_soon(self) -> None:
        timer = threading.Timer(_SOON_S, self._send)
        timer.daemon = True
        timer.start()

    def _raise_postponed(self) -> None:
        if self._postponed is not None and (number := self._take_postponed()) is not None:
            signal.raise_signal(number)

    def _take_postponed(self) -> int | None:
        with self._mutex:
            number, self._postponed = self._postponed, None
        return number

    def _send(self) -> None:
        if self._depth:  # a signal would wait for the end of that block
            self._send_soon()
            return
        number = self._take_postponed()
        if number is None:
            return
        if sys.platform == "win32":
            _thread.interrupt_main(signal.Signals(number))
        else:  # ends a wait in the main thread, too
            signal.pthread_kill(threading.main_thread().ident or 0, number)


class _Pause:
    """See ``_Uninterrupted.paused``.

    It is not a generator: one that an interrupt left would let handlers wait when it is garbage-collected.
    """

    def __init__(self, block: _Uninterrupted) -> None:
        self._block = block
        self._depth = 0

    def __enter__(self) -> None:
        self._depth = self._block.pause()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._block.go_on(self._depth)


def wait_s() -> float | None:
    """The timeout, in seconds, of a wait for another thread; repeat the wait after it. None: without a timeout.

    The main thread has one: Python does not notice a signal that comes just before a thread blocks, and on Windows none
    while it is blocked.
    """
    return _WAIT_S if _is_main_thread() else None


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


uninterrupted = _Uninterrupted()
if sys.platform != "win32":  # Windows has no fork
    os.register_at_fork(after_in_child=uninterrupted.forget)
