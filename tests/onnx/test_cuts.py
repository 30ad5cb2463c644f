"""Cuts at the start, after which a sequence starts at another RoPE position; the oracle is the native engine."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from slm_conformance.oracle.families import family_model
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidSnapshot
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend
from slm_onnx.cells import FARTHEST
from slm_onnx.kvstore import CellMover

FLOAT32 = 1e-4  # clause 9 of the contract, relative
SIZES = ContextOptions(n_ctx=256, n_seq_max=4)


def run_edits(context, feed, tokens):
    """Logits after cuts at both sides: of a sequence, of its fork and of a restored dump."""
    feed(context, tokens[:90])
    context.cut(Pos(0, 0), Pos(0, 30))
    feed(context, tokens[90:100])
    context.fork(0, 1, 50)
    context.cut(Pos(0, 5), Pos(0, 15))  # few tokens before it, and the fork shares them
    context.restore(2, context.dump(0))
    rows = [feed(context, tokens[100:110], seq_id) for seq_id in range(3)]
    context.cut(Pos(2, 0), Pos(2, 7))
    context.truncate(Pos(1, 40))
    return [*rows, *(feed(context, tokens[110:], seq_id) for seq_id in range(3))]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "cohere2", "bloom", "mistral3", "phi3_long"])
def test_sequences_that_start_at_another_angle_equal_the_native_engine(
    tmp_path, load, feed, random_tokens, assert_close, family
) -> None:
    path, tokens = family_model(tmp_path, family), random_tokens(120)
    actual_rows = run_edits(load(path).new_context(SIZES), feed, tokens)
    with NativeBackend().load(path, ModelOptions(backend_options={"tier": "reference"})) as native:
        expected_rows = run_edits(native.new_context(SIZES), feed, tokens)
    for actual, expected in zip(actual_rows, expected_rows, strict=True):
        assert_close(actual, expected, FLOAT32)


def test_a_dump_replaces_an_empty_sequence_that_was_cut_at_the_start(
    tmp_path, load, feed, random_tokens, assert_close
) -> None:
    """The oracle is a fresh context: after the second cut no token of the sequence attended to removed tokens."""
    model, tokens = load(family_model(tmp_path, "qwen3")), random_tokens(12)
    context = model.new_context(SIZES)
    feed(context, tokens[:6], seq_id=1)
    feed(context, tokens[:3])
    context.cut(Pos(0, 0), Pos(0, 1))
    context.truncate(Pos(0, 0))
    context.restore(0, context.dump(1))
    context.cut(Pos(0, 2), Pos(0, 6))
    expected = feed(model.new_context(SIZES), [*tokens[:2], *tokens[6:]])[2:]
    assert_close(feed(context, tokens[6:]), expected, FLOAT32)


def test_a_cut_at_the_start_moves_no_key(tmp_path, load, feed, random_tokens, monkeypatch) -> None:
    context = load(family_model(tmp_path, "qwen3")).new_context(SIZES)
    feed(context, random_tokens(100))
    context.fork(0, 1)
    moved: list[int] = []
    monkeypatch.setattr(CellMover, "run", lambda self, move: moved.append(len(move.source)))
    context.cut(Pos(0, 0), Pos(0, 60))
    feed(context, random_tokens(1))
    assert moved == []


def test_keys_are_rotated_only_when_their_sequence_is_read(tmp_path, load, feed, random_tokens, monkeypatch) -> None:
    context = load(family_model(tmp_path, "qwen3")).new_context(SIZES)
    feed(context, random_tokens(100))
    feed(context, random_tokens(20), 1)
    moved: list[int] = []
    run = CellMover.run
    monkeypatch.setattr(CellMover, "run", lambda self, move: (moved.append(len(move.source)), run(self, move)))
    context.cut(Pos(0, 70), Pos(0, 80))
    context.cut(Pos(0, 60), Pos(0, 65))
    feed(context, random_tokens(5), 1)
    assert moved == []
    context.dump(0)
    assert moved == [100 - 65], "all keys after the first cut are rotated at once"
    context.cut(Pos(0, 60), Pos(0, 61))
    feed(context, random_tokens(1))
    assert moved[1:] == [100 - 66]


@pytest.fixture
def dump(tmp_path, load, feed, random_tokens):
    """A context, and a function that makes dumps of sequence 0 with other first four bytes: the starting position."""
    context, tokens = load(family_model(tmp_path, "qwen3")).new_context(SIZES), random_tokens(60)
    feed(context, tokens)
    snapshot = SequenceSnapshot.from_bytes(context.dump(0))
    return context, lambda head: replace(snapshot, payload=head + snapshot.payload[4:]).to_bytes()


@pytest.mark.parametrize("angle", [-1, FARTHEST + 1, 2**31 - 1])
def test_a_dump_with_an_impossible_start_is_refused(dump, angle) -> None:
    context, make_dump = dump
    with pytest.raises(InvalidSnapshot, match=f"begins at position {angle}"):
        context.restore(0, make_dump(struct.pack("<i", angle)))
    assert context.length(0) == 60


def test_logits_at_the_farthest_angle_equal_those_at_the_first(
    tmp_path, load, feed, random_tokens, assert_close
) -> None:
    """Scores depend only on differences of angles, so the logits equal those of a sequence that starts at 0."""
    model, tokens = load(family_model(tmp_path, "qwen3")), random_tokens(60)
    near, far = model.new_context(SIZES), model.new_context(SIZES)
    far._cells.begin(0, FARTHEST)
    assert_close(feed(far, tokens), feed(near, tokens), FLOAT32)
    for context in (near, far):
        context.cut(Pos(0, 3), Pos(0, 9))
    assert_close(feed(far, tokens), feed(near, tokens), FLOAT32)
