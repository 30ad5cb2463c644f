"""A process that answers prompts and prints which of them are saved; tests/engine/test_disk.py kills it."""

from __future__ import annotations

import sys
from pathlib import Path

from scripted import ByteVocab, ScriptedContext
from slm_core.engine import Engine, EngineOptions
from slm_core.protocols import Formatter
from slm_core.sampling import Sampling

GREEDY = Sampling(temperature=0, max_tokens=12)


def engine_on(directory: Path, **options: object) -> Engine:
    """An engine that stores cached sequences in a directory."""

    def formatter() -> Formatter:
        raise NotImplementedError

    context = ScriptedContext(n_ctx=2000, n_seq_max=16)
    return Engine(context, ByteVocab(), formatter, EngineOptions(cache_dir=directory, **options))  # type: ignore[arg-type]


def prompt(i: int) -> str:
    """The prompt number ``i`` of the process."""
    return f"{i * 7919} is what the prompt of this number begins with, and it goes on for {'a while ' * (i % 5)}"


if __name__ == "__main__":
    with engine_on(Path(sys.argv[1])) as engine:
        for i in range(1000):
            stream = engine.submit(prompt(i), GREEDY)
            answer = stream.run()
            assert stream.saved(60)
            sys.stdout.write(f"{i} {' '.join(map(str, answer.tokens))}\n")
            sys.stdout.flush()
