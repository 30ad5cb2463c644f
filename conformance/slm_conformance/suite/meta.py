"""Runs scenarios without pytest, for the tests of the suite and the table of mutants."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.suite import scenarios
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.workshop import Workshop


class Verdict(StrEnum):
    """The result of a scenario on one model; the worst comes first."""

    FAILS = "FAILS"
    EXPECTED = "expected to fail"
    NOT_RUN = "not run"
    ABSENT = "declared absent"
    HOLDS = "holds"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a scenario.

    Attributes:
        verdict: the verdict.
        reason: why, if it does not hold.
    """

    verdict: Verdict
    reason: str = ""


def scenario_names() -> list[str]:
    """Every scenario, as ``TestClass::test_name``."""
    return [f"{name}::{test}" for name in scenarios.__all__ for test in tests_of(getattr(scenarios, name))]


def tests_of(scenario_class: type[Scenarios]) -> list[str]:
    """The names of a class's scenarios."""
    return [name for name in vars(scenario_class) if name.startswith("test_")]


def play(fixtures: BackendFixtures, scenario: str) -> Outcome:
    """Play one scenario on the first model of ``fixtures``."""
    ((_, outcome),) = play_in_turn(fixtures, [scenario])
    return outcome


def play_in_turn(fixtures: BackendFixtures, names: Iterable[str]) -> Iterator[tuple[str, Outcome]]:
    """Play scenarios on the first model of ``fixtures``, loaded once; yields each name with its result."""
    with tempfile.TemporaryDirectory() as directory:
        workshop = Workshop(fixtures, Path(directory))
        try:
            for name in names:
                yield name, _play(workshop, name)
        finally:
            workshop.close()


def _play(workshop: Workshop, scenario: str) -> Outcome:
    class_name, test = scenario.split("::")
    scenario_class: type[Scenarios] = getattr(scenarios, class_name)
    try:
        models = scenario_class.models or workshop.fixtures.models
        with Bench(workshop, models[0]) as bench:
            bench.requires(scenario_class.level)
            getattr(scenario_class(), test)(bench)
    except pytest.skip.Exception as skipped:
        return Outcome(Verdict.ABSENT, str(skipped))
    except (Exception, pytest.fail.Exception) as error:
        return Outcome(Verdict.FAILS, str(error) or type(error).__name__)
    return Outcome(Verdict.HOLDS)
