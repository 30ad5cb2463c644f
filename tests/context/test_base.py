"""The context base over an engine whose KV cells remember what they attended to: edits, room, dumps and errors."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import zlib

import numpy as np
import pytest

from slm_core.context import ContextBase
from slm_core.context.batch import TokenBatch
from slm_core.context.sequence_adapters import part_of
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import (
    BatchFull,
    ContextBusy,
    ContextClosed,
    ContextFull,
    DecodeFailed,
    InvalidOption,
    InvalidPosition,
    InvalidSequence,
    InvalidSnapshot,
    InvalidToken,
    SnapshotMismatch,
    UnsupportedEdit,
    UnsupportedInput,
    UnsupportedOutput,
)
from slm_core.types import EMBEDDED, Capability, ContextOptions, EditLevel, Pos

N_VOCAB = 50
ALL = frozenset({Capability.SHARED_FORK, Capability.KV_PAYLOAD})


class Engine(ContextBase):
    """Each KV cell is [token, hash of the cells before it]; a cut moves cells unchanged. Calls can be made to fail."""

    def __init__(self, n_ctx=64, n_seq_max=3, n_batch=16, *, level=EditLevel.CUT, able=ALL, payload_format="json-1"):
        super().__init__(
            ContextOptions(n_ctx, n_seq_max, n_batch),
            backend="engine",
            fingerprint="f",
            n_vocab=N_VOCAB,
            edit_level=level,
            capabilities=able,
            payload_format=payload_format,
        )
        self.cells = [[] for _ in range(n_seq_max)]
        self.fails = False
        self.calls = []

    def _call_engine(self, name):
        self.calls.append(name)
        if self.fails:
            raise DecodeFailed(f"{name} failed")

    def _engine_decode(self, batch):
        self._call_engine("decode")
        rows = []
        for token, seq_id, is_output in zip(
            batch.tokens.tolist(), batch.seq_ids.tolist(), batch.logits_mask, strict=True
        ):
            cells = self.cells[seq_id]
            cells.append([token, zlib.crc32(str(cells).encode())])
            if is_output:
                rows.append(cells[-1][1] % 997 + np.arange(N_VOCAB))
        return np.array(rows, np.float32).reshape(-1, N_VOCAB)

    def _engine_fork(self, src, dst, end):
        self._call_engine("fork")
        assert not self.cells[dst]
        self.cells[dst] = [list(cell) for cell in self.cells[src][:end]]

    def _engine_truncate(self, seq_id, length):
        self._call_engine("truncate")
        assert length < len(self.cells[seq_id])
        del self.cells[seq_id][length:]

    def _engine_cut(self, seq_id, start, end):
        self._call_engine("cut")
        assert start < end < len(self.cells[seq_id])
        del self.cells[seq_id][start:end]

    def _engine_drop(self, seq_id):
        self.calls.append("drop")
        assert self.cells[seq_id]
        self.cells[seq_id] = []

    def _engine_export(self, seq_id):
        self.calls.append("export")
        return json.dumps(self.cells[seq_id]).encode()

    def _engine_check_payload(self, n_tokens, payload):
        if payload == b"hostile":
            raise InvalidSnapshot("the payload is hostile")

    def _engine_import(self, seq_id, n_tokens, payload):
        self.calls.append("import")
        self.cells[seq_id] = json.loads(payload)
        assert len(self.cells[seq_id]) == n_tokens

    def _engine_close(self):
        self.calls.append("close")


def feed(context, tokens, seq_id=0):
    batch = context.new_batch()
    batch.extend(tokens, Pos(seq_id, context.length(seq_id)), logits="all")
    return context.decode(batch).copy()


def state(context):
    tokens = [context.tokens(s) for s in range(context.n_seq_max)]
    return tokens, context.n_free, [[list(cell) for cell in cells] for cells in context.cells]


@contextlib.contextmanager
def assert_refused(context, error, match=None):
    before = state(context)
    with pytest.raises(error, match=match):
        yield
    assert state(context) == before


def random_call(rng, context, seq_id):
    length = context.length(seq_id)
    start, end = sorted((rng.randint(0, length), rng.randint(0, length)))
    call = rng.choices(["feed", "truncate", "cut", "fork", "restore", "drop"], [10, 3, 5, 3, 2, 1])[0]
    if call == "feed":
        feed(context, [rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 9))], seq_id)
    elif call == "truncate":
        context.truncate(Pos(seq_id, start))
    elif call == "cut":
        context.cut(Pos(seq_id, start), Pos(seq_id, end))
    elif call == "fork":
        context.fork(seq_id, rng.randrange(3), end)
    elif call == "restore":
        context.restore(rng.randrange(3), context.dump(seq_id))
    else:
        context.drop(seq_id)


def edits(context, seq_id):
    return SequenceSnapshot.from_bytes(context.dump(seq_id)).edits


@pytest.mark.parametrize("seed", range(60))
def test_engine_ledger_and_replay_agree_after_random_calls(seed):
    """An engine without payloads and with smaller batches reaches the same cells by replaying every dump."""
    rng = random.Random(seed)
    context, other = Engine(), Engine(200, 1, 5, able=frozenset({Capability.SHARED_FORK}))
    for _ in range(40):
        seq_id, before = rng.randrange(3), state(context)
        try:
            random_call(rng, context, seq_id)
        except (ContextFull, InvalidSequence):
            assert state(context) == before
        for cells, tokens in zip(context.cells, state(context)[0], strict=True):
            assert tuple(token for token, _ in cells) == tokens
        other.restore(0, context.dump(seq_id))
        assert other.cells[0] == context.cells[seq_id]
        assert other.tokens(0) == context.tokens(seq_id)
        assert edits(other, 0) == edits(context, seq_id)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: feed(c, [1]),
        lambda c: c.fork(0, 1),
        lambda c: c.truncate(Pos(0, 2)),
        lambda c: c.cut(Pos(0, 1), Pos(0, 3)),
    ],
)
def test_a_failing_engine_leaves_the_ledger_unchanged(call):
    context = Engine()
    feed(context, [1, 2, 3, 4, 5])
    context.fails = True
    with assert_refused(context, DecodeFailed):
        call(context)
    context.fails = False
    call(context)


def test_invalid_calls_do_not_reach_the_engine():
    context = Engine(16, 2, 8)
    feed(context, [1, 2, 3, 4, 5])
    context.calls.clear()
    for error, tokens, pos in (
        (InvalidToken, [N_VOCAB], Pos(0, 5)),
        (InvalidPosition, [1], Pos(0, 4)),
        (InvalidPosition, [1], Pos(0, 6)),
        (InvalidSequence, [1], Pos(2, 0)),
    ):
        batch = context.new_batch()
        batch.extend(tokens, pos)
        with assert_refused(context, error):
            context.decode(batch)
    for error, call in (
        (InvalidPosition, lambda: context.truncate(Pos(0, 6))),
        (InvalidPosition, lambda: context.truncate(Pos(0, -1))),
        (InvalidPosition, lambda: context.cut(Pos(0, 3), Pos(0, 2))),
        (InvalidPosition, lambda: context.cut(Pos(0, 3), Pos(0, 6))),
        (InvalidSequence, lambda: context.cut(Pos(0, 0), Pos(1, 0))),
        (InvalidSequence, lambda: context.fork(0, 0)),
        (InvalidSequence, lambda: context.fork(1, 0)),
        (InvalidPosition, lambda: context.fork(0, 1, 6)),
        (InvalidSequence, lambda: context.drop(2)),
        (InvalidSequence, lambda: context.drop(-1)),
        (InvalidSequence, lambda: context.dump(2)),
        (InvalidOption, lambda: context.new_batch(9)),
    ):
        with assert_refused(context, error):
            call()
    assert context.calls == []


def test_calls_that_change_nothing_do_not_reach_the_engine():
    context = Engine()
    feed(context, [1, 2, 3])
    context.calls.clear()
    assert context.decode(context.new_batch()).shape == (0, N_VOCAB)
    assert context.truncate(Pos(0, 3)) == Pos(0, 3)
    assert context.cut(Pos(0, 1), Pos(0, 1)) == Pos(0, 3)
    assert context.fork(0, 1, 0) == Pos(1, 0)
    context.drop(1)
    assert context.calls == []


def test_a_cut_at_the_tail_is_a_truncate():
    context = Engine()
    feed(context, [1, 2, 3])
    context.calls.clear()
    assert context.cut(Pos(0, 1), Pos(0, 3)) == Pos(0, 1)
    assert context.calls == ["truncate"]
    assert SequenceSnapshot.from_bytes(context.dump(0)).edits == ()


def test_a_full_context_reports_needed_and_free_positions():
    context = Engine(10, 2, 8)
    feed(context, [1] * 7)
    with assert_refused(context, ContextFull, match="4 positions needed, 3 free") as _:
        feed(context, [1] * 4)
    batch = Engine(n_batch=9).new_batch()
    batch.extend([1] * 9, Pos(0, 7))
    with assert_refused(context, BatchFull, match="n_batch is 8"):
        context.decode(batch)


def test_forks_without_shared_storage_need_room():
    context = Engine(10, 3, 8, able=frozenset())
    feed(context, [1] * 6)
    with assert_refused(context, ContextFull, match="6 positions needed, 4 free"):
        context.fork(0, 1)
    context.fork(0, 1, 4)
    assert context.n_free == 0


def test_a_cut_of_shared_storage_needs_room_for_the_moved_tokens():
    context = Engine(12, 2, 16)
    feed(context, [1] * 10)
    context.fork(0, 1)
    with assert_refused(context, ContextFull, match="7 positions needed, 2 free"):
        context.cut(Pos(1, 1), Pos(1, 3))
    assert context.cut(Pos(1, 1), Pos(1, 8)) == Pos(1, 3)  # two tokens move
    assert context.n_free == 0


def test_a_restore_needs_room_to_undo_itself():
    context, small = Engine(12, 2, 16), Engine()
    feed(context, [1] * 10)
    context.fork(0, 1)
    feed(small, [2, 2])
    with assert_refused(context, ContextFull, match="10 positions needed, 2 free"):
        context.restore(1, small.dump(0))


@pytest.mark.parametrize("level", [EditLevel.REPLAY, EditLevel.TRUNCATE])
def test_calls_above_the_edit_level_are_refused(level):
    context = Engine(level=level)
    feed(context, [1, 2, 3])
    with assert_refused(context, UnsupportedEdit, match=f"cannot cut .its edit level is {level.name}"):
        context.cut(Pos(0, 0), Pos(0, 0))
    if level is EditLevel.REPLAY:
        with assert_refused(context, UnsupportedEdit, match="drop the sequence"):
            context.truncate(Pos(0, 3))
    edited = Engine(payload_format="other")
    feed(edited, [1, 2, 3, 4])
    edited.cut(Pos(0, 1), Pos(0, 2))
    with assert_refused(context, UnsupportedEdit):
        context.restore(1, edited.dump(0))


def test_only_a_matching_payload_is_loaded():
    source = Engine()
    feed(source, [1, 2, 3, 4])
    source.cut(Pos(0, 1), Pos(0, 2))
    for target, expected in (
        (Engine(), ["export", "import"]),
        (Engine(payload_format="json-2"), ["export", "decode", "cut"]),
        (Engine(able=frozenset()), ["decode", "cut"]),
    ):
        feed(target, [9])
        target.calls.clear()
        target.restore(0, source.dump(0))
        assert [call for call in target.calls if call != "drop"] == expected
        assert target.cells[0] == source.cells[0]


def test_a_dump_without_payload_is_replayed_by_an_engine_with_payloads():
    source, target = Engine(able=frozenset()), Engine()
    feed(source, [1, 2, 3])
    target.restore(1, source.dump(0))
    assert target.cells[1] == source.cells[0]


@pytest.mark.parametrize("able", [ALL, frozenset()])
def test_a_failed_restore_brings_back_the_old_sequence(able):
    context = Engine(able=able)
    feed(context, [1, 2, 3])
    context.fork(0, 1)
    feed(context, [4], seq_id=1)
    before = [list(cell) for cell in context.cells[1]]
    snapshot = SequenceSnapshot("engine", "json-1", "f", np.array([5, 6], np.int32), (), b"hostile")
    if able:
        with pytest.raises(InvalidSnapshot, match="hostile"):
            context.restore(1, snapshot.to_bytes())
    else:
        context.restore(1, snapshot.to_bytes())
        before = context.cells[1]
    assert context.cells[1] == before
    assert context.tokens(1) == tuple(token for token, _ in before)


def test_invalid_dumps_are_refused_before_any_change():
    context = Engine(12, 2, 8)
    feed(context, [1, 2, 3])
    context.calls.clear()
    whole = SequenceSnapshot("engine", "json-1", "f", np.array([5, 6], np.int32), (), b"[]")
    small = Engine()
    feed(small, [1] * 10)
    for error, data in (
        (SnapshotMismatch, SequenceSnapshot("engine", "json-1", "g", whole.tokens, (), b"[]").to_bytes()),
        (InvalidSnapshot, SequenceSnapshot("x", "y", "f", np.array([N_VOCAB], np.int32), (), b"").to_bytes()),
        (InvalidSnapshot, SequenceSnapshot("x", "y", "f", np.array([-1], np.int32), (), b"").to_bytes()),
        (InvalidSnapshot, b"nothing of the kind"),
        (ContextFull, small.dump(0)),
    ):
        with assert_refused(context, error):
            context.restore(1, data)
    assert "import" not in context.calls
    assert "decode" not in context.calls


def test_blocks_are_restored_only_where_they_are_declared():
    tokens, ahead = np.array([5, 6, 7], np.int32), np.array([1, 0, 0], np.int32)
    data = SequenceSnapshot("x", "y", "f", tokens, (), b"", ahead=ahead).to_bytes()
    with pytest.raises(SnapshotMismatch, match="blocks of up to 2 tokens"):
        Engine().restore(0, data)
    declared = Engine(able=ALL | {Capability.BIDIRECTIONAL_BLOCKS})
    declared.restore(0, data)
    assert declared.tokens(0) == (5, 6, 7)


def test_a_dump_whose_replay_needs_more_room_than_its_tokens():
    """Two tokens remain of a history of eleven: its replay needs eleven positions at its peak."""
    source = Engine(payload_format="other")
    feed(source, [1] * 11)
    source.cut(Pos(0, 1), Pos(0, 10))
    with assert_refused(context := Engine(10, 1, 8), ContextFull, match="11 positions needed, 10 free"):
        context.restore(0, source.dump(0))
    Engine(11, 1, 8).restore(0, source.dump(0))


class Blocking(Engine):
    """Its decode blocks until the test releases it."""

    def __init__(self):
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def _engine_decode(self, batch):
        self.entered.set()
        assert self.go_on.wait(10)
        return super()._engine_decode(batch)


def test_every_call_of_a_second_thread_is_refused():
    context = Blocking()
    data = Engine().dump(0)
    thread = threading.Thread(target=feed, args=(context, [1, 2]))
    thread.start()
    assert context.entered.wait(10)
    batch = Engine().new_batch()
    for call in (
        lambda: context.decode(batch),
        lambda: context.fork(0, 1),
        lambda: context.truncate(Pos(0, 0)),
        lambda: context.cut(Pos(0, 0), Pos(0, 0)),
        lambda: context.drop(0),
        lambda: context.clear(),
        lambda: context.dump(0),
        lambda: context.restore(0, data),
        lambda: context.close(),
    ):
        with pytest.raises(ContextBusy):
            call()
    context.go_on.set()
    thread.join()
    assert context.tokens(0) == (1, 2)


def test_calls_after_close_are_refused():
    context = Engine()
    feed(context, [1])
    data, batch = context.dump(0), context.new_batch()
    with context:
        pass
    context.close()
    assert context.calls.count("close") == 1
    for call in (
        lambda: context.length(0),
        lambda: context.tokens(0),
        lambda: context.new_batch(),
        lambda: context.decode(batch),
        lambda: context.fork(0, 1),
        lambda: context.truncate(Pos(0, 0)),
        lambda: context.cut(Pos(0, 0), Pos(0, 0)),
        lambda: context.drop(0),
        lambda: context.clear(),
        lambda: context.dump(0),
        lambda: context.restore(0, data),
    ):
        with pytest.raises(ContextClosed):
            call()


@pytest.mark.parametrize("name", ["n_ctx", "n_seq_max", "n_batch"])
@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8"])
def test_impossible_sizes_are_refused(name, size):
    with pytest.raises(InvalidOption, match=name):
        Engine(**{name: size})


def test_declared_properties_can_be_read():
    context = Engine(20, 2, 4, level=EditLevel.TRUNCATE, able=frozenset({Capability.SHARED_FORK}))
    assert (context.n_ctx, context.n_seq_max, context.n_batch, context.n_free) == (20, 2, 4, 20)
    assert context.edit_level is EditLevel.TRUNCATE
    assert context.capabilities == {Capability.SHARED_FORK}


def test_embedding_rows_without_the_capability_are_refused():
    context, batch = Engine(), TokenBatch(4)
    batch.add(3, Pos(0, 0))
    batch.add_embeddings(np.ones((2, 5), np.float32), Pos(0, 1))
    with assert_refused(context, UnsupportedInput, match="takes no embedding rows for this model"):
        context.decode(batch)
    rows = np.ones((1, 5), np.float32)
    dump = SequenceSnapshot("engine", "json-1", "f", np.array([3, EMBEDDED], np.int32), (), b"[]", rows).to_bytes()
    with assert_refused(context, SnapshotMismatch, match="holds 1 embedding rows"):
        context.restore(0, dump)


def test_the_id_of_an_embedding_row_without_a_row_is_refused():
    """A batch of another implementation may contain any ids."""
    context, batch = Engine(able=ALL | {Capability.EMBEDDING_INPUT}), TokenBatch(4)
    batch.extend([3, 4], Pos(0, 0))
    batch._tokens[1] = EMBEDDED
    with assert_refused(context, InvalidToken, match="token -1 of sequence 0 is outside"):
        context.decode(batch)


class Encoder(Engine):
    """Returns hidden states, and would return logits, too."""

    def _engine_embed(self, batch):
        self.calls.append("embed")
        return np.zeros((int(batch.logits_mask.sum()), 5), np.float32)


def test_an_encoder_stores_nothing_and_has_no_logits():
    context, batch = Encoder(able=frozenset({Capability.ENCODER, Capability.EMBEDDINGS})), TokenBatch(4)
    batch.extend([3, 4], Pos(0, 0), logits="all")
    with assert_refused(context, UnsupportedOutput, match="is an encoder"):
        context.decode(batch)
    assert context.embed(batch).shape == (2, 5)
    assert (context.calls, context.tokens(0), context.n_free) == (["embed"], (), 64)
    dump = Engine()
    feed(dump, [1, 2])
    with assert_refused(context, InvalidSnapshot, match="an encoder stores none"):
        context.restore(0, dump.dump(0))


@pytest.mark.parametrize("end", range(1, 8))
def test_bidirectional_blocks_stay_whole(end):
    """Two adjacent blocks of three tokens between two single tokens: 0 [1 2 3] [4 5 6] 7."""
    context, batch = Engine(able=ALL | {Capability.BIDIRECTIONAL_BLOCKS}), TokenBatch(8)
    batch.extend([1], Pos(0, 0))
    for first in (1, 4):
        batch.extend([5, 6, 7], Pos(0, first))
        batch.join_block(3)
    batch.extend([8], Pos(0, 7))
    context.decode(batch)
    begin = 1 if end in (2, 3) else 4
    inside = end in (2, 3, 5, 6)
    for call in (context.truncate, lambda pos: context.fork(0, 1, pos.index), lambda pos: context.cut(pos, Pos(0, 8))):
        if inside:
            with assert_refused(
                context, InvalidPosition, match=rf"position {end} .*accepted: {begin}, where the block begins"
            ):
                call(Pos(0, end))
    if not inside:
        assert context.truncate(Pos(0, end)) == Pos(0, end)
        assert context.tokens(0) == (1, 5, 6, 7, 5, 6, 7, 8)[:end]


def test_an_error_names_its_sequence():
    context = Engine()
    feed(context, range(9))
    feed(context, range(4), seq_id=1)
    context.fails = True
    both = context.new_batch()
    both.extend([1], Pos(0, 9))
    both.extend([1], Pos(1, 4))
    for seq_id, call in (
        (0, lambda: feed(context, [1])),
        (2, lambda: context.fork(0, 2)),
        (1, lambda: context.truncate(Pos(1, 2))),
        (1, lambda: context.cut(Pos(1, 1), Pos(1, 2))),
        (None, lambda: context.decode(both)),
    ):
        with pytest.raises(DecodeFailed) as caught:
            call()
        assert caught.value.seq_id == seq_id
        assert str(caught.value).startswith("" if seq_id is None else f"sequence {seq_id}: ")


@pytest.mark.parametrize(
    ("seq_ids", "positions", "ahead"),
    [
        ([0, 0, 0], [0, 1, 2], [1, 1, 0]),  # a block in a block
        ([0, 0, 0], [0, 1, 2], [0, 0, 1]),  # past the end
        ([0, 0, 1], [0, 1, 0], [2, 1, 0]),  # the last is of another sequence
        ([0, 1, 1], [0, 0, 1], [2, 1, 0]),
        ([1, 0, 0], [0, 0, 1], [1, 0, 0]),
    ],
)
def test_blocks_that_are_no_run_of_one_sequence_are_refused(seq_ids, positions, ahead):
    context = Engine(able=ALL | {Capability.BIDIRECTIONAL_BLOCKS})
    arrays = {"seq_ids": seq_ids, "positions": positions, "ahead": ahead, "tokens": [3, 4, 5]}
    batch = TokenBatch.from_arrays(
        **{name: np.array(numbers, np.int32) for name, numbers in arrays.items()},
        logits_mask=np.ones(3, np.bool_),
        embeddings=np.empty((0, 0), np.float32),
        offsets=np.empty((0, 3), np.int32),
        bias=np.empty(0, np.float32),
    )
    with assert_refused(context, InvalidOption, match="not a run of one sequence"):
        context.decode(batch)


def test_the_part_of_one_sequence_is_the_batch_of_its_inputs():
    """Sequences take turns: tokens, rows with and without offsets, and a block."""

    def add(batch, seq_id):
        rows = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * seq_id
        return [
            lambda: batch.extend([seq_id, 7], Pos(seq_id, 0), logits="last"),
            lambda: batch.add_embeddings(rows, Pos(seq_id, 2), offsets=np.array([(0, 0, seq_id), (0, 1, 0)])),
            lambda: (batch.extend([8, 9, seq_id], Pos(seq_id, 4), logits="all"), batch.join_block(2)),
            lambda: batch.add_embeddings(rows[:1], Pos(seq_id, 7), bias=np.float32([seq_id])),
        ]

    whole = TokenBatch(30)
    for turn in range(4):
        for seq_id in (1, 3, 5):
            add(whole, seq_id)[turn]()
    for seq_ids in ([1], [5, 3], [1, 3, 5]):
        expected, actual = TokenBatch(30), part_of(whole, seq_ids)
        for turn in range(4):
            for seq_id in (1, 3, 5):
                if seq_id in seq_ids:
                    add(expected, seq_id)[turn]()
        for name in ("tokens", "seq_ids", "positions", "logits_mask", "ahead", "embeddings", "offsets", "bias"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
