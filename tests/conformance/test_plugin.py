"""The pytest plugin: adoption of the suite, its messages, and the errors of adopters that it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slm_conformance
from slm_conformance.fixtures import BackendFixtures
from slm_conformance.mutants.matrix import all_mutants
from slm_conformance.suite import collection, scenarios
from slm_conformance.suite.meta import Outcome, Verdict, play, scenario_names
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.spec import make_backend
from slm_conformance.suite.workshop import Workshop
from slm_core.errors import BackendUnavailable, UnknownBackend
from slm_core.isolation import IsolatedBackend
from slm_core.types import BackendStatus

pytest_plugins = ["pytester"]

# pytester forgets modules that are imported in its runs, and mutants of modules that are imported again register twice.
MUTANTS = all_mutants()

PLUGIN = ("--disable-plugin-autoload", "-p", "slm_conformance.pytest_plugin")
"""Each run of pytester would import other plugins again."""

ADOPTION = """
from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *

class Fixtures(BackendFixtures):
    backend = "slm_conformance.toy:ToyBackend"
    models = ("llama-f32",)
    kv_types = ("f32",)
"""


@pytest.fixture
def adopt(pytester: pytest.Pytester):
    """A function that runs pytest on a module that adopts the suite."""

    def run(source: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(test_adopted=source)
        return pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", "-ra", *args)

    return run


def outcomes(result: pytest.RunResult) -> dict[str, int]:
    """Numbers of passed, failed, ... tests, without deselected tests."""
    return {kind: n for kind, n in result.parseoutcomes().items() if kind not in ("deselected", "warnings")}


def test_a_module_of_a_few_lines_adopts_the_suite(adopt):
    result = adopt(ADOPTION, "-k", "TestDeclarations or test_at_zero")
    assert outcomes(result) == {"passed": 5}
    result.stdout.fnmatch_lines(
        [
            "slm-conformance: toy 1, devices cpu",
            "slm-conformance: * llama-f32: toy on cpu, edit level CUT, declares adapters, attention_bias,"
            " bidirectional_blocks, device_sampling, embedding_input, embeddings, kv_payload, layer_states,"
            " shared_fork",
        ]
    )


def test_a_backend_that_nobody_registers_is_one_line(adopt):
    result = adopt(ADOPTION.replace("slm_conformance.toy:ToyBackend", "lama"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: the backend of test_adopted: unknown backend 'lama' (registered: *"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_what_is_declared_absent_is_skipped_and_named(adopt):
    result = adopt(ADOPTION + "    load_options = {'edit_level': 'replay'}\n", "-k", "TestCut")
    assert outcomes(result) == {"skipped": len(collection.tests_of(scenarios.TestCut))}
    result.stdout.fnmatch_lines(["SKIPPED*declared absent: the edit level is REPLAY, this needs CUT"])


def test_omitting_scenarios_is_refused(adopt):
    result = adopt(ADOPTION + "del TestCut\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_adopted leaves out TestCut: import all of slm_conformance.scenarios;*"])


def test_replacing_a_scenario_is_refused(adopt):
    source = "\nclass TestCut(TestCut):\n    def test_of_a_span(self, bench):\n        pass\n"
    result = adopt(ADOPTION + source)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_adopted replaces TestCut::test_of_a_span: put it into expected_failures*"])


def test_empty_subclasses_adopt_as_well(adopt):
    result = adopt(ADOPTION + "\nclass TestCut(TestCut):\n    pass\n", "-k", "test_of_a_span")
    assert outcomes(result) == {"passed": 1}


BROKEN = ADOPTION.replace("toy:ToyBackend", "mutants.edits:TruncateClamps")


@pytest.mark.parametrize("name", ["TestTruncate::test_past_the_end", "TestTruncate::test_past_the_end[llama-f32]"])
def test_an_expected_failure_is_named(adopt, name):
    result = adopt(BROKEN + f"    expected_failures = {{'{name}': 'it clamps'}}\n", "-k", "TestTruncate and past")
    assert outcomes(result) == {"xfailed": 1}
    result.stdout.fnmatch_lines(["XFAIL*test_past_the_end*it clamps*"])


def test_a_stale_expected_failure_fails(adopt):
    source = "    expected_failures = {'TestTruncate::test_past_the_end': 'it clamps'}\n"
    result = adopt(ADOPTION + source, "-k", "TestTruncate and past")
    assert outcomes(result) == {"failed": 1}


def test_an_expected_failure_of_an_unknown_scenario_is_refused(adopt):
    result = adopt(ADOPTION + "    expected_failures = {'TestTruncate::test_nothing': 'it clamps'}\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*expects TestTruncate::test_nothing to fail, but there is no such scenario*"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from slm_conformance.scenarios import *\n", "exactly one subclass of BackendFixtures (found: none)"),
        (ADOPTION + "\nclass Other(BackendFixtures):\n    pass\n", "(found: Fixtures, Other)"),
        (ADOPTION.replace('    backend = "slm_conformance.toy:ToyBackend"\n', ""), "no backend is named"),
    ],
)
def test_a_module_without_one_backend_is_refused(adopt, source, message):
    result = adopt(source, "--maxfail", "1")
    assert result.ret != pytest.ExitCode.OK
    assert message in result.stdout.str() + result.stderr.str()


def test_the_command_line_names_backend_and_model(adopt, pytester):
    model = make_tiny(pytester.path)
    source = ADOPTION[: ADOPTION.index("    backend")] + "    kv_types = ('f32',)\n"
    options = ("--slm-backend", "slm_conformance.toy:ToyBackend", "--slm-model", str(model), "--slm-device", "cpu")
    result = adopt(source, *options, "-v", "-k", "test_at_zero")
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(["*test_at_zero?tiny-qwen2-q8_0-0.gguf? PASSED*"])


def make_tiny(directory):
    from slm_conformance.oracle.factories import tiny_model

    return tiny_model(directory, "qwen2", "q8_0")


class AbsentBackend:
    """A backend whose engine is not installed."""

    name = "absent"

    def status(self) -> BackendStatus:
        return BackendStatus("absent", installed=False, reason="no engine", hint="pip install engine")


class ChoosyBackend(make_backend("slm_conformance.toy:ToyBackend").__class__):
    """A backend that supports no model of the suite."""

    def supports(self, source, device="auto"):
        support = super().supports(source, device)
        return support.__class__(supported=False, reason="only models of 7 layers")


def test_the_command_line_isolates_models(adopt):
    source = ADOPTION[: ADOPTION.index("    backend")] + "    models = ('llama-f32',)\n    kv_types = ('f32',)\n"
    options = ("--slm-backend", "slm_conformance.toy:ToyBackend", "--slm-isolated", "-k", "TestClose and of_the_model")
    assert outcomes(adopt(source, *options)) == {"passed": 1}
    assert isinstance(make_backend("native", isolated=True), IsolatedBackend)


def test_a_backend_that_is_not_installed_is_skipped_with_a_message(adopt, monkeypatch):
    monkeypatch.setattr("slm_conformance.toy.ToyBackend", AbsentBackend)
    result = adopt(ADOPTION, "-k", "TestTruncate")
    assert outcomes(result) == {"skipped": len(collection.tests_of(scenarios.TestTruncate))}
    result.stdout.fnmatch_lines(["slm-conformance: backend 'absent' is not installed: no engine"])


def test_a_required_backend_that_is_not_installed_fails_the_run(adopt, monkeypatch):
    monkeypatch.setattr("slm_conformance.toy.ToyBackend", AbsentBackend)
    result = adopt(ADOPTION + "    required = True\n", "-k", "TestTruncate")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*backend 'absent' is not installed: no engine*"])


def test_a_backend_that_runs_no_model_is_refused(adopt, monkeypatch):
    monkeypatch.setattr("slm_conformance.toy.ToyBackend", ChoosyBackend)
    result = adopt(ADOPTION.replace('    models = ("llama-f32",)\n', ""), "-k", "TestTruncate")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*runs none of the suite's models: only models of 7 layers*"])


def test_a_run_of_pytest_without_scenarios_imports_nothing_heavy():
    code = "import slm_conformance.pytest_plugin, sys; print(*{'numpy', 'slm_core', 'pluggy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pluggy"]  # a dependency of pytest


def test_run_needs_no_file():
    toy = "slm_conformance.toy:ToyBackend"
    assert slm_conformance.run(toy, extra_args=["-q", "-k", "test_at_zero and llama"]) == 0
    broken = "slm_conformance.mutants.edits:TruncateOffByOne"
    assert slm_conformance.run(broken, extra_args=["-q", "-k", "test_at_zero and llama"]) == 1


@pytest.mark.parametrize("spec", ["no_such_backend", "no.such:module", "slm_conformance.toy:NoSuchBackend"])
def test_run_refuses_an_unknown_backend(spec):
    with pytest.raises(UnknownBackend):
        slm_conformance.run(spec)


def test_run_refuses_a_backend_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("slm_conformance.toy.ToyBackend", AbsentBackend)
    with pytest.raises(BackendUnavailable, match=r"no engine \(to get it: pip install engine\)"):
        slm_conformance.run("slm_conformance.toy:ToyBackend")


CLAUSE = re.compile(
    r"(Clauses? \d[\d, andto]*|Backend|Model|Vocab|Context|Batch|Session|Chat|Oracle|Sampling|Constraint|Generation"
    r"): .*\.",
    re.DOTALL,
)


def test_every_scenario_names_its_clause():
    texts = {
        name: getattr(getattr(scenarios, name.split("::")[0]), name.split("::")[1]).__doc__ for name in scenario_names()
    }
    assert [name for name, text in texts.items() if not text or not CLAUSE.fullmatch(text.strip())] == []


def test_mutants_have_unique_names_and_existing_scenarios():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 300
    assert {mutant.killed_by for mutant in MUTANTS} <= set(scenario_names())


def test_a_scenario_can_be_run_without_pytest():
    class Truncating(BackendFixtures):
        backend = "slm_conformance.toy:ToyBackend"
        models = ("llama-f32",)
        kv_types = ("f32",)
        load_options = {"edit_level": "truncate"}  # noqa: RUF012

    assert play(Truncating(), "TestTruncate::test_at_zero") == Outcome(Verdict.HOLDS)
    absent = play(Truncating(), "TestCut::test_of_a_span")
    assert absent == Outcome(Verdict.ABSENT, "declared absent: the edit level is TRUNCATE, this needs CUT")


THREE = ("llama-f32", "qwen3-f32", "demo")


class OnTheContract(Scenarios):
    on_one_model = ("test_once",)


class AboveIt(Scenarios):
    above_contract = True
    families = ("phi3", "zephyr")


def models_of(scenarios: type[Scenarios], name: str, above: str = "in turn") -> tuple[str, ...]:
    """The models of a scenario if the adopter names three models."""
    adopted = type("Adopted", (BackendFixtures,), {"backend": "toy", "models": THREE, "above_contract": above})
    chosen: list[tuple[str, ...]] = []
    metafunc: Any = SimpleNamespace(
        config=SimpleNamespace(getoption=lambda name: None),
        module=SimpleNamespace(Fixtures=adopted),
        function=SimpleNamespace(__name__=name),
        parametrize=lambda name, values, **_: chosen.append(values),
    )
    scenarios().pytest_generate_tests(metafunc)
    return chosen[0]


def test_a_scenario_independent_of_the_model_runs_on_the_first():
    assert models_of(OnTheContract, "test_each") == THREE
    assert models_of(OnTheContract, "test_once") == ("llama-f32",)


def test_scenarios_above_the_contract_take_models_and_formats_in_turn():
    names = [f"test_{i}" for i in range(100)]
    turns = [models_of(AboveIt, name) for name in names]
    assert [models_of(AboveIt, name) for name in names] == turns, "the choice is the same in each run"
    assert {turn[0] for turn in turns} == set(THREE)
    assert {turn[1:] for turn in turns} == {("llama-f32+phi3",), ("llama-f32+zephyr",)}
    assert models_of(AboveIt, "test_0", "each model") == (*THREE, "llama-f32+phi3", "llama-f32+zephyr")


def test_scenarios_above_the_contract_are_omitted_with_elsewhere(adopt):
    result = adopt(ADOPTION + "    above_contract = 'elsewhere'\n", "--collect-only", "-q")
    assert "::TestCut::" in result.stdout.str()
    left_out = [name for name in scenarios.__all__ if getattr(scenarios, name).above_contract]
    assert {"TestSession", "TestBeam", "TestTools"} < set(left_out)
    assert not [name for name in left_out if f"::{name}::" in result.stdout.str()]


def test_an_adopter_can_reduce_the_number_of_random_examples():
    class Slow(BackendFixtures):
        backend = "slm_conformance.toy:ToyBackend"
        volume = 0.2

    workshop = Workshop(Slow(), Path())
    assert [workshop.share(usual) for usual in (3_000, 20, 4, 1)] == [600, 4, 1, 1]
