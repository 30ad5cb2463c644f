"""The data of a report. Texts of a run are cleaned here, and escaped again by each format."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from slm_conformance.suite import scenarios
from slm_conformance.suite.hints import HINTS
from slm_conformance.suite.meta import Verdict, scenario_names
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.subject import Subject

_MAX_CHARS = 500


PLURALS = {
    Verdict.FAILS: "FAIL",
    Verdict.HOLDS: "hold",
    Verdict.ABSENT: "declared absent",
    Verdict.EXPECTED: "expected to fail",
    Verdict.NOT_RUN: "not run",
}
"""The words after a count of verdicts, most important first."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a scenario on one model.

    Attributes:
        verdict: the verdict.
        reason: one line: why the scenario does not hold; "" if it holds.
        seconds: its duration.
    """

    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0


NOT_RUN = Result(Verdict.NOT_RUN)


@dataclass(slots=True)
class Run:
    """The results on one backend.

    Attributes:
        module: the module that adopts the suite.
        subject: the backend under test.
        results: by scenario, ``TestClass::test_name``, and model; scenarios that were not selected are missing.
    """

    module: str
    subject: Subject
    results: dict[str, dict[str, Result]] = field(default_factory=dict)

    def of(self, scenario: str) -> dict[str, Result]:
        """The results of a scenario by model; if it was not selected, "not run" under the name ""."""
        return self.results.get(scenario) or {"": NOT_RUN}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A row of the table.

    Attributes:
        name: ``TestClass::test_name``.
        clause: the number or noun at the start of its docstring.
        proves: the rest of the docstring.
    """

    name: str
    clause: str
    proves: str


@dataclass(frozen=True, slots=True)
class Section:
    """A class of scenarios.

    Attributes:
        name: the name of the class.
        about: its docstring.
        hint: where to look if a scenario fails.
        scenarios: its rows.
    """

    name: str
    about: str
    hint: str
    scenarios: tuple[Scenario, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A table of clauses by backend.

    Attributes:
        date: the date of the run, ISO 8601 in UTC.
        runs: the columns.
        sections: the rows.
        versions: the versions of the packages and of Python.
    """

    date: str
    runs: tuple[Run, ...]
    sections: tuple[Section, ...]
    versions: dict[str, str]

    def labels(self) -> list[str]:
        """A name for each run: its backend; with its module if two runs have the same backend."""
        backends = [run.subject.backend for run in self.runs]
        return [
            name if backends.count(name) == 1 else f"{name} ({run.module.rpartition('.')[2]})"
            for name, run in zip(backends, self.runs, strict=True)
        ]

    def count(self, run: Run, section: Section | None = None) -> Counter[Verdict]:
        """The number of each verdict in a run, or in one section of it."""
        chosen = self.sections if section is None else (section,)
        names = [scenario.name for part in chosen for scenario in part.scenarios]
        return Counter(result.verdict for name in names for result in run.of(name).values())

    def total(self) -> Counter[Verdict]:
        """The number of each verdict."""
        return sum((self.count(run) for run in self.runs), Counter())

    def failures(self) -> Iterator[tuple[str, Scenario, str, Result]]:
        """Label of the run, scenario, model and result of each failure."""
        for label, run in zip(self.labels(), self.runs, strict=True):
            for section in self.sections:
                for scenario in section.scenarios:
                    for model, result in run.of(scenario.name).items():
                        if result.verdict is Verdict.FAILS:
                            yield label, scenario, model, result


def one_line(text: str) -> str:
    """The first line that is not empty, of limited length, with unprintable characters escaped."""
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    printable = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
    return printable if len(printable) <= _MAX_CHARS else printable[: _MAX_CHARS - 1] + "…"


def sections(adopted: dict[str, type[Scenarios]]) -> tuple[Section, ...]:
    """The classes of the suite, and those that adopting modules add."""
    ours: dict[str, type[Scenarios]] = {name: getattr(scenarios, name) for name in scenarios.__all__}
    tests: dict[str, list[str]] = {name: [] for name in ours}
    for scenario in scenario_names():
        class_name, test = scenario.split("::")
        tests[class_name].append(test)
    for name, scenario_class in adopted.items():
        if name not in ours:
            ours[name] = scenario_class
            tests[name] = [test for test in vars(scenario_class) if test.startswith("test_")]
    return tuple(_section(ours[name], tests[name]) for name in ours)


def versions() -> dict[str, str]:
    """The versions of the packages and of Python."""
    packages = {name: importlib.metadata.version(name) for name in ("numpy", "pytest")}
    try:
        packages["slm-core"] = importlib.metadata.version("slm-core")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        packages["slm-core"] = "from a checkout"
    return {**packages, "python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}


def _section(scenario_class: type[Scenarios], tests: list[str]) -> Section:
    name = scenario_class.__name__
    rows = tuple(_scenario(f"{name}::{test}", getattr(scenario_class, test)) for test in tests)
    return Section(name, _text_of(scenario_class), HINTS.get(name, ""), rows)


def _scenario(name: str, test: object) -> Scenario:
    clause, _, proves = _text_of(test).partition(": ")
    return Scenario(name, clause if proves else "", proves or clause)


def _text_of(thing: object) -> str:
    return one_line(" ".join((inspect.getdoc(thing) or "").split()).replace("``", "`"))
