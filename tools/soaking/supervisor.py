"""Starts a process per run, reads its events, shows progress, and determines how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from soaking.record import Record
from soaking.rounds import Plan

REPORT_S = 60.0
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""A setting of glibc's allocator that returns freed memory at once, so that remaining memory is in use. By default it
keeps tens of MiB for each thread that once needed them, which looks like a leak while peaks still grow."""

SILENCE_S = 1800.0
"""A process that is silent for longer counts as hanging; SIGABRT ends it and prints its stack."""


class Runner:
    """One run in a subprocess.

    Args:
        plan: its plan.
        lock: held while the record changes.
        silence_s: longest duration of a round.
    """

    def __init__(self, plan: Plan, lock: threading.Lock, silence_s: float = SILENCE_S) -> None:
        self.record = Record(plan)
        self._lock = lock
        self._silence_s = silence_s
        path = [str(Path(__file__).resolve().parents[1]), *sys.path]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by ``wait``)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "soaking.rounds", plan.to_json()],
            env=os.environ | GIVES_BACK | {"PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C must reach only this process, which asks the run to end after its round
        )
        self._heard_at = time.monotonic()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._listener.is_alive()

    def watch(self) -> None:
        """End the process if it hangs."""
        if self.is_alive and time.monotonic() - self._heard_at > self._silence_s:
            self._process.send_signal(signal.SIGABRT)

    def stop(self) -> None:
        """Ask it to end after its round."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> Record:
        """Wait for its end; returns the record."""
        self._listener.join()
        status = self._process.wait()
        if status != 0 or not self.record.is_over:
            self._errors.seek(0)
            reason = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            self.record.died(f"the process ended with {reason}", self._errors.read().decode("utf-8", "replace"))
        self._errors.close()
        return self.record

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._heard_at = time.monotonic()
                with self._lock:
                    self.record.take(json.loads(line))


def supervise(
    plans: Sequence[Plan], write_report: Callable[[Sequence[Record]], None], silence_s: float = SILENCE_S
) -> list[Record]:
    """Carry out plans concurrently, with a line of progress in a terminal; Ctrl-C ends them early.

    Args:
        plans: one for each process.
        write_report: called every minute with the records so far.
        silence_s: longest duration of a round.
    """
    lock = threading.Lock()
    runners = [Runner(plan, lock, silence_s) for plan in plans]
    records = [runner.record for runner in runners]
    stopping, written_at = False, time.monotonic()
    while any(runner.is_alive for runner in runners):
        try:
            time.sleep(0.5)
            with lock:
                _show(records)
                if time.monotonic() - written_at > REPORT_S:
                    write_report(records)
                    written_at = time.monotonic()
            for runner in runners:
                runner.watch()
        except KeyboardInterrupt:
            for runner in runners:
                runner.stop()
            if stopping:
                raise
            stopping = True
            print("\nending after the rounds that run; Ctrl-C again to end at once", file=sys.stderr)
    _show([])
    return [runner.wait() for runner in runners]


def _show(records: Sequence[Record]) -> None:
    """Print a line of progress in place of the previous one; only in a terminal."""
    if not sys.stderr.isatty():
        return
    parts = [
        f"{record.plan.engine.backend} {record.elapsed_s:,.0f} s {record.rounds.total():,} rounds"
        f" {len(record.failures)} failed {record.samples[-1][0] if record.samples else 0:,.0f} MiB"
        for record in records
    ]
    print("\r\033[K" + " | ".join(parts), end="", file=sys.stderr, flush=True)
