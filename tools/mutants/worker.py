"""One session of pytest: maps tests to lines, then forks a process for each mutant to run the tests that reach it.

The session itself imports everything and runs no test, so that forked processes start without threads and state.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutants.edits import Mutant, mutants_of
from mutants.packages import ROOT, SUITES, Kind, package_of
from mutants.patching import Functions, NotAMutant
from mutants.tracing import Lines

_MOST_MEMORY = 8 << 30  # bytes; a mutant may allocate any amount
_PATIENCE = 8.0  # a test with this multiple of its CPU time on the original code counts as hanging
_LEAST_PATIENCE = 5.0  # CPU seconds
_WAITING = 8.0  # multiple of the CPU limit in wall-clock time: other programs may use the cores, a deadlock must end
_IMPORTED = ("slm_", "onnx", "llama_cpp", "numpy", "jinja2", "llguidance", "tokenizers")
_SLOW_TO_IMPORT = ".torch"  # tests that need it import it at collection


@dataclass(frozen=True, slots=True)
class Reach:
    """The behaviour of a test on the original code.

    Attributes:
        seconds: its duration.
        lines: the lines that it runs in mutated files, by path relative to the repository.
    """

    seconds: float
    lines: dict[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a session.

    Attributes:
        mutants: the mutants, in order.
        kind: kind of the tests, "suite" or "unit".
        known: the suite's results for mutants of the unit tests, by id.
        results: the file to which results are appended, one JSON line each.
        reach: the folder of maps from tests to lines.
        until: when to stop, in seconds of ``time.time``.
        most_seconds: limit of the tests' total duration per mutant, by their durations on the original code.
    """

    mutants: Sequence[Mutant]
    kind: Kind
    known: dict[str, dict[str, Any]]
    results: Path
    reach: Path
    until: float
    most_seconds: float


class Worker:
    """A plugin of pytest that replaces its test loop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reach: dict[str, Reach] = {}
        self._kills: dict[str, Counter[str]] = defaultdict(Counter)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests, then run the mutants."""
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        self._map(session)
        functions = Functions(frozenset(ROOT / mutant.path for mutant in self._plan.mutants))
        items = {item.nodeid: item for item in session.items}
        for number, mutant in enumerate(self._plan.mutants):
            if time.time() > self._plan.until:
                break
            result = self._ask_about(mutant, functions, items)
            with self._plan.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            progress = f"{self._plan.kind} {number + 1}/{len(self._plan.mutants)}"
            say(f"{progress} {mutant.id} {mutant.path}:{mutant.line} {result['verdict']}")
        return True

    # The lines that tests reach.

    def _map(self, session: pytest.Session) -> None:
        files: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            files[item.path].append(item)
        for path, items in files.items():
            digest = _digest_of(items)
            map_file = self._plan.reach / f"{path.stem}-{digest}.json"
            if not map_file.exists():
                say(f"mapping {len(items)} tests of {path.relative_to(ROOT)} ...")
                lines_of_child = _in_child(lambda items=items: _map_of(items), lambda _: 3600.0)  # type: ignore[misc]
                if not lines_of_child or "tests" not in lines_of_child[-1]:
                    raise session.Interrupted(f"{path} cannot be mapped: {lines_of_child}")
                for failed in lines_of_child[:-1]:
                    say(f"left out, as it fails on the sound code: {failed['fails']}: {failed['why']}")
                map_file.write_text(json.dumps(lines_of_child[-1]))
            reach_map = json.loads(map_file.read_text())
            for name in reach_map["modules"]:
                with suppress(Exception):  # some can only be imported by other modules
                    importlib.import_module(name)
            for nodeid, (seconds, lines) in reach_map["tests"].items():
                self._reach[nodeid] = Reach(
                    seconds, {name: frozenset(lines_of_child) for name, lines_of_child in lines.items()}
                )

    # The result of a mutant.

    def _ask_about(self, mutant: Mutant, functions: Functions, items: dict[str, pytest.Item]) -> dict[str, Any]:
        package, begin = package_of(mutant.path), time.time()
        tests = self._reaching(mutant, package.tests(self._plan.kind))
        result = self._plan.known.get(mutant.id) or asdict(mutant) | {
            "package": package.name,
            "source": digest_of_file(ROOT / mutant.path),
            "reached_by": [],
            "verdict": "unreached",
            "killer": "",
            "seconds": 0.0,
        }
        if tests:
            result |= self._run(mutant, tests, functions, items)
            result["reached_by"] = [*result["reached_by"], self._plan.kind]
        result["asked"] = self._plan.kind
        result["seconds"] = round(result["seconds"] + time.time() - begin, 2)
        return result

    def _reaching(self, mutant: Mutant, paths: Sequence[Path]) -> list[str]:
        """The tests that run the mutant's lines, as many as the limit of their total duration allows.

        Tests that killed neighbours come first, then quick ones that run most of the file, then the others by duration.
        """
        mutated, paths_of_tests = range(mutant.first, mutant.last + 1), {str(path.relative_to(ROOT)) for path in paths}
        reaching = [
            nodeid
            for nodeid, reach in self._reach.items()
            if nodeid.partition("::")[0] in paths_of_tests
            and not reach.lines.get(mutant.path, frozenset()).isdisjoint(mutated)
        ]
        kills, of_file = self._kills[mutant.function], self._kills[mutant.path]

        def rank(nodeid: str) -> tuple[float, ...]:
            reach = self._reach[nodeid]
            is_quick = reach.seconds < self._plan.most_seconds / 20
            n_lines = len(reach.lines[mutant.path]) if is_quick else 0
            return -kills[nodeid], -of_file[nodeid], -n_lines, reach.seconds

        reaching.sort(key=rank)
        chosen, total = [], 0.0
        for nodeid in reaching:
            total += self._reach[nodeid].seconds
            if chosen and total > self._plan.most_seconds:
                break
            chosen.append(nodeid)
        return chosen

    def _run(
        self, mutant: Mutant, tests: Sequence[str], functions: Functions, items: dict[str, pytest.Item]
    ) -> dict[str, Any]:
        def limit(lines: list[dict[str, Any]]) -> float:
            clean = self._reach[tests[lines[-1]["runs"]]].seconds if lines and "runs" in lines[-1] else 0.0
            return _LEAST_PATIENCE + _PATIENCE * clean if lines else 60.0

        events = _in_child(lambda: _try(functions, mutant, [items[nodeid] for nodeid in tests]), limit)
        last = events[-1] if events else {"verdict": "none", "why": "the process died before it ran a test"}
        if "runs" in last:
            last = {"verdict": "killed", "why": last.get("why", "died")}
        ran = [line["runs"] for line in events if "runs" in line]
        killer = tests[ran[-1]] if ran and last["verdict"] == "killed" else ""
        if killer:
            self._kills[mutant.function][killer] += 1
            self._kills[mutant.path][killer] += 1
        return {"verdict": last["verdict"], "why": last.get("why", ""), "killer": killer, "n_run": len(ran)}


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.__stdout__, flush=True)


def digest_of_file(path: Path) -> str:
    """A digest that tells versions of a file apart."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _digest_of(items: Sequence[pytest.Item]) -> str:
    """A digest of the tests' names, their sources, and all files that may be mutated."""
    from mutants.packages import PACKAGES

    paths = {item.path for item in items} | {Path(item.function.__code__.co_filename) for item in items}  # type: ignore[attr-defined]
    paths |= {path for package in PACKAGES for path in package.paths()}
    text = "\n".join([*(item.nodeid for item in items), *(digest_of_file(path) for path in sorted(paths))])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _map_of(items: Sequence[pytest.Item]) -> Iterator[dict[str, Any]]:
    """Run tests on the original code and record their lines; skipped and failing tests are left out."""
    from mutants.packages import PACKAGES

    files = {str(path): path.relative_to(ROOT).as_posix() for package in PACKAGES for path in package.paths()}
    lines, tests = Lines(frozenset(files)), {}
    for item, following in zip(items, [*items[1:], None], strict=True):
        begin = time.perf_counter()
        with lines.recording() as recorded:
            reports = runtestprotocol(item, log=False, nextitem=following)
        seconds = time.perf_counter() - begin
        if all(report.passed for report in reports):
            tests[item.nodeid] = (
                round(seconds, 4),
                {files[name]: sorted(numbers) for name, numbers in recorded.items()},
            )
        for report in reports:
            if report.failed:
                yield {"fails": item.nodeid, "why": " ".join(str(report.longrepr).split())[-200:]}
    modules = [name for name in sys.modules if name.startswith(_IMPORTED) and _SLOW_TO_IMPORT not in name]
    yield {"tests": tests, "modules": modules}


def _try(functions: Functions, mutant: Mutant, items: Sequence[pytest.Item]) -> Iterator[dict[str, Any]]:
    """Apply a mutant, and run tests until one fails."""
    try:
        functions.patch(mutant, ROOT)
    except NotAMutant as error:
        yield {"verdict": "none", "why": str(error)}
        return
    for number, (item, following) in enumerate(zip(items, [*items[1:], None], strict=True)):
        yield {"runs": number}
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            yield {"verdict": "killed", "why": "failed"}
            return
    yield {"verdict": "survived"}


def _in_child(
    work: Callable[[], Iterator[dict[str, Any]]], limit: Callable[[list[dict[str, Any]]], float]
) -> list[dict[str, Any]]:
    """Run ``work`` in a forked process; returns its results. It is killed if it is silent for longer than ``limit``."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_child(work, writer)
    os.close(writer)
    events: list[dict[str, Any]] = []
    buffer = b""
    while (data := _read(reader, child, limit(events))) is not None and data:
        *complete, buffer = (buffer + data).split(b"\n")
        events += [json.loads(line) for line in complete]
    if data is None and events:
        events[-1]["why"] = "hangs"
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    return events


def _read(reader: int, child: int, limit: float) -> bytes | None:
    """The child's next output; None if it computes or waits for too long."""
    begin, computed = time.monotonic(), _computed_by(child)
    while time.monotonic() - begin < _WAITING * limit and _computed_by(child) - computed < limit:
        if select.select([reader], [], [], 0.5)[0]:
            return os.read(reader, 1 << 20)
    return None


def _computed_by(process: int) -> float:
    """CPU seconds of a process."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _be_child(work: Callable[[], Iterator[dict[str, Any]]], writer: int) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        with os.fdopen(writer, "w") as file:
            for line in work():
                file.write(json.dumps(line) + "\n")
                file.flush()
        status = 0
    finally:
        os._exit(status)


def main(arguments: Sequence[str]) -> int:
    """Run a session. The argument is a file with the plan; mutants are looked up by their ids."""
    job = json.loads(Path(arguments[0]).read_text())
    order = {mutant_id: index for index, mutant_id in enumerate(job["mutants"])}
    files = {ROOT / name for name in job["files"]}
    mutants = [mutant for path in files for mutant in mutants_of(path, ROOT) if mutant.id in order]
    mutants.sort(key=lambda mutant: order[mutant.id])
    kind, paths = job["kind"], {name: Path(job[name]) for name in ("results", "reach")}
    plan = Plan(mutants, kind, job["known"], **paths, until=job["until"], most_seconds=job["most_seconds"])
    tests = dict.fromkeys(str(path) for mutant in mutants for path in package_of(mutant.path).tests(kind))
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(ROOT), "-c"]
    sys.path[:0] = [str(SUITES.parent.parent), str(ROOT / "tests")]
    return int(pytest.main([*options, str(ROOT / "pyproject.toml"), *tests], plugins=[Worker(plan)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
