"""``slm conformance --explain``: the script does what the scenario does, on sound backends and on broken ones."""

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


def test_a_script_holds_on_a_sound_backend(tmp_path) -> None:
    done = run(explain("TestCut::test_of_a_fork", TOY), tmp_path)
    assert (done.returncode, done.stdout) == (0, "holds\n"), done.stderr


def test_a_script_fails_as_the_scenario_does(tmp_path) -> None:
    mutant = next(mutant for mutant in all_mutants() if mutant.name == "CutUpwards")
    outcome = play(mutant.fixtures(), mutant.killed_by)
    assert outcome.verdict is Verdict.FAILS
    done = run(explain(mutant.killed_by, mutant.backend), tmp_path)
    assert done.returncode == 1
    assert outcome.reason in done.stderr


def test_what_is_declared_absent_is_said(tmp_path) -> None:
    done = run(explain("TestEmbeddings::test_pooled", PLAIN), tmp_path)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "declared absent"), done.stdout + done.stderr


@pytest.mark.parametrize("name", FIRST_OF_EACH_CLASS)
def test_a_script_defines_all_that_it_uses(name: str) -> None:
    tree = ast.parse(explain(name, TOY, device="cpu"))
    defined = set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                defined |= {alias.asname or alias.name for alias in aliases}
            case ast.FunctionDef(name=found) | ast.ClassDef(name=found) | ast.arg(arg=found):
                defined.add(found)
            case ast.Name(id=found, ctx=ast.Store()) | ast.ExceptHandler(name=str(found)):
                defined.add(found)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert used - defined == set()


def test_a_script_begins_with_what_the_scenario_proves() -> None:
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
def test_names_are_those_that_pytest_prints(name: str, scenario: str, model: str | None) -> None:
    assert (find(name).scenario, find(name).model) == (scenario, model)


@pytest.mark.parametrize("name", ["TestCut::test_of_a_fok", "TestCt::test_of_a_fork", "test_of_a_frok"])
def test_a_typo_gets_near_names(name: str) -> None:
    with pytest.raises(InvalidOption, match=r"did you mean .*TestCut::test_of_a_fork"):
        find(name)


def test_a_name_that_several_classes_have_gets_all_of_them() -> None:
    by_test: dict[str, list[str]] = {}
    for name in scenario_names():
        by_test.setdefault(name.partition("::")[2], []).append(name)
    test, names = next((test, names) for test, names in by_test.items() if len(names) > 1)
    with pytest.raises(InvalidOption, match=f"several scenarios are named {test!r} .*{' or '.join(names)}"):
        find(test)


def test_a_file_that_only_a_name_names_is_asked_for() -> None:
    with pytest.raises(InvalidOption, match="--model"):
        explain("TestCut::test_of_a_fork[my.gguf]", TOY)
