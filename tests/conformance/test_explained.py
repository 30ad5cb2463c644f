"""``slm conformance --explain``: the script behaves like the scenario, on correct and on broken backends."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys

import pytest

from slm_conformance import explain
from slm_conformance.mutants.matrix import all_mutants
from slm_conformance.suite.explained import find
from slm_conformance.suite.meta import Verdict, play, scenario_names
from slm_core.errors import InvalidOption

TOY = "slm_conformance.toy:ToyBackend"
PLAIN = "slm_conformance.toy:PlainToyBackend"
FIRST_OF_EACH_CLASS = list({name.partition("::")[0]: name for name in reversed(scenario_names())}.values())


def run(script: str, tmp_path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_script_passes_on_a_correct_backend(tmp_path) -> None:
    done = run(explain("TestCut::test_of_a_fork", TOY), tmp_path)
    assert (done.returncode, done.stdout) == (0, "holds\n"), done.stderr


def test_a_script_fails_like_the_scenario(tmp_path) -> None:
    mutant = next(mutant for mutant in all_mutants() if mutant.name == "CutUpwards")
    outcome = play(mutant.fixtures(), mutant.killed_by)
    assert outcome.verdict is Verdict.FAILS
    done = run(explain(mutant.killed_by, mutant.backend), tmp_path)
    assert done.returncode == 1
    assert outcome.reason in done.stderr


def test_a_script_reports_declared_absence(tmp_path) -> None:
    done = run(explain("TestEmbeddings::test_pooled", PLAIN), tmp_path)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "declared absent"), done.stdout + done.stderr


@pytest.mark.parametrize("name", FIRST_OF_EACH_CLASS)
def test_a_script_defines_all_names_that_it_uses(name: str) -> None:
    tree = ast.parse(explain(name, TOY, device="cpu"))
    defined = set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                defined |= {alias.asname or alias.name for alias in aliases}
            case ast.FunctionDef(name=identifier) | ast.ClassDef(name=identifier) | ast.arg(arg=identifier):
                defined.add(identifier)
            case ast.Name(id=identifier, ctx=ast.Store()) | ast.ExceptHandler(name=str(identifier)):
                defined.add(identifier)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert used - defined == set()


def test_a_script_begins_with_the_docstring_of_the_scenario() -> None:
    text = re.sub(r"\n# ", " ", explain("TestCut::test_of_a_span", TOY))
    assert text.startswith("# TestCut::test_of_a_span. Clause 4: a cut at the head, a cut in the middle")
    assert "Where to look: the rotation of keys that move" in text


@pytest.mark.parametrize(
    ("name", "scenario", "model"),
    [
        ("TestCut::test_of_a_fork", "TestCut::test_of_a_fork", None),
        ("TestCut::test_of_a_fork[demo]", "TestCut::test_of_a_fork", "demo"),
        ("tests/test_mine.py::TestChat::test_edit[llama-f32+phi3]", "TestChat::test_edit", "llama-f32+phi3"),
        ("test_of_a_fork", "TestCut::test_of_a_fork", None),
    ],
)
def test_names_printed_by_pytest_are_accepted(name: str, scenario: str, model: str | None) -> None:
    assert (find(name).scenario, find(name).model) == (scenario, model)


@pytest.mark.parametrize("name", ["TestCut::test_of_a_fok", "TestCt::test_of_a_fork", "test_of_a_frok"])
def test_an_unknown_name_lists_similar_names(name: str) -> None:
    with pytest.raises(InvalidOption, match=r"did you mean .*TestCut::test_of_a_fork"):
        find(name)


def test_an_ambiguous_name_lists_all_scenarios() -> None:
    by_test: dict[str, list[str]] = {}
    for name in scenario_names():
        by_test.setdefault(name.partition("::")[2], []).append(name)
    test, names = next((test, names) for test, names in by_test.items() if len(names) > 1)
    with pytest.raises(InvalidOption, match=f"several scenarios are named {test!r} .*{' or '.join(names)}"):
        find(test)


def test_a_model_file_in_a_name_must_be_passed() -> None:
    with pytest.raises(InvalidOption, match="--model"):
        explain("TestCut::test_of_a_fork[my.gguf]", TOY)
