"""What was found, kept in a file; the table and the list of survivors made from it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mutants.edits import Mutant
from mutants.packages import PACKAGES, ROOT
from mutants.worker import digest_of_file

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


class Results:
    """The results in a file.

    Args:
        path: one line of JSON for each mutant; the last one counts.
    """

    def __init__(self, path: Path) -> None:
        self._found: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                result = json.loads(line)
                self._found[result["id"]] = result
        self._equivalent: dict[str, str] = tomllib.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}

    def is_known(self, mutant: Mutant) -> bool:
        """Whether a mutant was run on the file as it is now."""
        result = self._found.get(mutant.id)
        return result is not None and result["source"] == digest_of_file(ROOT / mutant.path)

    def _of(self, mutants: Iterable[Mutant], package: str | None = None) -> list[dict[str, Any]]:
        found = [self._found[mutant.id] for mutant in mutants if mutant.id in self._found]
        found = [result for result in found if result["verdict"] != "none" and result["id"] not in self._equivalent]
        return [result for result in found if package in (None, result["package"])]

    def table(self, mutants: Sequence[Mutant]) -> str:
        """A row for each package, in Markdown."""
        lines = [
            "| package | mutants run | reached by the suite | killed by the suite | reached by any test | killed by any test | survivors |",
            "|---|---|---|---|---|---|---|",
        ]
        names = [package.name for package in PACKAGES]
        rows = [(name, self._of(mutants, name)) for name in names]
        for name, found in [*rows, ("all", self._of(mutants))]:
            if found:
                lines.append(_row(name, found))
        return "\n".join(lines) + "\n"

    def survivors(self, mutants: Iterable[Mutant]) -> str:
        """Those that no test noticed, and those that the suite reaches and unit tests alone notice."""
        found = sorted(self._of(mutants), key=lambda result: (result["path"], result["line"]))
        lines = ["## Survive all tests", "", *(_line(r) for r in found if r["verdict"] == "survived"), ""]
        lines += ["## The suite reaches them; a unit test alone notices", ""]
        lines += [_line(r) for r in found if r["by_suite"] and r.get("kind") == "unit"]
        return "\n".join(lines) + "\n"

    def page(self, mutants: Sequence[Mutant], command: str) -> str:
        """The page of results."""
        raise NotImplementedError


def _row(name: str, found: list[dict[str, Any]]) -> str:
    by_suite = [result for result in found if result["by_suite"]]
    reached = [result for result in found if result["by_suite"] or result["by_unit"]]
    killed_by_suite = sum(result.get("kind") == "suite" for result in by_suite)
    killed = sum(result["verdict"] == "killed" for result in reached)
    cells = [len(found), len(by_suite), share(killed_by_suite, len(by_suite)), len(reached), share(killed, len(reached))]
    return "| " + " | ".join(map(str, [name, *cells, len(reached) - killed])) + " |"


def share(part: int, whole: int) -> str:
    """A number and its share of another."""
    return f"{part} ({100 * part / whole:.1f} %)" if whole else "0"


def _line(result: dict[str, Any]) -> str:
    place = f"`{result['path']}:{result['line']}` `{result['function']}`"
    return f"- {result['id']} {place}, {result['operator']}: `{result['before']}` -> `{result['after']}`"
