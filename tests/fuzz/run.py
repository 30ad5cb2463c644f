"""Fuzz a target, guided by coverage: ``python -m fuzz.run TARGET SECONDS [CORPUS]``, with ``tests`` on the path.

It needs atheris (``pip install 'slm-core[fuzz]'``). An input that breaks the target is written to the folder CORPUS,
or to a temporary folder, and the exit status of the program is not 0.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["slm_core", "slm_native"], enable_loader_override=False):
    from fuzz import targets
    from slm_core.checkpoints import families

    for _module in pkgutil.iter_modules(families.__path__):  # imported now, so that they are instrumented
        importlib.import_module(f"{families.__name__}.{_module.name}")

from fuzz.corpora import CORPORA

_LONGEST = 1 << 16
_MOST_MEMORY_MB = 2000
_LONGEST_CALL_S = 20


def main(target: str, seconds: str, corpus: str = "") -> None:
    """Write the corpus of a target and fuzz the target."""
    folder = Path(corpus or tempfile.mkdtemp(prefix=f"slm-fuzz-{target}-"))
    folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(CORPORA[target]()):
        (folder / f"seed-{i}").write_bytes(seed)
    options = {
        "max_total_time": seconds,
        "max_len": _LONGEST,
        "rss_limit_mb": _MOST_MEMORY_MB,
        "timeout": _LONGEST_CALL_S,
        "artifact_prefix": f"{folder}/",
        "print_final_stats": 1,
    }
    flags = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, str(folder)], lambda data: targets.run(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
