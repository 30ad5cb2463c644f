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
from collections.abc import Iterator
from contextlib import contextmanager

import pyte

SLM = [sys.executable, "-c", "from slm_core.cli import main; main()"]
WIDTH = 100
WAIT_S = 60


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
        while re.search(pattern, self.text, re.MULTILINE) is None:
            self.read(pattern)
        return self.text

    def wait_for_output(self, pattern: str) -> None:
        """Read until ``pattern`` appears in the output."""
        while re.search(pattern, self.output) is None:
            self.read(pattern)

    def read(self, pattern: str) -> None:
        """Read once; ``pattern`` is named if nothing comes."""
        if not select.select([self._fd], [], [], WAIT_S)[0]:
            raise TimeoutError(f"{pattern!r} did not appear within {WAIT_S} s in {self.text!r}")
        data = os.read(self._fd, 4096)
        self.output += data.decode(errors="replace")
        self._emulator.feed(data)

    def type(self, text: str) -> None:
        """Type keys."""
        os.write(self._fd, text.encode())


@contextmanager
def terminal(*arguments: str, height: int = 40, **environment: str) -> Iterator[Terminal]:
    """``slm`` on its own pseudo-terminal."""
    controller, worker = pty.openpty()
    fcntl.ioctl(worker, termios.TIOCSWINSZ, struct.pack("HHHH", height, WIDTH, 0, 0))
    process = subprocess.Popen(
        [*SLM, *arguments],
        stdin=worker,
        stdout=worker,
        stderr=worker,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(worker), os.O_RDWR)),  # makes it the controlling terminal
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(worker)
    try:
        yield Terminal(process, controller, height)
    finally:
        process.kill()
        process.wait()
        os.close(controller)
