"""A supervised worker process: a worker that dies or hangs is replaced, and its case is reported."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hostile.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 10.0
"""Limit of CPU seconds per case, which does not depend on other load. Valid inputs take a tenth of a second."""
_WALL_S = 120.0
"""Limit of wall-clock seconds per case: a case that sleeps or deadlocks uses no CPU time."""
_START_S = 240.0
VERDICTS = ("accepted", "refused", "crashed", "hung", "leaked", "nonsense")
BAD = VERDICTS[2:]


@dataclass
class RunResult:
    """The result of a run against one backend.

    Attributes:
        counts: numbers of cases by verdict.
        bad: seed, verdict and message of each failed case.
        slowest: seconds of the slowest case that ended, and its seed.
    """

    kind: str
    backend: str
    counts: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    def add(self, seed: int, verdict: str, message: str, seconds: float) -> None:
        """Count a case."""
        self.counts[verdict] += 1
        if verdict in BAD:
            self.bad.append((seed, verdict, message))
        elif seconds > self.slowest[0]:
            self.slowest = (seconds, seed)


def targets(kind: str | None = None, backend: str | None = None) -> Iterator[tuple[str, str]]:
    """Every kind with every backend that it attacks, or only those with the given names."""
    for name, (_, backends) in KINDS.items():
        for one in backends:
            if kind in (None, name) and backend in (None, one):
                yield name, one


def run(kind: str, backend: str, seconds: float, first: int = 0, most: int = 1 << 60) -> RunResult:
    """Attack one backend for ``seconds``, with at most ``most`` cases, from the seed ``first`` on."""
    result = RunResult(kind, backend)
    with Worker(kind, backend) as worker:
        deadline = time.monotonic() + seconds
        for seed in range(first, first + most):
            start = time.monotonic()
            if start >= deadline:
                break
            result.add(seed, *worker.attack(seed), time.monotonic() - start)
    return result


class Worker:
    """A process that runs cases, and that is replaced if it ends."""

    def __init__(self, kind: str, backend: str, patience_s: float = PATIENCE_S, wall_s: float = _WALL_S) -> None:
        self._target = kind, backend
        self._patience_s, self._wall_s = patience_s, wall_s
        self._folder = tempfile.TemporaryDirectory(prefix="slm-hostile-")
        self._complaints = Path(self._folder.name) / "stderr"
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def attack(self, seed: int) -> tuple[str, str]:
        """The verdict on a case, and a message."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{seed}\n".encode())
            self._process.stdin.flush()
            line = self._line(self._wall_s, self._patience_s)
        except BrokenPipeError:
            line = b""
        if line:
            verdict, message = json.loads(line)
            return verdict, message
        if line is None:
            self._stop()
            return "hung", f"more than {self._patience_s:g} s of processor time, or {self._wall_s:g} s"
        code = self._process.wait()
        self._stop()
        return "crashed", f"{_signal(code)}: {self._last_words()}"

    def _start(self) -> None:
        cases = Path(self._folder.name) / "cases"
        cases.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.hostile.worker", *self._target, str(cases)]
        path = os.pathsep.join([str(ROOT), *(part for part in sys.path if part)])
        with self._complaints.open("wb") as complaints:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
            )
        self._rest = b""
        if self._line(_START_S) != b"ready":
            self._stop()
            raise RuntimeError(f"the worker {' '.join(self._target)} did not start: {self._last_words()}")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):  # a buffered write to a dead worker
                        stream.close()

    def _line(self, wall_s: float, processor_s: float = math.inf) -> bytes | None:
        """The next line, b"" if the process has ended, or None after the time limit."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, used = time.monotonic() + wall_s, _processor_seconds(self._process.pid)
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], 0.5)[0]:
                spent = _processor_seconds(self._process.pid) - used
                if spent > processor_s or time.monotonic() > deadline:
                    return None
                continue
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                return b""
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._complaints.read_text(errors="replace").splitlines() or ["it said nothing"]
        telling = [line for line in lines if "ASSERT" in line or "what()" in line or "Error" in line]
        return (telling or lines)[-1][:300]


def _processor_seconds(pid: int) -> float:
    """CPU seconds of a process with all its threads, or 0 if the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _signal(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
