"""The process that is killed: it answers, and saves and acknowledges a dump every few tokens.

``python -m soaking.worker ARGUMENTS`` (JSON). It writes lines "soak: WORD VALUE" to standard output: ``begins`` with
the number of answer tokens at its start, ``saved`` with the number of tokens in a dump that is safe on disk, and
``said`` with all tokens at the end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from slm_conformance.suite.spec import make_backend
from slm_core.chat import Session
from slm_core.sampling import Sampling
from slm_core.types import ContextOptions, KvType, ModelOptions
from soaking.sessions import pause_at

MARK = "soak:"


def main(arguments: str, save: Callable[[Path, bytes, str], None]) -> None:
    """Answer from the beginning, or from the dump if there is one.

    Args:
        arguments: backend, path, device, n_threads, load_options, sizes and kv_type of the context, prompt,
            max_tokens, every (tokens between two dumps), dump (a file).
        save: writes a dump and acknowledges it with a line.
    """
    faulthandler.enable()
    job = json.loads(arguments)
    options = ModelOptions(job["device"], job["n_threads"], backend_options=job["load_options"])
    kv_type = KvType(job["kv_type"])
    with make_backend(job["backend"]).load(Path(job["path"]), options) as model:
        context = model.new_context(ContextOptions(*job["sizes"], kv_type, kv_type))
        dump = Path(job["dump"])
        sampling: Sampling | None = None  # a restored answer has its own options
        if dump.exists():
            session = Session.restore(context, model.vocab, dump.read_bytes())
        else:
            session = Session(context, model.vocab)
            session.append_tokens(job["prompt"])
            sampling = Sampling(temperature=0, max_tokens=job["max_tokens"])
        n_said = session.n_tokens - len(job["prompt"])
        say(f"begins {n_said}")
        while True:
            n_said += job["every"]
            generation = session.generate(sampling, stopping_criteria=[pause_at(n_said)])
            for _event in generation:
                pass
            if not generation.paused:
                break
            sampling = None
            save(dump, session.dump(), f"saved {n_said}")
        say(f"said {json.dumps(generation.answer.tokens)}")


def say(line: str) -> None:
    """Write a line and flush it."""
    print(MARK, line, flush=True)


def save_then_say(path: Path, data: bytes, line: str) -> None:
    """Replace a file, wait until it is on disk, then write a line."""
    new_file = path.with_suffix(".new")
    with new_file.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new_file.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    say(line)


if __name__ == "__main__":
    main(sys.argv[1], save_then_say)
