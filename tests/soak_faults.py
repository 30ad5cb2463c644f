"""Faults that the soak program must detect: a worker that acknowledges too early, and broken backends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from slm_conformance.toy.backend import ToyBackend
from slm_conformance.toy.context import ToyContext
from slm_core.types import ModelOptions, ModelSource, Pos
from soaking import worker


class TruncatesTooLittle(ToyContext):
    """``truncate`` keeps one token too many in the engine, but reports the right length."""

    def truncate(self, pos: Pos) -> Pos:
        where = super().truncate(Pos(pos.seq_id, min(pos.index + 1, self.length(pos.seq_id))))
        return Pos(where.seq_id, pos.index)


class Broken(ToyBackend):
    context_type = TruncatesTooLittle


class Crashing(ToyBackend):
    """Kills the process in ``load``."""

    def load(self, source: ModelSource, options: ModelOptions) -> object:
        os.kill(os.getpid(), signal.SIGSEGV)


_waiting: list[bytes] = []


def say_then_save(path: Path, data: bytes, line: str) -> None:
    """Acknowledge a dump at once, but write it only when the next dump comes."""
    worker.say(line)
    _waiting.append(data)
    if len(_waiting) > 1:
        partial = path.with_suffix(".new")
        partial.write_bytes(_waiting.pop(0))
        partial.replace(path)


if __name__ == "__main__":
    worker.main(sys.argv[1], say_then_save)
