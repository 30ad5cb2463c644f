"""Results in a file; the table, and the list of survivors."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mutants.edits import Mutant
from mutants.packages import PACKAGES, ROOT
from mutants.worker import digest_of_file

EQUIVALENT, SURVIVORS = (Path(__file__).with_name(f"{name}.toml") for name in ("equivalent", "survivors"))


class Results:
    """The results in a file.

    Args:
        path: a JSON line for each mutant; the last line of a mutant counts. But if the suite ran again on a mutant
            and did not kill it, the result of the unit tests counts.
    """

    def __init__(self, path: Path) -> None:
        self._results: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                result = json.loads(line)
                if _replaces(result, self._results.get(result["id"])):
                    self._results[result["id"]] = result
        self._equivalent: dict[str, str] = tomllib.loads(EQUIVALENT.read_text())
        self._why: dict[str, str] = tomllib.loads(SURVIVORS.read_text())

    def was_asked(self, mutant: Mutant, kind: str) -> bool:
        """Whether the suite, or the unit tests, have already run on a mutant of the current file."""
        result = self._results.get(mutant.id)
        if result is None or result["source"] != digest_of_file(ROOT / mutant.path):
            return False
        return result["verdict"] in ("killed", "none") or kind in ("suite", result["asked"])

    def was_missed(self, mutant: Mutant) -> bool:
        """Whether the suite reached a mutant of the current file and did not kill it."""
        if not self.was_asked(mutant, "suite") or mutant.id in self._equivalent:
            return False
        result = self._results[mutant.id]
        return "suite" in result["reached_by"] and (result["verdict"], result["asked"]) != ("killed", "suite")

    def of(self, mutants: Iterable[Mutant]) -> dict[str, dict[str, Any]]:
        """The results of mutants whose files have not changed, by id."""
        return {mutant.id: self._results[mutant.id] for mutant in mutants if self.was_asked(mutant, "suite")}

    def _of(self, mutants: Iterable[Mutant], package: str | None = None) -> list[dict[str, Any]]:
        results = [self._results[mutant.id] for mutant in mutants if mutant.id in self._results]
        results = [result for result in results if result["verdict"] != "none" and result["id"] not in self._equivalent]
        return [result for result in results if package in (None, result["package"])]

    def table(self, mutants: Sequence[Mutant]) -> str:
        """A row for each package, in Markdown."""
        lines = [
            "| package | mutants run | reached by the suite | killed by it | killed by it or a unit test | survivors |",
            "|---|---|---|---|---|---|",
        ]
        names = [package.name for package in PACKAGES]
        rows = [(name, self._of(mutants, name)) for name in names]
        for name, results in [*rows, ("all", self._of(mutants))]:
            if results:
                lines.append(_row(name, results))
        return "\n".join(lines) + "\n"

    def survivors(self, mutants: Iterable[Mutant]) -> str:
        """Mutants that no test kills, and mutants that the suite reaches but only unit tests kill."""
        results = sorted(self._of(mutants), key=lambda result: (result["path"], result["line"]))
        lines = ["## Survive all tests", "", *(_line(r) for r in results if r["verdict"] == "survived"), ""]
        lines += ["## The suite reaches them; a unit test alone notices", ""]
        lines += [_line(r) for r in results if r["reached_by"] == ["suite", "unit"] and r["verdict"] == "killed"]
        return "\n".join(lines) + "\n"

    def page(self, mutants: Sequence[Mutant], command: str) -> str:
        """The page of results, in Markdown."""
        results = self._of(mutants)
        survivors = sorted((r for r in results if r["verdict"] == "survived"), key=lambda r: (r["path"], r["line"]))
        rows = [(r, "" if _is_final(r) else " (unit tests not asked yet)") for r in survivors]
        equivalent = [mutant for mutant in mutants if mutant.id in self._equivalent]
        lines = [
            _HEADER.format(date=time.strftime("%Y-%m-%d"), command=command, n_all=len(mutants), n_run=len(results))
        ]
        lines += [self.table(mutants), "## Survivors", ""]
        lines += [
            "No test that ran on these mutants fails.",
            "",
            "| mutant | function | change | why |",
            "|---|---|---|---|",
        ]
        lines += [f"{_cells(r, note)} {self._why.get(r['id'], 'not known yet')} |" for r, note in rows]
        lines += ["", "## Equivalent", "", "These mutants change nothing that a caller could observe.", ""]
        lines += ["| mutant | function | why |", "|---|---|---|"]
        lines += [f"| {m.id} | `{m.path}` `{m.function}` | {self._equivalent[m.id]} |" for m in equivalent]
        return "\n".join(lines) + "\n"


_HEADER = """# Mutants of the code itself

You can measure how many small bugs in slm-core's own code the tests detect. `make mutants` makes mutants: it
changes the code in one place at a time, and runs the tests. It runs the [conformance suite](conformance.md)
first, then the unit tests. (Another page lists the [mutants of the toy](conformance-mutants.md): backends that
are broken by hand, to test the conformance suite itself.)

```sh
make mutants                                             # 50 mutants of each package, drawn at random
make mutants MUTANTS="slm_core/context/ledger.py"        # all of one file
make mutants MUTANTS="--sample 200 --seed 1 --seconds 3600"
make mutants MUTANTS="--survivors"                       # the mutants that no test has killed
make mutants MUTANTS="--again --only suite --most 600"   # runs the suite for longer on mutants that survived it
make mutants MUTANTS="--show 4d891c48"                   # the change of one mutant
```

Results are kept in `build/mutants`; a run continues where the last run stopped. Written on {date} by
`make mutants MUTANTS="--page docs/mutants.md"` after `{command}`: {n_run} of {n_all} mutants were run.

## What is counted

A mutant changes one expression or statement inside a function: a comparison, a bound or a constant off by one, `and`
for `or`, a dropped statement, check, condition, `not`, copy or `with`, swapped arguments, another variable of the same
type, `min` for `max`, an early return, a swallowed error, a skipped `finally`. No mutant changes texts of errors,
assertions, defaults of arguments, or code that runs at import.

A test *reaches* a mutant if it runs a line of the changed statement. A mutant is *killed* if a test that reaches it
fails, if the process dies, or if a test computes for longer than five seconds and eight times its usual time. Tests
that killed another mutant of the same function or file run first, then the fastest tests. `--most` bounds the
seconds of tests for one mutant, so a longer run may kill more mutants. Subprocesses of tests run the unchanged code.
Unit tests are the tests of the mutant's package only.

The suite runs on one tiny float32 model per backend. For code above the contract, the backends are the native engine
with a transformer, the native engine with recurrent layers, and a toy that replays. For the code of a backend, it is
that backend.
"""


def _cells(result: dict[str, Any], note: str) -> str:
    change = f"`{result['before']}` becomes `{result['after']}`".replace("|", "\\|")
    return f"| {result['id']}{note} | `{result['path']}:{result['line']}` `{result['function']}` | {change} |"


def _row(name: str, results: list[dict[str, Any]]) -> str:
    by_suite = [result for result in results if "suite" in result["reached_by"]]
    reached = [result for result in results if result["reached_by"]]
    n_by_suite = sum(result["verdict"] == "killed" and result["asked"] == "suite" for result in by_suite)
    n_killed = sum(result["verdict"] == "killed" for result in reached)
    n_open = sum(not _is_final(result) for result in results)
    killed = (
        f"{n_open} not asked yet" if n_open else f"{n_killed} of {len(reached)} ({percent(n_killed, len(reached))})"
    )
    cells = [name, len(results), len(by_suite), f"{n_by_suite} ({percent(n_by_suite, len(by_suite))})", killed]
    return "| " + " | ".join(map(str, [*cells, len(reached) - n_killed])) + " |"


def _replaces(new: dict[str, Any], old: dict[str, Any] | None) -> bool:
    if old is None or old["source"] != new["source"] or old["asked"] == "suite":
        return True
    return bool(new["verdict"] == "killed" or new["asked"] == "unit")


def _is_final(result: dict[str, Any]) -> bool:
    """Whether all tests that could kill the mutant have run."""
    return result["verdict"] == "killed" or result["asked"] == "unit"


def percent(part: int, total: int) -> str:
    """A percentage."""
    return f"{100 * part / total:.1f} %" if total else "none"


def _line(result: dict[str, Any]) -> str:
    location = f"`{result['path']}:{result['line']}` `{result['function']}`"
    pending = "" if _is_final(result) else " (unit tests not asked yet)"
    return f"- {result['id']}{pending} {location}, {result['operator']}: `{result['before']}` -> `{result['after']}`"
