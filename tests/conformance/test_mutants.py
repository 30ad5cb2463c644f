"""The tool of ``make mutants``: it creates the documented mutants, and inserts them into all references to the code."""

from __future__ import annotations

import functools
import importlib.util
import json
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from mutants.edits import Mutant, mutants_of, mutated
from mutants.packages import PACKAGES, ROOT, package_of
from mutants.patching import Functions, NotAMutant
from mutants.results import Results
from mutants.tracing import Lines
from mutants.worker import digest_of_file

SOURCE = """
import functools


class Counter:
    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def add(self, n: int, items: list[int]) -> list[int]:
        if n < 0:
            raise ValueError("too few" + str(n + 1))
        if n > 99:
            text = "too few" + str(n + 1)
            raise ValueError(text)
        if not items and n <= self.high:
            items = list(items)[1:]
        return [item for item in items if item > n][: min(n, self.high)]

    def rest(self, n: int) -> int:
        return divmod(n, self.high)[1]


@functools.cache
def doubled(n: int) -> int:
    assert n + 1
    return n * 2
"""


@pytest.fixture
def module(tmp_path: Path):
    path = tmp_path / "counter.py"
    path.write_text(textwrap.dedent(SOURCE))
    spec = importlib.util.spec_from_file_location("counter", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def mutants(module) -> list[Mutant]:
    path = Path(module.__file__)
    return list(mutants_of(path, path.parent))


def test_created_mutants(mutants) -> None:
    created = {(mutant.operator, mutant.after) for mutant in mutants}
    expected = {
        ("dropped statement", "(dropped statement)"),
        ("dropped check", "(dropped check)"),
        ("comparison", "if n <= 0: ..."),
        ("and and or", "if not items or n <= self.high: ..."),
        ("dropped condition", "if n <= self.high: ..."),
        ("dropped not", "if items and n <= self.high: ..."),
        ("off by one", "if not items and n <= self.high + 1: ..."),
        ("missing copy", "items = items[1:]"),
        ("slice", "items = list(items)[:]"),
        ("constant", "items = list(items)[2:]"),
        ("dropped filter", "return [item for item in items][:min(n, self.high)]"),
        ("twin", "return [item for item in items if item > n][:max(n, self.high)]"),
        ("swapped arguments", "return divmod(self.high, n)[1]"),
        ("wrong variable", "self.low = high"),
        ("early return", "(early return)"),
        ("arithmetic", "return n + 2"),
    }
    assert not [after for _, after in created if "min(self.high, n)" in after], "min does not depend on the order"
    assert expected - created == set()
    assert not any("too few" in mutant.after or "assert" in mutant.before for mutant in mutants), "a text was mutated"


def test_names_of_mutants_are_unique_and_do_not_depend_on_lines(mutants, module) -> None:
    path = Path(module.__file__)
    assert set(Counter(mutant.id for mutant in mutants).values()) == {1}
    path.write_text("\n\n\n" + path.read_text())
    moved = list(mutants_of(path, path.parent))
    assert [mutant.id for mutant in moved] == [mutant.id for mutant in mutants]
    assert [mutant.line - 3 for mutant in moved] == [mutant.line for mutant in mutants]


def test_a_mutant_is_in_all_references_and_caches_are_cleared(mutants, module) -> None:
    path = Path(module.__file__)
    counter, doubled = module.Counter(1, 5), functools.partial(module.doubled, 4)
    bound = counter.add
    functions = Functions(frozenset({path}))
    assert (bound(2, [3, 1]), doubled()) == ([3], 8)
    by_change = {mutant.after: mutant for mutant in mutants}
    functions.patch(by_change["return n + 2"], path.parent)
    assert doubled() == 6
    functions.patch(by_change["return [item for item in items if item >= n][:min(n, self.high)]"], path.parent)
    assert bound(2, [3, 2]) == [3, 2]
    assert doubled() == 8, "only one mutant of a file is active"


def test_a_change_that_compiles_to_the_same_code_is_not_a_mutant(module) -> None:
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("n * 2", "+1 * 2"))
    same = Mutant("", "counter.py", 1, "", "", "", "", index=0, first=1, last=1)
    with pytest.raises(NotAMutant):
        Functions(frozenset()).patch(same, path.parent)


def test_lines_of_a_block(module) -> None:
    path = str(module.__file__)
    lines = Lines(frozenset({path}))
    with lines.recording() as executed:
        module.Counter(1, 5).add(2, [3])
    text = Path(path).read_text().splitlines()
    ran = {text[number - 1].strip().partition(" ")[0] for number in executed[path]}
    assert ran == {"self.low", "self.high", "if", "return"}
    with lines.recording() as executed:
        module.doubled(17)
    assert len(executed[path]) == 2, "the assertion and the return"


def test_every_mutant_of_a_module_is_valid_python() -> None:
    path = ROOT / "slm_core" / "context" / "ledger.py"
    source = path.read_text()
    for mutant in mutants_of(path, ROOT):
        assert package_of(mutant.path).name == "contexts (`slm_core.context`)"
        compile(mutated(source, mutant.path, mutant.index), mutant.path, "exec")


def test_packages_name_existing_files() -> None:
    for package in PACKAGES:
        assert all(list(ROOT.glob(pattern)) for pattern in package.files), package.name
        assert all(path.is_file() for path in (*package.suite_paths(), *package.unit_paths())), package.name


def test_the_table_counts_the_results(tmp_path) -> None:
    """Of four mutants of the ledger, the suite kills one, a unit test kills one, one survives, and one is pending."""
    path = ROOT / "slm_core" / "context" / "ledger.py"
    mutants = list(mutants_of(path, ROOT))[:5]
    known = {"package": "contexts (`slm_core.context`)", "source": digest_of_file(path)}
    ends = [
        ("killed", "suite", ["suite"]),
        ("killed", "unit", ["suite", "unit"]),
        ("survived", "unit", ["suite", "unit"]),
    ]
    ends += [("survived", "suite", ["suite"]), ("none", "suite", ["suite"])]
    lines = [
        json.dumps({"id": mutant.id, "verdict": verdict, "asked": asked, "reached_by": reached} | known)
        for mutant, (verdict, asked, reached) in zip(mutants, ends, strict=True)
    ]
    (tmp_path / "results").write_text("\n".join(lines))
    results = Results(tmp_path / "results")
    assert "| contexts (`slm_core.context`) | 4 | 4 | 1 (25.0 %) | 1 not asked yet | 2 |" in results.table(mutants)
    assert [results.was_asked(mutant, "suite") for mutant in mutants] == [True] * 5
    assert [results.was_asked(mutant, "unit") for mutant in mutants] == [True, True, True, False, True]
    (tmp_path / "results").write_text("\n".join(lines[:3]))
    assert "| 2 of 3 (66.7 %) | 1 |" in Results(tmp_path / "results").table(mutants)


def test_the_suite_is_asked_again_about_what_it_missed(tmp_path) -> None:
    """A result of the unit tests stands until the suite kills the mutant, or the file changes."""
    path = ROOT / "slm_core" / "context" / "ledger.py"
    mutants = list(mutants_of(path, ROOT))[:3]
    known = {"package": "contexts (`slm_core.context`)", "source": digest_of_file(path)}

    def line(i: int, verdict: str, asked: str, reached: list[str]) -> str:
        return json.dumps({"id": mutants[i].id, "verdict": verdict, "asked": asked, "reached_by": reached} | known)

    first = [line(0, "killed", "suite", ["suite"])]
    first += [line(i, "killed", "unit", ["suite", "unit"]) for i in (1, 2)]
    (tmp_path / "results").write_text("\n".join(first))
    results = Results(tmp_path / "results")
    assert [results.was_missed(mutant) for mutant in mutants] == [False, True, True]
    again = [line(1, "survived", "suite", ["suite"]), line(2, "killed", "suite", ["suite"])]
    (tmp_path / "results").write_text("\n".join(first + again))
    results = Results(tmp_path / "results")
    assert [results.was_missed(mutant) for mutant in mutants] == [False, True, False]
    assert "| 3 | 3 | 2 (66.7 %) | 3 of 3 (100.0 %) | 0 |" in results.table(mutants)
