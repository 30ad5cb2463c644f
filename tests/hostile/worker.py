"""Runs hostile inputs in its own process: ``python -m tests.hostile.worker KIND BACKEND FOLDER``.

It reads seeds of cases from standard input, one per line, and writes one line of JSON for each.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from pathlib import Path

from slm_core.errors import SlmError
from tests.hostile.kinds import KINDS, LONGEST_MESSAGE, Kind, Nonsense

ROOM = 3 << 30
"""Limit of additional address space in bytes: a hostile input of a megabyte must not allocate more."""


def main(kind_name: str, backend: str, folder: str) -> None:
    """Attack until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # so that output of engines does not mix with the answers
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    kind = KINDS[kind_name][0](backend, Path(folder))
    kind.prepare()
    warm_up(kind)
    _bound_memory()
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(json.dumps(outcome(kind, int(line))) + "\n")


def warm_up(kind: Kind) -> None:
    """Load the engine before memory is limited."""
    if kind.backend in ("native", "onnx", "llamacpp"):
        from slm_conformance.oracle.factories import tiny_model
        from tests.hostile.kinds import use_file

        if kind.backend == "onnx":
            import onnxruntime  # noqa: F401
        use_file(_backend(kind), tiny_model(kind.folder))


def _backend(kind: Kind):
    from slm_conformance.suite.spec import make_backend

    return make_backend(kind.backend)


def outcome(kind: Kind, seed: int) -> list[str]:
    """The verdict on a case (accepted, refused, leaked or nonsense) and its message."""
    try:
        kind.attack(seed)
    except SlmError as error:
        message = str(error)
        if "\n" in message or len(message) > LONGEST_MESSAGE:
            return ["leaked", f"a message of {len(message)} characters: {message[:300]!r}"]
        return ["refused", f"{type(error).__name__}: {message}"]
    except Nonsense as error:
        return ["nonsense", str(error)]
    except BaseException as error:  # the PanicException of Rust libraries is not an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return ["leaked", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{_place(error)}"]
    return ["accepted", ""]


def _place(error: BaseException) -> str:
    """The innermost place of the traceback in our code."""
    place, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "/slm_" in name:
            place = f" [{Path(name).name}:{trace.tb_lineno}]"
        trace = trace.tb_next
    return place


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else None
    if pages is not None:
        limit = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
