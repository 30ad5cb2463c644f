"""Tests that compare two ways to decode, run again with the rounding of other processors.

On AMX, prompts are multiplied in bf16 and single tokens in int8, so a prompt's errors are smaller than a single
token's; with AVX2 both are in int8. A test that relies on the rounding of one processor fails here, not on a user's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slm_native import _extension
from slm_native.kernels.select import ISA_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "tests/conformance/test_native.py",
    "tests/cli/test_commands.py",
    "tests/generation/test_snapshots.py",
    "tests/generation/test_speculation.py",
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
ELSEWHERE = "transcript or told_is_known or perplexity or loaded_model_drafts or goes_on_in_another_backend"


@pytest.mark.timeout(900)  # 40 seconds of one core, which may be busy with more than this
@pytest.mark.parametrize("isa", ["amx_plain", "avx2"])
def test_nothing_relies_on_the_rounding_of_this_processor(isa: str) -> None:
    if (missing := _extension.why_missing()) is not None:
        pytest.skip(f"no other rounding is tested, as the C++ extension is missing: {missing}")
    if isa not in _extension.load().available_isas():
        pytest.skip(f"the rounding of {isa} is not tested: this machine cannot run it")
    if isa == _extension.load().available_isas()[-1]:
        pytest.skip(f"all tests run with the rounding of {isa} here")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *MODULES, "-k", f"({QUANTIZED}) or {ELSEWHERE}"],
        cwd=ROOT,
        env={**os.environ, ISA_VARIABLE: isa},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=880,
    )
    assert done.returncode == 0, f"with {ISA_VARIABLE}={isa}:\n{done.stdout[-4000:]}"
