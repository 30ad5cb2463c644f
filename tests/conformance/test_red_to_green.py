"""docs/red-to-green.md quotes messages of the suite about broken backends; the quotes are exact."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slm_conformance.mutants.matrix import all_mutants
from slm_conformance.suite.meta import play, scenario_names

PAGE = (Path(__file__).parents[2] / "docs" / "red-to-green.md").read_text()
BLOCKS = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
QUOTED = [line for block in BLOCKS for line in block.splitlines()]
MUTANTS = [
    "OptionIgnored",
    "RawErrors",
    "SixteenBits",
    "RowsBySequence",
    "DirtyAfterRefusal",
    "TruncateClamps",
    "TruncateWritesWhatIsShared",
    "CutWithoutRotation",
    "PayloadTrusted",
    "OpenAfterClose",
]


def _without_numbers(text: str) -> str:
    """A message without the parts that depend on the machine: numerical errors and paths of temporary files."""
    return re.sub(r"/tmp\S*/", "", re.sub(r"\d\.\d\de[+-]\d\d|(?<=row )\d+", "0", text))


@pytest.mark.parametrize(("line", "name"), list(zip(QUOTED, MUTANTS, strict=True)), ids=MUTANTS)
def test_quoted_messages_are_exact(line: str, name: str) -> None:
    mutant = next(mutant for mutant in all_mutants() if mutant.name == name)
    reason = play(mutant.fixtures(), mutant.killed_by).reason.splitlines()[0]
    assert _without_numbers(reason) == _without_numbers(line)


def test_named_classes_exist() -> None:
    classes = {name.partition("::")[0] for name in scenario_names()}
    assert set(re.findall(r"`(Test\w+)", PAGE)) - classes == set()
