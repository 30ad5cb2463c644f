"""The child process of an isolated model, as the parent sees it."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import IO, Any

from slm_core.errors import BackendCrashed, BackendUnavailable, ModelClosed
from slm_core.interrupts import uninterrupted
from slm_core.isolation.channel import ANY_LENGTH, Channel
from slm_core.isolation.options import Isolation
from slm_core.isolation.values import Garbled, Message

_log = logging.getLogger("slm_core.isolation")
_RECORD = re.compile(r"slm-log (\d\d) (.*)")
_REASON = re.compile(r"assert.*fail|terminate called|what\(\)|fatal.*error|^\w*Error: ", re.IGNORECASE)
_FRAME = re.compile(r"0x[0-9a-f]+\]?$|^#\d+ ")  # a line of a backtrace
_LONGEST_LINE = 300
_ENDS_S = 5.0
"""Seconds that a process may take to end after it closed its connections or was asked to end."""


class Process:
    """A child process, its control channel, and how it ended.

    Args:
        backend: the backend's name, for messages.
        isolation: the timeouts.

    Attributes:
        crashed: gets the error when the process ends unexpectedly, also between calls.

    Raises:
        BackendUnavailable: no process can be started.
    """

    def __init__(self, backend: str, isolation: Isolation) -> None:
        self._backend = backend
        self.isolation = isolation
        self.crashed: Future[BackendCrashed] = Future()
        self._lock = threading.Lock()
        self._n_calls = 0
        self._is_ending = False
        self._crash = ""
        self._is_stopped = False
        self._pid = os.getpid()
        control, childs_control = socket.socketpair()
        self._lifeline, childs_lifeline = socket.socketpair()
        with childs_control, childs_lifeline:
            try:
                self._child = _start(childs_control.fileno(), childs_lifeline.fileno())
            except OSError as error:
                control.close()
                self._lifeline.close()
                raise BackendUnavailable(f"no process could be started for {backend}: {error}") from error
        self.control = Channel(control)
        assert self._child.stdout is not None
        self._output = _Output(self._child.stdout, self._note_end)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._child.pid

    def check(self) -> None:
        """Raise if the process has ended.

        Raises:
            BackendCrashed: it crashed or was killed.
            ModelClosed: its model was closed.
        """
        if self._crash:
            raise BackendCrashed(self._crash)
        if self._is_stopped or os.getpid() != self._pid:
            raise ModelClosed(f"the model's process ({self._backend}) has ended, or belongs to another process")

    def exchange(
        self,
        channel: Channel,
        call: str,
        message: Message,
        *,
        deadline: float | None = None,
        most_bytes: int = ANY_LENGTH,
        before_reply: Callable[[], None] | None = None,
        at_once: bool = False,
    ) -> list[Any]:
        """Send a message and receive the reply: a list whose first item is a string.

        Signal handlers are delayed (``interrupts.uninterrupted``), because half a message would end the connection.

        Args:
            channel: the channel.
            call: the name of the call, for errors.
            message: the message.
            deadline: the latest end; None for the timeout of calls.
            most_bytes: the longest payload of the reply.
            before_reply: called after the message was sent.
            at_once: whether the first signal kills the process, instead of the second.

        Raises:
            BackendCrashed: the process ended, did not answer in time, or sent no valid message.
        """
        self.check()
        if deadline is None:
            deadline = deadline_after(self.isolation.call_timeout_s)

        is_given_up = False

        def give_up(n_signals: int) -> None:
            nonlocal is_given_up
            if at_once or n_signals > 1:
                is_given_up = True
                self._child.kill()

        with uninterrupted, uninterrupted.calling(give_up), self._calling():
            try:
                channel.send(message, deadline)
                if before_reply is not None:
                    before_reply()
                return _checked(channel.receive(deadline, most_bytes=most_bytes))
            except TimeoutError:
                raise self.fail(f"was killed: {call} exceeded its timeout") from None
            except Garbled as error:
                raise self.fail(f"was killed: its answer to {call} is malformed ({error})") from None
            except (EOFError, OSError):
                raise self.fail(f"was killed: {call} was interrupted" if is_given_up else None, call) from None

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A call, which reports the end of the process itself."""
        with self._lock:
            self._n_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_calls -= 1

    def _note_end(self) -> None:
        """The output ended, and most likely the process: report it if no call does."""
        try:
            self._child.wait(_ENDS_S)
        except subprocess.TimeoutExpired:  # only its output is closed
            return
        if not self._n_calls and not self._is_ending:
            self.fail(None)

    def fail(self, reason: str | None, call: str = "") -> BackendCrashed:
        """End the process; returns the error that all later calls raise, too.

        Args:
            reason: what happened; None if the process closed its connection, which it does when it ends.
            call: the call during which this happened; "" for none.
        """
        with self._lock:
            if not self._crash:
                status = self._end(patience_s=_ENDS_S if reason is None else 0)
                if reason is None:
                    reason = f"{_ending(status)} {f'during {call}' if call else 'between calls'}"
                last = self._output.last_words()
                self._crash = f"the process of an isolated {self._backend} model {reason}{f': {last}' if last else ''}"
                is_new = True
            else:
                is_new = False
        error = BackendCrashed(self._crash)
        if is_new:
            self.crashed.set_result(error)  # outside of the lock, because this runs callbacks
        return error

    def stop(self, patience_s: float = 0) -> None:
        """End the process without an error, and close the connections. A second call does nothing.

        Args:
            patience_s: seconds to wait for its end before it is killed.
        """
        if os.getpid() != self._pid:
            return  # forked: the process belongs to another one
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._end(patience_s)
                self.control.close()
                self._lifeline.close()

    def _end(self, patience_s: float) -> int:
        """Wait for the end of the process, or kill it; returns its exit status."""
        self._is_ending = True
        try:
            status = self._child.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            status = 0
        self._output.join()
        return status


class _Output:
    """Logs the output of a process, and keeps the line that explains its end.

    Args:
        stream: the output.
        on_end: called at its end.
    """

    def __init__(self, stream: IO[bytes], on_end: Callable[[], None]) -> None:
        self._reason = ""
        self._last = ""
        self._on_end = on_end
        self._thread = threading.Thread(target=self._read, args=(stream,), name="slm-isolation-output", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the output; another process may still hold it open."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1)

    def last_words(self) -> str:
        """The last failed assertion or fatal error, which a long backtrace may follow; else the last line."""
        return self._reason or self._last

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while data := stream.readline(_LONGEST_LINE):
                self._note("".join(c for c in data.decode("utf-8", "replace").rstrip() if c.isprintable()))
        self._on_end()

    def _note(self, line: str) -> None:
        record = _RECORD.fullmatch(line)
        if record is not None:
            _log.log(int(record[1]), "%s", record[2])
            return
        _log.debug("%s", line)
        if line and not _FRAME.search(line):
            self._last = line
            self._reason = line if _REASON.search(line) else self._reason


def deadline_after(timeout_s: float | None) -> float | None:
    """The time of ``time.monotonic`` in ``timeout_s`` seconds; None for no limit."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def _start(control: int, lifeline: int) -> subprocess.Popen[bytes]:
    """Start the child. It is in a process group of its own: Ctrl-C in a terminal reaches the parent only."""
    level = logging.getLogger().getEffectiveLevel()
    return subprocess.Popen(  # noqa: S603  (our own code, in our own interpreter)
        [sys.executable, "-P", "-m", "slm_core.isolation.child", str(control), str(lifeline), str(level)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(control, lifeline),
        process_group=0,
    )


def _checked(reply: object) -> list[Any]:
    if not isinstance(reply, list) or not reply or not isinstance(reply[0], str):
        raise Garbled("no reply")
    return reply


def _ending(status: int) -> str:
    """How a process ended, by its exit status."""
    if sys.platform != "win32" and status == -signal.SIGKILL:
        return "was killed (SIGKILL: perhaps no memory was left)"
    if status < 0:
        return f"ended by {_signal_name(-status)}"
    return f"ended with exit status {status}" if status else "closed its connection"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
