"""Every family against two other engines with the same random weights: transformers and llama.cpp.

RWKV-7 has no class in transformers and is compared with its reference implementation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from native.architectures.cases import CASES
from native.architectures.engines import (
    N_DECODE,
    N_PREFILL,
    Rows,
    make_subject,
    native_logits,
    transformers_logits,
    transformers_states,
)
from native.architectures.rwkv7 import reference_logits, reference_tensors
from native.exact import exact
from slm_conformance.oracle.family_table import ENCODERS, FAMILIES
from slm_core.architectures import Activation, architecture_names, read_spec
from slm_core.gguf import GgufFile
from slm_core.types import Pos
from slm_native.kernels import reference

BOUND = 1e-4  # clause 9 of the contract: float32, relative
# llama.cpp computes GELU by a table with half-precision inputs and outputs, exact GELU, too: two relative errors of up
# to 2 ** -11 per number. They average out over the width of a feed-forward layer, and there are only a few layers.
TABLE_BOUND = 2 * 2**-11
GELU = (Activation.GELU, Activation.GELU_TANH)
OPTIONS = exact(n_ctx=N_PREFILL + N_DECODE, n_batch=N_PREFILL)


class Expected(NamedTuple):
    """A family's file, the logits of other engines by their names, and the hidden states of transformers."""

    family: str
    path: Path
    rows: dict[str, Rows]
    states: Rows | None


@pytest.fixture(scope="module")
def tokens(random_tokens) -> list[int]:
    return random_tokens(N_PREFILL + N_DECODE)


@pytest.fixture(scope="module", params=FAMILIES)
def expected(request, tmp_path_factory, tokens, llama_cpp_logits) -> Expected:
    family = request.param
    folder = tmp_path_factory.mktemp("family")
    subject, rows, states = make_subject(folder, family), {}, None
    if subject.model is not None:
        rows["transformers"] = transformers_logits(subject.model, tokens)
        states = transformers_states(subject.model, tokens)
    if subject.model is None or CASES[family].llama_cpp:
        rows["llama.cpp"] = llama_cpp_logits(subject.path, tokens)
    if family == "rwkv7":
        rows["the rwkv package"] = reference_logits(folder, reference_tensors(subject.path), tokens)
    return Expected(family, subject.path, rows, states)


def test_every_architecture_has_a_family_and_every_family_a_case():
    assert {family.architecture for family in (FAMILIES | ENCODERS).values()} == set(architecture_names())
    assert FAMILIES.keys() == CASES.keys()


def test_prefill_and_decode_equal_the_other_engines(expected, tier, load, tokens, assert_close, record_property):
    """tools/architectures_page.py writes the recorded properties to docs/architectures.md."""
    with load(expected.path, tier).new_context(OPTIONS) as context:
        actual = native_logits(context, tokens, [N_PREFILL] + [1] * N_DECODE)
        about = {"family": expected.family, "architecture": FAMILIES[expected.family].architecture}
        about |= {"edit level": context.edit_level.name, "note": note_of(expected.family)}
    for engine, rows in expected.rows.items():
        bound = TABLE_BOUND if engine == "llama.cpp" and uses_gelu(expected.path) else BOUND
        about[engine] = assert_close(actual, rows, bound)
    for name, value in about.items():
        record_property(name, value)


def test_hidden_states_equal_transformers(expected, load, tokens, assert_close):
    if expected.states is None:
        assert "llama.cpp" in expected.rows, "tests/conformance/test_families.py compares its hidden states"
        return
    with load(expected.path).new_context(OPTIONS) as context:
        batch, rows = context.new_batch(), []
        for start in range(0, len(tokens), N_PREFILL):
            batch.clear()
            batch.extend(tokens[start : start + N_PREFILL], Pos(0, start), logits="all")
            rows.append(context.embed(batch).copy())
    assert_close(np.concatenate(rows), expected.states, BOUND)


def note_of(family: str) -> str:
    case = CASES[family]
    return case if isinstance(case, str) else case.note


def test_the_page_lists_every_family():
    page = (Path(__file__).parents[3] / "docs" / "architectures.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert listed == sorted(FAMILIES | ENCODERS), "generate the page again: see docs/architectures.md"


def test_replay_in_chunks_equals_llama_cpp_with_its_gelu_table(expected, load, tokens, assert_close, monkeypatch):
    if "llama.cpp" not in expected.rows:
        assert expected.rows, "no engine to compare with"
        return
    for activation in GELU:
        monkeypatch.setitem(reference._ACTIVATIONS, activation, gelu_by_table)
    with load(expected.path).new_context(OPTIONS) as context:
        native_logits(context, tokens, [N_PREFILL])
        context.truncate(Pos(0, 0))
        actual = native_logits(context, tokens, [17] * 11 + [13])
    rows = expected.rows["llama.cpp"]
    if not uses_gelu(expected.path):
        assert_close(actual, rows, BOUND)
        return
    # Rounding sometimes selects a neighbouring entry of the table in one engine, but not in most rows.
    assert_close(actual, rows, TABLE_BOUND)
    errors = np.linalg.norm(actual - rows, axis=1) / np.linalg.norm(rows, axis=1)
    assert np.median(errors) <= BOUND, f"median error {np.median(errors):.1e}, with the same table of GELU"


def uses_gelu(path: Path) -> bool:
    with GgufFile.open(path) as file:
        return any(layer.activation in GELU for layer in read_spec(file).layers)


def gelu_by_table(x: Rows) -> Rows:
    """GELU as ggml computes it on CPUs: from -10 to 10, with inputs and outputs in half precision."""
    rounded = x.astype(np.float16).astype(np.float32)
    inner = np.float32(0.79788456080286535588) * rounded * (1 + np.float32(0.044715) * rounded * rounded)
    table = (np.float32(0.5) * rounded * (1 + np.tanh(inner))).astype(np.float16).astype(np.float32)
    return np.where(x <= -10, np.float32(0), np.where(x >= 10, x, table))
