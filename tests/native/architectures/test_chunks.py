"""Chunked attention and attention temperatures of Llama 4, with limits of 64 and 48 positions instead of 8192."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from native.architectures.cases import CASES
from native.architectures.engines import make_subject, native_logits, transformers_logits
from native.exact import exact
from slm_core.architectures import llama4
from slm_core.types import Pos

CHUNK, LENGTH = 64, 48


@pytest.fixture
def subject(tmp_path, monkeypatch):
    case = CASES["llama4"]
    settings = {**case.settings, "attention_chunk_size": CHUNK, "floor_scale": LENGTH, "attn_scale": 0.3}
    monkeypatch.setitem(CASES, "llama4", replace(case, settings=settings))
    monkeypatch.setattr(llama4, "CHUNK", CHUNK)
    monkeypatch.setattr(llama4, "TEMPERATURE_LENGTH", LENGTH)
    monkeypatch.setattr(llama4, "TEMPERATURE_SCALE", 0.3)
    return make_subject(tmp_path, "llama4")


@pytest.mark.parametrize("sizes", [[200, *[1] * 40], [17] * 14 + [2], [64, 128, 48], [240]])
def test_attention_chunks_equal_transformers_for_any_batch_sizes(
    subject, sizes, tier, load, random_tokens, assert_close
):
    tokens = random_tokens(240)
    with load(subject.path, tier).new_context(exact(n_ctx=240, n_batch=240)) as context:
        actual = native_logits(context, tokens, sizes)
    assert_close(actual, transformers_logits(subject.model, tokens), 1e-4)


def test_each_sequence_of_a_batch_has_its_own_attention_chunks(subject, tier, load, random_tokens, assert_close):
    first, second = random_tokens(150), random_tokens(100, seed=5)
    with load(subject.path, tier).new_context(exact(n_ctx=512, n_batch=512, n_seq_max=2)) as context:
        batch = context.new_batch()
        for i in range(0, 150, 10):  # interleaved tokens
            batch.extend(first[i : i + 10], Pos(0, i), logits="all")
            batch.extend(second[i : i + 10], Pos(1, i), logits="all")
        rows = context.decode(batch).copy()
        is_second = np.array([i // 10 % 2 == 1 for i in range(200)] + [False] * 50)
    assert_close(rows[~is_second], transformers_logits(subject.model, first), 1e-4)
    assert_close(rows[is_second], transformers_logits(subject.model, second), 1e-4)
