"""The page of faults by scenario lists what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slm_conformance.mutants.edits import CutUpwards
from slm_conformance.mutants.matrix import NOT_PLAYED, all_faults, only_killers
from slm_conformance.mutants.registry import FAULTS, fault
from slm_conformance.suite.meta import scenario_names

PAGE = Path(__file__).parents[2] / "docs" / "conformance-faults.md"
ADVICE = "run: python -m slm_conformance.mutants.matrix docs/conformance-faults.md"


def test_the_page_lists_the_faults_that_there_are() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (.*?) \| `(\w+::\w+)` \| .* \|$", PAGE.read_text(), re.MULTILINE)
    expected = [(fault.name, fault.breaks.replace("``", "`"), fault.killed_by) for fault in all_faults()]
    assert sorted(listed) == sorted(expected), f"{PAGE.name} lists other faults than there are ({ADVICE})"


def test_the_page_knows_the_scenarios_that_there_are() -> None:
    text, names = PAGE.read_text(), scenario_names()
    unknown = set(re.findall(r"`(Test\w+::\w+)`", text)) - set(names)
    missing = [name for name in names if f"`{name}`" not in text]
    assert (sorted(unknown), missing) == ([], []), f"{PAGE.name} is stale ({ADVICE})"
    assert f"The suite has {len(names)} scenarios" in text, f"{PAGE.name} counts other scenarios ({ADVICE})"


def test_each_scenario_has_a_fault_that_it_alone_notices() -> None:
    rows = re.findall(r"^\| `\w+` \| .*? \| `(\w+::\w+)` \| none \|$", PAGE.read_text(), re.MULTILINE)
    without = {name for name in scenario_names() if name not in rows and not name.startswith(NOT_PLAYED)}
    assert without == set(), f"no fault is noticed by these alone: add one, or merge them ({ADVICE})"


def test_a_fault_that_two_notice_speaks_for_neither() -> None:
    assert only_killers({"a": ["x"], "b": ["x", "y"], "c": ["x"]}) == {"x": ["a", "c"]}


def test_a_fault_that_would_hide_behind_another_is_refused() -> None:
    n_faults = len(FAULTS)
    with pytest.raises(TypeError, match="Hidden derives from another fault"):
        fault("TestCut::test_of_nothing")(type("Hidden", (CutUpwards,), {}))
    assert len(FAULTS) == n_faults
