"""Ctrl-C, colours and control characters, with real signals to a real process, on a pipe and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from slm_core.cli.terminal import stopping, write

SLM = [sys.executable, "-c", "from slm_core.cli import main; main()"]
# Nearly uniform sampling from the vocabulary without EOG: the answer takes minutes, until the context is full.
ENDLESS = ["--backend", "native", "--ctx", "100000", "-S", "ignore_eos=true", "--seed", "3"]
ENDLESS += ["--temperature", "50", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
WAIT_S = 60


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self.seen = ""

    def wait_for(self, pattern: str) -> str:
        """Read until ``pattern`` appears; return the output up to its end, and remove it from ``seen``."""
        while (match := re.search(pattern, self.seen)) is None:
            if not select.select([self._fd], [], [], WAIT_S)[0]:
                raise TimeoutError(f"{pattern!r} did not appear within {WAIT_S} s in {self.seen!r}")
            self.seen += os.read(self._fd, 4096).decode(errors="replace")
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt_at_prompt(self) -> None:
        """Press Ctrl-C once, as soon as the program waits for a key.

        Python's readline does not see a signal between the prompt and the wait before the next key.
        """
        deadline = time.monotonic() + WAIT_S
        while not _sleeps(self.process.pid):
            if time.monotonic() > deadline:
                raise TimeoutError("the program does not wait for a key")
            time.sleep(0.001)
        self.type("\x03")


def _sleeps(pid: int) -> bool:
    """Whether the main thread of a process sleeps."""
    if Path("/proc/self/stat").exists():
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    return state[0] in "SI"


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """``slm`` on its own pseudo-terminal."""
    controller, worker = pty.openpty()
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
        yield Terminal(process, controller)
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def test_ctrl_c_ends_a_run_and_keeps_its_text() -> None:
    command = [*SLM, "run", "-p", "Hello!", *ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert (first + rest).endswith(b"\n"), "the printed text is complete"
    assert errors == b"", errors


def test_ctrl_c_stops_an_answer_but_not_the_chat() -> None:
    with terminal("chat", *ENDLESS) as tty:
        tty.wait_for("> ")
        tty.type("Hello!\n")
        tty.wait_for(r"Hello!\s+[^\s\x1b]")
        tty.type("\x03")
        tty.wait_for(r"\(stopped\)")
        tty.wait_for("> ")
        tty.type("/forget\n")
        assert "user: Hello!" in tty.wait_for("1 assistant")
        tty.type("/exit\n")
        assert tty.process.wait(WAIT_S) == 0


def test_ctrl_c_twice_at_the_prompt_leaves() -> None:
    with terminal("chat", "--backend", "native") as tty:
        tty.wait_for("> $")
        tty.interrupt_at_prompt()
        tty.wait_for(r"Ctrl-C again leaves")
        tty.wait_for("> $")
        tty.interrupt_at_prompt()
        assert tty.process.wait(WAIT_S) == 130


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_follow_the_environment(environment: dict[str, str], coloured: bool) -> None:
    with terminal("backends", **environment) as tty:
        text = tty.wait_for("yes") + tty.wait_for("\n")
    assert bool(re.search(r"\x1b\[[\d;]*3\d", text)) == coloured, text


def test_a_long_prompt_shows_its_progress() -> None:
    question = "My name is Ada. " * 200
    with terminal("run", "--backend", "native", "-p", question, "--ctx", "2048", "--max-tokens", "3") as tty:
        tty.wait_for(r"Reading.*\d+/\d+.*tokens")
        assert tty.process.wait(WAIT_S) == 0


def test_second_ctrl_c_interrupts() -> None:
    class Stubborn:
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    stubborn, before = Stubborn(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stopping(stubborn):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert stubborn.cancelled == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_answers_cannot_control_the_terminal() -> None:
    text = "a\x1b[2Jb\x07\x9bc\td\ne"
    screen, pipe = (Console(file=io.StringIO(), force_terminal=on, color_system=None) for on in (True, False))
    write(screen, text)
    write(pipe, text)
    assert "\x1b" not in screen.file.getvalue()  # type: ignore[attr-defined]
    assert screen.file.getvalue().split() == ["a[2Jbc", "d", "e"]  # type: ignore[attr-defined]
    assert pipe.file.getvalue() == text  # type: ignore[attr-defined]
