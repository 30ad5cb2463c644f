"""``slm`` on a pseudo-terminal, with an emulator of the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pyte

SLM = [sys.executable, "-c", "from slm_core.cli import main; main()"]
WIDTH = 100
WAIT_S = 60
_SIZE = ("COLUMNS", "LINES")  # variables that rich prefers to the size of the terminal


class Terminal:
    """A process on a pseudo-terminal, with an emulator that answers its questions about the cursor.

    Attributes:
        process: the process.
        output: what it has written.
        screen: the screen, with the lines that scrolled away.
    """

    def __init__(self, process: subprocess.Popen[bytes], fd: int, height: int) -> None:
        self.process = process
        self.output = ""
        self._fd = fd
        self.screen = pyte.HistoryScreen(WIDTH, height, history=1000)
        self.screen.write_process_input = self.type  # type: ignore[method-assign]
        self._emulator = pyte.ByteStream(self.screen)

    @property
    def text(self) -> str:
        """The lines that scrolled away, and those on the screen."""
        scrolled = ["".join(line[x].data for x in range(WIDTH)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in (*scrolled, *self.screen.display)).rstrip() + "\n"

    def wait_for(self, pattern: str) -> str:
        """Read until ``pattern`` appears in the text; returns the text."""
        expression, deadline = re.compile(pattern, re.MULTILINE), time.monotonic() + WAIT_S
        while expression.search(text := self.text) is None:
            self.read_before(deadline, pattern)
        return text

    def wait_for_output(self, pattern: str) -> None:
        """Read until ``pattern`` appears in the output."""
        deadline = time.monotonic() + WAIT_S
        while re.search(pattern, self.output) is None:
            self.read_before(deadline, pattern)

    def read_before(self, deadline: float, expected: str) -> None:
        """Read once; ``what`` is waited for until the deadline."""
        left = deadline - time.monotonic()
        if left < 0 or not select.select([self._fd], [], [], left)[0]:
            raise TimeoutError(f"{expected!r} did not appear within {WAIT_S} s in {self.text[-4000:]!r}")
        data = os.read(self._fd, 4096)
        self.output += data.decode(errors="replace")
        self._emulator.feed(data)

    def type(self, text: str) -> None:
        """Type keys."""
        os.write(self._fd, text.encode())

    def interrupt(self) -> int:
        """Press Ctrl-C until the process ends; returns its exit status.

        Python does not notice a signal that comes after its last look and before the system reads the next key: a
        person presses again.
        """
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.type("\x03")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        return self.process.wait(0)


@contextmanager
def terminal(*arguments: str, height: int = 40, **environment: str) -> Iterator[Terminal]:
    """``slm`` on its own pseudo-terminal."""
    inherited = {name: value for name, value in os.environ.items() if name not in _SIZE}
    controller, worker = pty.openpty()
    fcntl.ioctl(worker, termios.TIOCSWINSZ, struct.pack("HHHH", height, WIDTH, 0, 0))
    process = subprocess.Popen(
        [*SLM, *arguments],
        stdin=worker,
        stdout=worker,
        stderr=worker,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(worker), os.O_RDWR)),  # makes it the controlling terminal
        env={**inherited, "TERM": "xterm-256color", **environment},
    )
    os.close(worker)
    try:
        yield Terminal(process, controller, height)
    finally:
        process.kill()
        process.wait()
        os.close(controller)
