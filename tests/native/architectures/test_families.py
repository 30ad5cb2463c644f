"""Every family against two other engines on the same random weights: transformers by checkpoint, llama.cpp by file.

RWKV-7, which transformers has no class for, is compared with its reference implementation.
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
# llama.cpp looks GELU up in a table, half precision in and out: two relative errors of up to 2 ** -11 in each number,
# which average out over a feed-forward layer's width, in a few layers. It does so for exact GELU, too.
TABLE_BOUND = 2 * 2**-11
GELU = (Activation.GELU, Activation.GELU_TANH)
OPTIONS = exact(n_ctx=N_PREFILL + N_DECODE, n_batch=N_PREFILL)


class Expected(NamedTuple):
    """A family's file, what the other engines make of the tokens, by their names, and transformers' hidden states."""

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
    """What is recorded goes into docs/architectures.md, by tools/architectures_page.py."""
    with load(expected.path, tier).new_context(OPTIONS) as context:
        found = native_logits(context, tokens, [N_PREFILL] + [1] * N_DECODE)
        about = {"family": expected.family, "architecture": FAMILIES[expected.family].architecture}
        about |= {"edit level": context.edit_level.name, "note": note_of(expected.family)}
    for engine, rows in expected.rows.items():
        bound = TABLE_BOUND if engine == "llama.cpp" and uses_gelu(expected.path) else BOUND
        about[engine] = assert_close(found, rows, bound)
    for name, value in about.items():
        record_property(name, value)


def test_hidden_states_equal_those_of_transformers(expected, load, tokens, assert_close):
    if expected.states is None:
        assert "llama.cpp" in expected.rows, "whose hidden states tests/conformance/test_families.py compares"
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
    assert listed == sorted(FAMILIES | ENCODERS), "make it anew: see docs/architectures.md"


def test_a_replay_in_chunks_equals_llama_cpp_with_its_table_of_gelu(expected, load, tokens, assert_close, monkeypatch):
    if "llama.cpp" not in expected.rows:
        assert expected.rows, "no engine to compare with"
        return
    for activation in GELU:
        monkeypatch.setitem(reference._ACTIVATIONS, activation, gelu_by_table)
    with load(expected.path).new_context(OPTIONS) as context:
        native_logits(context, tokens, [N_PREFILL])
        context.truncate(Pos(0, 0))
        found = native_logits(context, tokens, [17] * 14 + [2])
    rows = expected.rows["llama.cpp"]
    if not uses_gelu(expected.path):
        assert_close(found, rows, BOUND)
        return
    # A number between two of the table's falls to one side here and to the other there, now and then: not in most rows.
    assert_close(found, rows, TABLE_BOUND)
    errors = np.linalg.norm(found - rows, axis=1) / np.linalg.norm(rows, axis=1)
    assert np.median(errors) <= BOUND, f"median error {np.median(errors):.1e}, with the same table"


def uses_gelu(path: Path) -> bool:
    with GgufFile.open(path) as file:
        return any(layer.activation in GELU for layer in read_spec(file).layers)


def gelu_by_table(x: Rows) -> Rows:
    """GELU as ggml computes it on CPUs: of numbers in half precision, to half precision, from -10 to 10."""
    rounded = x.astype(np.float16).astype(np.float32)
    inner = np.float32(0.79788456080286535588) * rounded * (1 + np.float32(0.044715) * rounded * rounded)
    table = (np.float32(0.5) * rounded * (1 + np.tanh(inner))).astype(np.float16).astype(np.float32)
    return np.where(x <= -10, np.float32(0), np.where(x >= 10, x, table))
