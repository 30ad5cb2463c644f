"""Faults that the soak program has to find: a worker that acknowledges too early, and backends that break."""

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
    """``truncate`` keeps a token too many in the engine, and says otherwise."""

    def truncate(self, pos: Pos) -> Pos:
        where = super().truncate(Pos(pos.seq_id, min(pos.index + 1, self.length(pos.seq_id))))
        return Pos(where.seq_id, pos.index)


class Broken(ToyBackend):
    context_type = TruncatesTooLittle


class Crashing(ToyBackend):
    """It takes the process with it."""

    def load(self, source: ModelSource, options: ModelOptions) -> object:
        os.kill(os.getpid(), signal.SIGSEGV)


_waiting: list[bytes] = []


def say_then_save(path: Path, data: bytes, line: str) -> None:
    """Acknowledge a dump at once, and write it when the next one comes."""
    worker.say(line)
    _waiting.append(data)
    if len(_waiting) > 1:
        aside = path.with_suffix(".new")
        aside.write_bytes(_waiting.pop(0))
        aside.replace(path)


if __name__ == "__main__":
    worker.main(sys.argv[1], say_then_save)
