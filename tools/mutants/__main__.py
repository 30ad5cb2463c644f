"""``python -m mutants``: how many mutants do the conformance suite and the unit tests kill?"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mutants.edits import Mutant, mutants_of
from mutants.packages import PACKAGES, ROOT, package_of
from mutants.results import Results

KEPT = ROOT / "build" / "mutants"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, choose mutants, run them."""
    options = _parser().parse_args(arguments)
    if options.show:
        return _show(options.show, _chosen([]))
    results = Results(options.results)
    if options.page:
        options.page.write_text(results.page(list(_chosen([])), options.command))
        return 0
    if options.survivors:
        sys.stdout.write(results.survivors(_chosen(options.paths)))
        return 0
    mutants = _sampled(list(_chosen(options.paths)), options.sample, options.seed)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.id} {mutant.path}:{mutant.line} {mutant.operator}: {mutant.before}  ->  {mutant.after}")
        return 0
    if options.again:
        mutants = [mutant for mutant in mutants if results.was_missed(mutant)]
    until = time.time() + options.seconds if options.seconds else float("inf")
    for package in PACKAGES:
        for kind in (options.only,) if options.only else ("suite", "unit"):
            current = Results(options.results)
            is_asked = options.again and kind == "suite"
            new = [m for m in mutants if package_of(m.path) is package and (is_asked or not current.was_asked(m, kind))]
            if new and time.time() < until:
                _measure(kind, new, current.of(new) if kind == "unit" else {}, options, until)
    print(Results(options.results).table(mutants))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders to mutate (default: all that packages.py names)")
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants of each package, drawn at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw")
    parser.add_argument("--seconds", type=float, metavar="T", help="stop after this time; what was found is kept")
    parser.add_argument(
        "--most",
        type=float,
        default=60.0,
        metavar="T",
        help="seconds of tests on one mutant: of the suite, and again of unit tests",
    )
    parser.add_argument(
        "--only", choices=("suite", "unit"), help="ask the suite alone, or unit tests about what is left"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="ask the suite again about mutants that it reached and did not notice, with a larger --most",
    )
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    parser.add_argument("--show", metavar="ID", help="the change that a mutant makes, as a diff")
    parser.add_argument("--survivors", action="store_true", help="list what survived, as Markdown")
    parser.add_argument("--page", type=Path, help="write the page of results, and run nothing")
    parser.add_argument("--command", default="make mutants", help="the command that the page names")
    parser.add_argument("--results", type=Path, default=KEPT / "results.jsonl", help="where results are kept")
    return parser


def _chosen(paths: Sequence[str]) -> Iterator[Mutant]:
    """The mutants of files and folders.

    Raises:
        SystemExit: a path has nothing to mutate.
    """
    files = [path for package in PACKAGES for path in package.paths()]
    chosen = [Path(name).resolve() for name in paths]
    for folder in chosen:
        if not any(path == folder or folder in path.parents for path in files):
            sys.exit(f"nothing to mutate in {folder} (packages.py names the files)")
    for path in files:
        if not chosen or any(path == folder or folder in path.parents for folder in chosen):
            yield from mutants_of(path, ROOT)


def _sampled(mutants: list[Mutant], n: int | None, seed: int) -> list[Mutant]:
    """At most n of each package, in an order that depends on the seed; a larger sample extends a smaller one."""
    mutants.sort(key=lambda mutant: hashlib.sha256(f"{seed}{mutant.id}".encode()).digest())
    chosen = []
    for package in PACKAGES:
        chosen += [mutant for mutant in mutants if package_of(mutant.path) is package][:n]
    return chosen


def _measure(
    kind: str, mutants: Sequence[Mutant], known: dict[str, Any], options: argparse.Namespace, until: float
) -> None:
    (KEPT / "reach").mkdir(parents=True, exist_ok=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    plan = {
        "kind": kind,
        "known": known,
        "mutants": [mutant.id for mutant in mutants],
        "files": sorted({mutant.path for mutant in mutants}),
        "results": str(options.results.resolve()),
        "reach": str(KEPT / "reach"),
        "until": until,
        "most_seconds": options.most,
    }
    roots = [ROOT, *(ROOT / name for name in ("backends", "formatters", "conformance", "tools", "tests"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots)), "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(plan))
        subprocess.run([sys.executable, "-m", "mutants.worker", str(path)], env=environment, cwd=ROOT, check=True)


def _show(mutant_id: str, mutants: Iterator[Mutant]) -> int:
    for mutant in mutants:
        if mutant.id == mutant_id:
            print(f"{mutant.path}:{mutant.line}, in {mutant.function}: {mutant.operator}")
            print(f"- {mutant.before}\n+ {mutant.after}")
            return 0
    sys.exit(f"no mutant {mutant_id}: the code may have changed (--list lists them)")


if __name__ == "__main__":
    sys.exit(main())
