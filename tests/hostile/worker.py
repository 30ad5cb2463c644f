"""Takes hostile inputs in a process of its own: ``python -m tests.hostile.worker KIND BACKEND FOLDER``.

Numbers of cases come in on standard input, one a line; for each, one line of JSON goes out.
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
"""Bytes of addresses beyond what sound inputs take: a hostile input of a megabyte must not ask for more."""


def main(kind_name: str, backend: str, folder: str) -> None:
    """Attack until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # engines that print must not write into the answers
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
    """Have engines loaded before memory is bounded."""
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
    """What came of a case: accepted, refused, leaked or nonsense; and the message."""
    try:
        kind.attack(seed)
    except SlmError as error:
        message = str(error)
        if "\n" in message or len(message) > LONGEST_MESSAGE:
            return ["leaked", f"a message of {len(message)} characters: {message[:300]!r}"]
        return ["refused", f"{type(error).__name__}: {message}"]
    except Nonsense as error:
        return ["nonsense", str(error)]
    except BaseException as error:  # a PanicException of Rust's is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return ["leaked", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{_place(error)}"]
    return ["accepted", ""]


def _place(error: BaseException) -> str:
    """Where it came from, in our code."""
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
