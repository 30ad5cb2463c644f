"""Engines in subprocesses: the loop of a subprocess, and the handle of the program that gives it tasks.

It imports nothing of slm-core, because the interpreter of an engine of `cpu_peers` may lack it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """A measurement: name, action and size; higher is better unless ``lower``."""

    name: str
    kind: str
    n: int = 0
    unit: str = "tok/s"
    lower: bool = False


def serve(start: Callable[[], Any]) -> None:
    """Start an engine and run the tasks on standard input. Prints one line for the start and one for each task.

    A line is null (started; or: the engine cannot measure this), a number, or the text of an error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some engines print on standard output
    engine: Any = None

    def answer(call: Callable[[], Any]) -> None:
        try:
            result = call()
        except Exception as error:  # shown with the table
            result = f"{type(error).__name__}: {error}"
        print(json.dumps(result), file=answers, flush=True)

    def started() -> None:
        nonlocal engine
        engine = start()

    answer(started)
    if engine is None:
        return
    for line in sys.stdin:
        kind, n = json.loads(line)
        answer(lambda: getattr(engine, kind)(n))  # noqa: B023 (called at once)


class Worker:
    """An engine in a subprocess that runs `serve`. Raises SystemExit if the engine does not start."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        error = self._answer()
        if error is not None:
            self.close()
            raise SystemExit(f"{name}: {error}")

    def do(self, task: Task) -> float | str | None:
        """What `serve` answers: a number, the text of an error, or None if the engine cannot measure the task."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([task.kind, task.n]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> float | str | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else self._ended()

    def _ended(self) -> str:
        return f"the process ended with {self._process.wait()}"


@contextlib.contextmanager
def running(commands: Mapping[str, Sequence[str]]) -> Iterator[list[Worker]]:
    """A worker for each name and command. They are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Worker(name, command))) for name, command in commands.items()]


def in_turn(workers: list[Worker], i: int) -> list[Worker]:
    """The order of round i: every second round begins with the last engine."""
    return workers if i % 2 == 0 else workers[::-1]


def resident_megabytes() -> float:
    """Memory of this process that is resident, the pages of mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1e3
