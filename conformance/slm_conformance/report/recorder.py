"""The part of the pytest plugin that records results and writes the reports at the end of the run."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from slm_conformance import report
from slm_conformance.report.record import NOT_RUN, Report, Result, Run, one_line, sections, versions
from slm_conformance.suite.adoption import workshop_of
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.collection import by_module
from slm_conformance.suite.meta import Verdict
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.subject import Subject, describe
from slm_core.errors import InvalidOption

_ABSENT = "declared absent: "


class Recorder:
    """A plugin of pytest, registered for runs with a report.

    Args:
        paths: the files of the reports, checked.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._runs: dict[str, Run] = {}
        self._adopted: dict[str, type[Scenarios]] = {}
        self._date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._problems: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Record all scenarios, before pytest deselects any."""
        adopted = by_module(items)
        if not adopted:
            raise pytest.UsageError("--slm-report: no module of this run adopts the suite")
        for module, functions in adopted.items():
            run = self._runs[module.__name__] = Run(module.__name__, Subject("unknown"))
            for item in functions:
                assert item.cls is not None
                self._adopted[item.cls.__name__] = item.cls
                run.results.setdefault(_scenario(item), {})[_model(item)] = NOT_RUN

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the backends."""
        for module in by_module(session.items):
            run = self._runs[module.__name__]
            try:
                run.subject = describe(workshop_of(module, session.config))
            except pytest.skip.Exception as skipped:
                run.subject = Subject("not installed", problem=str(skipped))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the result of a scenario; here the exception is known."""
        report = yield
        if isinstance(item, pytest.Function) and item.module.__name__ in self._runs:
            results = self._runs[item.module.__name__].results.get(_scenario(item))
            if results is not None:
                _note(results, item, call.when, _result(report, call, _notes_of(item)))
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the reports, unless pytest did not run."""
        if session.exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
            return
        table = Report(self._date, tuple(self._runs.values()), sections(self._adopted), versions())
        for path in self._paths:
            try:
                report.write(table, path)
            except OSError as error:  # the disk may be full by now
                self._problems.append(f"the report {str(path)!r} was not written: {error}")
        if self._problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the paths of the reports."""
        for problem in self._problems:
            terminalreporter.write_line(f"slm-conformance: {problem}", red=True)
        if not self._problems:
            for path in self._paths:
                terminalreporter.write_line(f"slm-conformance: report written to {path}")


def watch(config: pytest.Config) -> None:
    """Register a recorder for the reports that the command line names.

    Raises:
        pytest.UsageError: an unknown format, a path that cannot be written, or a run in several processes.
    """
    if config.getoption("numprocesses", None):  # pytest-xdist: the scenarios run in other processes
        raise pytest.UsageError("--slm-report: run in one process, without -n")
    try:
        paths = report.check_paths(config.getoption("--slm-report"))
    except InvalidOption as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(Recorder(paths))


def _scenario(item: pytest.Function) -> str:
    """The scenario of an item; "" before the colons if it is in no class."""
    return f"{item.cls.__name__ if item.cls else ''}::{item.originalname}"


def _model(item: pytest.Function) -> str:
    """The model: the part of the name in brackets."""
    return item.name.removeprefix(item.originalname).strip("[]")


def _note(results: dict[str, Result], item: pytest.Function, phase: str, result: Result) -> None:
    """Record the result of one phase. Only a call can hold, each phase can fail, and the first failure stays."""
    if result.verdict is Verdict.HOLDS and phase != "call":
        return
    if results[_model(item)].verdict is not Verdict.FAILS:
        results[_model(item)] = result


def _notes_of(item: pytest.Function) -> str:
    """The notes of the scenario, such as the seeds of random programs."""
    bench = item.funcargs.get("bench")
    return "; ".join(bench.notes) if isinstance(bench, Bench) else ""


def _result(report: pytest.TestReport, call: pytest.CallInfo[None], notes: str) -> Result:
    """The result of one phase."""
    seconds = report.duration
    if report.passed:
        return Result(Verdict.HOLDS, notes, seconds)
    expected = getattr(report, "wasxfail", None)  # set by pytest where a failure was expected
    if report.skipped and expected is not None:
        return Result(Verdict.EXPECTED, one_line(str(expected)), seconds)
    reason = _reason(report, call)
    if report.failed:
        return Result(Verdict.FAILS, reason, seconds)
    verdict = Verdict.ABSENT if reason.startswith(_ABSENT) else Verdict.NOT_RUN
    return Result(verdict, reason.removeprefix(_ABSENT), seconds)


def _reason(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if call.excinfo is None:  # an expected failure that did not happen
        return one_line(str(report.longrepr))
    error = call.excinfo.value
    message = one_line(str(error))
    if isinstance(error, (AssertionError, pytest.fail.Exception, pytest.skip.Exception)) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
