"""Sliding windows: cells that left the window must stay, although llama.cpp would reuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slm_core.errors import DecodeFailed
from slm_core.protocols import BackendModel, Context
from slm_core.types import Capability, EditLevel, Pos
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.feeding import error, feed, new_context, some_tokens
from tests.llamacpp.models import windowed_model
from tests.llamacpp.test_failures import patch_api, restore_api

pytestmark = pytest.mark.usefixtures("no_rebuild")

WINDOW = 8
TOLERANCE = 1e-2  # clause 9 for 16 bit: llama.cpp computes Gemma's GELU by a table in f16


@pytest.fixture
def model(load: LoadModel, tmp_path: Path) -> BackendModel:
    return load(windowed_model(tmp_path / "gemma2.gguf", WINDOW))


@pytest.fixture
def context(model: BackendModel) -> Context:
    return new_context(model)


def test_declared_edit_level_and_capabilities(context: Context) -> None:
    assert context.edit_level is EditLevel.TRUNCATE
    assert Capability.KV_PAYLOAD not in context.capabilities, "llama.cpp's state omits cells that left the window"


def test_truncate_beyond_the_window_and_replay(context: Context) -> None:
    tokens = some_tokens(60)
    rows = feed(context, tokens)
    context.truncate(Pos(0, 20))
    assert error(feed(context, tokens[20:]), rows[20:]) <= TOLERANCE


def test_other_sequences_do_not_take_cells_that_left_the_window(context: Context) -> None:
    # Cells 0 to 99 of llama.cpp's 256 are freed: its search for cells starts there and reaches those of sequence 1.
    tokens = some_tokens(100, seed=1)
    feed(context, some_tokens(100))
    rows = feed(context, tokens, 1)
    context.drop(0)
    feed(context, some_tokens(150, seed=2), 2)
    context.truncate(Pos(1, 52))  # unprotected, positions from 50 on would be left; the window starts at 44
    assert error(feed(context, tokens[52:60], 1), rows[52:60]) <= TOLERANCE
    context.truncate(Pos(1, 30))
    assert error(feed(context, tokens[30:36], 1), rows[30:36]) <= TOLERANCE


def test_forks_share_and_diverge(context: Context) -> None:
    tokens = some_tokens(40)
    rows = feed(context, tokens)
    context.fork(0, 1, 25)
    assert context.n_free == 256 - 40
    feed(context, some_tokens(30, seed=1), 1)
    context.truncate(Pos(0, 10))
    assert error(feed(context, tokens[10:], 0), rows[10:]) <= TOLERANCE
    context.drop(0)
    context.truncate(Pos(1, 25))
    assert error(feed(context, tokens[25:], 1), rows[25:]) <= TOLERANCE


def test_a_failed_decode_is_undone_without_decoding_again(context: Any) -> None:
    tokens = some_tokens(40)
    rows = feed(context, tokens)
    context.truncate(Pos(0, 30))

    def decode_and_fail(pointer: int, llama_batch: Any) -> int:
        return api.llama_decode(pointer, llama_batch) or 2

    api = patch_api(context, llama_decode=decode_and_fail)
    with pytest.raises(DecodeFailed, match="aborted"):
        feed(context, [1, 2, 3])
    restore_api(context, api)
    assert error(feed(context, tokens[30:]), rows[30:]) <= TOLERANCE


def test_a_dump_replays(context: Context) -> None:
    feed(context, some_tokens(40))
    context.restore(2, context.dump(0))
    assert error(feed(context, [5], 2), feed(context, [5])) <= TOLERANCE


def test_every_sequence_has_a_twin_sequence(model: BackendModel) -> None:
    context = new_context(model, n_seq_max=128)
    assert feed(context, [1], 127).shape == (1, model.vocab.size)
