"""For which models llama.cpp can move keys: it rotates the keys of every layer, and scales them a second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from slm_conformance.oracle.families import family_model
from slm_core.gguf import GgufFile
from slm_llamacpp.shifts import moves_keys
from tests.llamacpp.models import changed_model


@pytest.mark.parametrize(
    ("metadata", "can_move"),
    [
        ({}, True),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}, True),
        ({"llama__rope__scaling__attn_factor": 1.0}, True),
        ({"llama__rope__scaling__attn_factor": 1.1}, False),  # LongRoPE: a magnitude
        ({"llama__rope__scaling__type": "yarn"}, False),  # YaRN: a magnitude, by default
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_log_multiplier": 1.0}, True),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_log_multiplier": 0.1}, False),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__yarn_log_multiplier": 1.0,
                "llama__rope__scaling__attn_factor": 0.5,
            },
            False,
        ),
        ({"llama__rope__scaling__yarn_log_multiplier": 0.1}, True),  # no YaRN
        ({"general__architecture": "smollm3"}, False),  # some layers are not rotated
        ({"general__architecture": "llama4"}, False),
        ({"general__architecture": "granite"}, True),
        ({"general__architecture": "granite", "granite__rope__scaling__finetuned": True}, True),
        ({"general__architecture": "granite", "granite__rope__scaling__finetuned": False}, False),
        ({"general__architecture": "granitemoe", "granitemoe__rope__scaling__finetuned": False}, False),
        ({"llama__rope__scaling__finetuned": False}, True),
    ],
)
def test_metadata_that_decide_whether_keys_can_be_moved(tmp_path: Path, metadata, can_move: bool) -> None:
    with GgufFile.open(changed_model(tmp_path / "m.gguf", **metadata)) as file:
        assert moves_keys(file) is can_move


def test_learned_positions_cannot_be_moved(tmp_path: Path) -> None:
    with GgufFile.open(family_model(tmp_path, "gpt2")) as file:
        assert not moves_keys(file)
