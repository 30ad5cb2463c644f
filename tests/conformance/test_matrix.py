"""docs/conformance-mutants.md lists all mutants of the toy and all scenarios."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slm_conformance.mutants.edits import CutUpwards
from slm_conformance.mutants.matrix import NOT_PLAYED, all_mutants, killed_by_one
from slm_conformance.mutants.registry import MUTANTS, mutant
from slm_conformance.suite.meta import scenario_names

PAGE = Path(__file__).parents[2] / "docs" / "conformance-mutants.md"
ADVICE = "run: python -m slm_conformance.mutants.matrix docs/conformance-mutants.md"


def test_the_page_lists_all_mutants() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (.*?) \| `(\w+::\w+)` \| .* \|$", PAGE.read_text(), re.MULTILINE)
    expected = [(mutant.name, mutant.breaks.replace("``", "`"), mutant.killed_by) for mutant in all_mutants()]
    assert sorted(listed) == sorted(expected), f"{PAGE.name} does not list the mutants of the package ({ADVICE})"


def test_the_page_lists_all_scenarios() -> None:
    text, names = PAGE.read_text(), scenario_names()
    unknown = set(re.findall(r"`(Test\w+::\w+)`", text)) - set(names)
    missing = [name for name in names if f"`{name}`" not in text]
    assert (sorted(unknown), missing) == ([], []), f"{PAGE.name} is stale ({ADVICE})"
    assert f"The suite has {len(names)} scenarios" in text, f"{PAGE.name} counts other scenarios ({ADVICE})"


def test_each_scenario_has_a_mutant_that_only_it_kills() -> None:
    rows = re.findall(r"^\| `\w+` \| .*? \| `(\w+::\w+)` \| none \|$", PAGE.read_text(), re.MULTILINE)
    without = {name for name in scenario_names() if name not in rows and not name.startswith(NOT_PLAYED)}
    assert without == set(), f"no mutant is killed only by these scenarios: add a mutant, or merge them ({ADVICE})"


def test_a_mutant_killed_by_two_scenarios_counts_for_neither() -> None:
    assert killed_by_one({"a": ["x"], "b": ["x", "y"], "c": ["x"]}) == {"x": ["a", "c"]}


def test_a_mutant_derived_from_another_is_refused() -> None:
    n_mutants = len(MUTANTS)
    with pytest.raises(TypeError, match="Hidden derives from another mutant"):
        mutant("TestCut::test_of_nothing")(type("Hidden", (CutUpwards,), {}))
    assert len(MUTANTS) == n_mutants
