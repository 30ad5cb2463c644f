"""A KV cache in 8 bits; the oracle is the native engine with float32 and with f8_e4m3."""

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
"""The bound, relative to the error of the native engine with f8_e4m3. f8_e4m3 rounds a value by 2^-4 / sqrt(3) / 1.4 =
2.6e-2 of itself (root mean square). An int8 code errs by 1 / 127 / sqrt(12) = 2.3e-3 of the largest of a head's 16
values, which is 1.8 times their root mean square: 4e-3 of that, or 0.16 times as much."""


def run_session(context, feed, tokens):
    """Logits of prompts, chunks and single tokens, after cuts of a sequence and its fork, and after a restore."""
    rows = [feed(context, tokens[:60]), feed(context, tokens[60:61]), feed(context, tokens[61:80])]
    context.fork(0, 1, 70)
    for seq_id in (0, 1):
        context.cut(Pos(seq_id, 20), Pos(seq_id, 30))
    rows += [feed(context, tokens[80:90], seq_id) for seq_id in (0, 1)]
    context.cut(Pos(0, 1), Pos(0, 4))
    context.restore(2, context.dump(0))
    context.drop(0)
    return [*rows, *(feed(context, tokens[90:100], seq_id) for seq_id in (1, 2))]


@pytest.fixture
def native(tmp_path, feed, random_tokens):
    def rows(family, sizes):
        with NativeBackend().load(
            family_model(tmp_path, family), ModelOptions(backend_options={"tier": "reference"})
        ) as model:
            return np.concatenate(run_session(model.new_context(sizes), feed, random_tokens(100)))

    return rows


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "bloom", "mistral3", "phi3_long"])
def test_every_kind_of_attention_is_near_float32(tmp_path, load, feed, random_tokens, native, family) -> None:
    actual = np.concatenate(
        run_session(load(family_model(tmp_path, family)).new_context(SIZES), feed, random_tokens(100))
    )
    ours, theirs = (relative_errors(rows, native(family, EXACT)) for rows in (actual, native(family, F8)))
    assert 0 < ours.mean() < SHARE * theirs.mean(), (
        f"mean error {ours.mean():.1e}, that of f8_e4m3 is {theirs.mean():.1e}"
    )
    assert ours.max() < SHARE * theirs.max(), f"largest error {ours.max():.1e}, that of f8_e4m3 is {theirs.max():.1e}"


def test_padded_batches_give_the_same_logits(tmp_path, load, feed, random_tokens) -> None:
    path, tokens = family_model(tmp_path, "qwen3"), random_tokens(100)
    exact, padded = (
        run_session(load(path, buckets=buckets).new_context(SIZES), feed, tokens) for buckets in (False, True)
    )
    for actual, expected in zip(padded, exact, strict=True):
        assert relative_errors(actual, expected).max() < 2e-3  # the last bit of a sum may change a code


def test_an_8_bit_cache_takes_less_than_a_third_of_float32(tmp_path, load, feed, random_tokens) -> None:
    model, sizes = load(family_model(tmp_path, "qwen3")), []
    for options in (EXACT, SIZES):
        context = model.new_context(options)
        feed(context, random_tokens(100))
        sizes.append(len(SequenceSnapshot.from_bytes(context.dump(0)).payload))
    assert sizes[1] < sizes[0] / 3  # (16 + 4) / 64 for heads of 16 values, 132 / 512 for heads of 128


def test_compaction_keeps_the_codes_of_cells(tmp_path, load, feed, random_tokens) -> None:
    """Encoding decoded codes gives the same codes, so cells that are moved often are rounded only once."""
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
    codes = [np.frombuffer(SequenceSnapshot.from_bytes(c.dump(0)).payload[4:], np.int8) for c in (tight, roomy)]
    assert tight._cells.n_used <= 64 < roomy._cells.n_cells
    assert np.abs(codes[0].astype(int) - codes[1]).max() <= 1
    assert rows.shape[0] == 20


def test_damaged_and_foreign_payloads_are_refused_or_replayed(tmp_path, load, feed, random_tokens) -> None:
    model, tokens = load(family_model(tmp_path, "qwen3")), random_tokens(50)
    int8_context, exact = model.new_context(SIZES), model.new_context(EXACT)
    feed(int8_context, tokens)
    snapshot = SequenceSnapshot.from_bytes(int8_context.dump(0))
    exact.restore(0, int8_context.dump(0))  # another KV type: restored by replay
    expected = feed(model.new_context(EXACT), tokens)[-1:]
    exact.truncate(Pos(0, 49))
    assert relative_errors(feed(exact, tokens[49:]), expected).max() < 1e-4
    for payload in (snapshot.payload[:-4], snapshot.payload[:-4] + np.float32(np.nan).tobytes()):
        with pytest.raises(InvalidSnapshot, match="KV payload"):
            int8_context.restore(1, replace(snapshot, payload=payload).to_bytes())
    assert int8_context.length(1) == 0
