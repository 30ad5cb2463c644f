"""Keys and values in 8 bits; the oracle is the native engine, with float32 and with floats of 8 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_conformance.suite.tolerance import relative_errors
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidSnapshot
from slm_core.types import ContextOptions, KvType, ModelOptions, Pos
from slm_native.backend import NativeBackend

SIZES = ContextOptions(n_ctx=256, n_seq_max=3, kv_type_k=KvType.Q8_0, kv_type_v=KvType.Q8_0)
EXACT = ContextOptions(n_ctx=256, n_seq_max=3)
F8 = ContextOptions(n_ctx=256, n_seq_max=3, kv_type_k=KvType.F8_E4M3, kv_type_v=KvType.F8_E4M3)
SHARE = 0.25
"""Of the error of native's f8_e4m3. That rounds a value by 2^-4 / sqrt(3) / 1.4 = 2.6e-2 of itself, root mean square;
a code is off by 1 / 127 / sqrt(12) = 2.3e-3 of the largest of a head's 16 values, which is 1.8 times their root mean
square: 4e-3 of that, 0.16 times as much."""


def told(context, feed, tokens):
    """Logits of prompts, chunks and single tokens, behind cuts of a sequence and its fork, and of what was restored."""
    found = [feed(context, tokens[:60]), feed(context, tokens[60:61]), feed(context, tokens[61:80])]
    context.fork(0, 1, 70)
    for seq_id in (0, 1):
        context.cut(Pos(seq_id, 20), Pos(seq_id, 30))
    found += [feed(context, tokens[80:90], seq_id) for seq_id in (0, 1)]
    context.cut(Pos(0, 1), Pos(0, 4))
    context.restore(2, context.dump(0))
    context.drop(0)
    return [*found, *(feed(context, tokens[90:100], seq_id) for seq_id in (1, 2))]


@pytest.fixture
def native(tmp_path, feed, random_tokens):
    def rows(family, sizes):
        with NativeBackend().load(
            family_model(tmp_path, family), ModelOptions(backend_options={"tier": "reference"})
        ) as model:
            return np.concatenate(told(model.new_context(sizes), feed, random_tokens(100)))

    return rows


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "bloom", "mistral3", "phi3_long"])
def test_every_kind_of_attention_is_near_float32(tmp_path, load, feed, random_tokens, native, family) -> None:
    found = np.concatenate(told(load(family_model(tmp_path, family)).new_context(SIZES), feed, random_tokens(100)))
    ours, theirs = (relative_errors(rows, native(family, EXACT)) for rows in (found, native(family, F8)))
    assert 0 < ours.mean() < SHARE * theirs.mean(), f"mean {ours.mean():.1e}, that of 3 bits is {theirs.mean():.1e}"
    assert ours.max() < SHARE * theirs.max(), f"at most {ours.max():.1e}, that of 3 bits is {theirs.max():.1e}"


def test_padded_batches_give_the_same(tmp_path, load, feed, random_tokens) -> None:
    path, tokens = family_model(tmp_path, "qwen3"), random_tokens(100)
    exact, fixed = (told(load(path, buckets=given).new_context(SIZES), feed, tokens) for given in (False, True))
    for ours, wanted in zip(fixed, exact, strict=True):
        assert relative_errors(ours, wanted).max() < 2e-3  # a code may be another where a sum is, in its last bit


def test_a_cache_takes_less_than_a_third(tmp_path, load, feed, random_tokens) -> None:
    model, sizes = load(family_model(tmp_path, "qwen3")), []
    for options in (EXACT, SIZES):
        context = model.new_context(options)
        feed(context, random_tokens(100))
        sizes.append(len(SequenceSnapshot.from_bytes(context.dump(0)).payload))
    assert sizes[1] < sizes[0] / 3  # (16 + 4) / 64 of heads of 16 values, 132 / 512 of those of 128


def test_cells_that_are_compacted_stay_what_they_are(tmp_path, load, feed, random_tokens) -> None:
    """Codes that are made of what codes stand for are the same codes: what is moved often is rounded once."""
    tight, roomy = (
        load(family_model(tmp_path, "qwen3")).new_context(ContextOptions(n, 3, 64, KvType.Q8_0, KvType.Q8_0))
        for n in (64, 999)
    )
    for context in (tight, roomy):
        feed(context, random_tokens(20), 1)
        feed(context, random_tokens(20))
    for _ in range(12):
        for context in (tight, roomy):
            context.drop(2)
            rows = feed(context, random_tokens(20), 2)
    held = [np.frombuffer(SequenceSnapshot.from_bytes(c.dump(0)).payload[4:], np.int8) for c in (tight, roomy)]
    assert tight._cells.n_used <= 64 < roomy._cells.n_cells
    assert np.abs(held[0].astype(int) - held[1]).max() <= 1
    assert rows.shape[0] == 20


def test_damaged_and_foreign_payloads_are_refused_or_replayed(tmp_path, load, feed, random_tokens) -> None:
    model, tokens = load(family_model(tmp_path, "qwen3")), random_tokens(50)
    kept, exact = model.new_context(SIZES), model.new_context(EXACT)
    feed(kept, tokens)
    snapshot = SequenceSnapshot.from_bytes(kept.dump(0))
    exact.restore(0, kept.dump(0))  # of another KV type: tokens are decoded again
    wanted = feed(model.new_context(EXACT), tokens)[-1:]
    exact.truncate(Pos(0, 49))
    assert relative_errors(feed(exact, tokens[49:]), wanted).max() < 1e-4
    for payload in (snapshot.payload[:-4], snapshot.payload[:-4] + np.float32(np.nan).tobytes()):
        with pytest.raises(InvalidSnapshot, match="KV payload"):
            kept.restore(1, replace(snapshot, payload=payload).to_bytes())
    assert kept.length(1) == 0
