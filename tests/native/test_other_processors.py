"""Runs tests that compare two ways to decode, with the rounding of other processors.

AMX multiplies prompts in bf16 and single tokens in int8, so errors of prompts are smaller than errors of single tokens.
AVX2 multiplies both in int8. A test that relies on the rounding of one processor fails here, not on a user's machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slm_conformance import scenarios
from slm_native import _extension
from slm_native.kernels.select import ISA_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SUITE = "tests/conformance/test_native.py"
OTHER_TESTS = (
    "tests/cli/test_commands.py::test_score_is_the_perplexity_of_a_file",
    "tests/generation/test_snapshots.py::test_a_paused_answer_continues_in_another_backend",
    "tests/generation/test_speculation.py::test_a_loaded_model_can_draft_for_another",
)
CLASSES = (
    "TestDecode",
    "TestTruncate",
    "TestDumpRestore",
    "TestSession",
    "TestChat",
    "TestOracle",
    "TestConstraints",
    "TestCompletions",
    "TestSpeculation",
    "TestBeam",
)
SINGLE = (
    "test_against_the_reference",
    "test_greedy_is_the_largest_logit",
    "test_log_probabilities",
    "test_paused_anywhere",
    "test_penalty",
    "test_a_session_dump_goes_on",
)
WITHOUT_NUMBERS = (
    "on_an_error",
    "content",
    "another_process",
    "what_is_said_fits",
    "free_text",
    "may_not_follow",
    "limits",
)
QUANTIZED = f"qwen3-q8_0 and ({' or '.join((*CLASSES, *SINGLE))}) and not ({' or '.join(WITHOUT_NUMBERS)})"
OF_THE_DEMO_MODEL = ("test_a_transcript", "test_what_was_told_is_known")
OTHER_NAMES = " or ".join((*OF_THE_DEMO_MODEL, *(test.rpartition("::")[2] for test in OTHER_TESTS)))


def test_every_selected_scenario_exists() -> None:
    """``-k`` ignores names that match nothing. pytest itself refuses an unknown test of ``OTHER_TESTS``."""
    classes = {name for name in dir(scenarios) if name.startswith("Test")}
    names = {name for of in classes for name in dir(getattr(scenarios, of)) if name.startswith("test_")}
    assert set(CLASSES) <= classes
    assert names >= {*SINGLE, *OF_THE_DEMO_MODEL}
    assert [part for part in WITHOUT_NUMBERS if not any(part in name for name in names)] == []


@pytest.mark.timeout(900)  # 40 seconds of one core that is otherwise idle
@pytest.mark.parametrize("isa", ["amx_plain", "avx2"])
def test_no_test_relies_on_the_rounding_of_this_processor(isa: str) -> None:
    if (missing := _extension.why_missing()) is not None:
        pytest.skip(f"no other rounding is tested, as the C++ extension is missing: {missing}")
    if isa not in _extension.load().available_isas():
        pytest.skip(f"the rounding of {isa} is not tested: this machine cannot run it")
    if isa == _extension.load().available_isas()[-1]:
        pytest.skip(f"all tests run with the rounding of {isa} here")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    process = subprocess.run(
        [*command, SUITE, *OTHER_TESTS, "-k", f"({QUANTIZED}) or {OTHER_NAMES}"],
        cwd=ROOT,
        env={**os.environ, ISA_VARIABLE: isa},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=880,
    )
    assert process.returncode == 0, f"with {ISA_VARIABLE}={isa}:\n{process.stdout[-4000:]}"
