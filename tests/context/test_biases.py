"""Attention biases: in a batch, in the inputs of a sequence, in a dump byte by byte, by sequence and key."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from slm_core.container import pack, unpack
from slm_core.context.batch import TokenBatch
from slm_core.context.biases import AttentionBiases, key_biases
from slm_core.context.inputs import (
    Held,
    HeldInput,
    add_held,
    batch_inputs,
    bias_of,
    biases_of,
    held_inputs,
    rows_of,
    token_ids,
)
from slm_core.context.sequence_adapters import part_of
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import InvalidEmbedding, InvalidSnapshot
from slm_core.types import EMBEDDED, Pos

INF = float("inf")
ROWS = np.arange(20, dtype=np.float32).reshape(4, 5)
BIAS = np.array([-INF, 0, 2.5, -3e38], np.float32)


def held() -> list[Held]:
    """A token, four rows with biases, a token."""
    return held_inputs(np.array([5, *[EMBEDDED] * 4, 6], np.int32), rows=ROWS, bias=BIAS)


def test_a_batch_has_a_bias_for_each_row() -> None:
    batch = TokenBatch(12)
    batch.extend([1, 2], Pos(0, 0))
    assert batch.bias.shape == (0,)
    bias = BIAS.copy()
    batch.add_embeddings(ROWS, Pos(0, 2), bias=bias)
    bias[:] = 1
    batch.add_embeddings(ROWS[:1], Pos(1, 6))
    assert batch.bias.tolist() == [*BIAS.tolist(), 0]
    with pytest.raises(ValueError, match="read-only"):
        batch.bias[0] = 1
    assert part_of(batch, [0]).bias.tolist() == BIAS.tolist()
    assert part_of(batch, [1]).bias.tolist() == [], "biases of 0 count as none"
    batch.clear()
    batch.add_embeddings(ROWS[:2], Pos(0, 0), bias=np.array([0.0, -0.0], np.float32))
    assert batch.bias.shape == (0,), "biases of 0 count as none"


@pytest.mark.parametrize(
    ("bias", "match"),
    [
        (BIAS[:3], r"float32 of shape \(3,\) \(accepted: a NumPy array, float32 \[4\]\)"),
        (BIAS[:, None], "shape"),
        (BIAS.astype(np.float64), "float64"),
        (BIAS.tolist(), "list"),
        (np.array([0, np.nan, 0, 0], np.float32), "the number nan"),
        (np.array([0, 0, 0, INF], np.float32), r"the number inf \(accepted: -inf, and numbers to 1000\)"),
        (np.array([0, 0, 0, 1001], np.float32), "the number 1001"),
    ],
)
def test_invalid_biases_are_refused(bias: object, match: str) -> None:
    batch = TokenBatch(8)
    with pytest.raises(InvalidEmbedding, match=f"^the attention bias .*{match}") as raised:
        batch.add_embeddings(ROWS, Pos(0, 0), bias=bias)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    assert len(batch) == 0


def test_inputs_with_other_biases_are_other_inputs() -> None:
    row = ROWS[0]
    assert HeldInput(EMBEDDED, row, bias=2.0) == HeldInput(EMBEDDED, row.copy(), bias=2.0)
    assert HeldInput(EMBEDDED, row, bias=2.0) != HeldInput(EMBEDDED, row)
    assert HeldInput(EMBEDDED, row, bias=-0.0) == HeldInput(EMBEDDED, row)
    assert hash(HeldInput(EMBEDDED, row, bias=-0.0)) == hash(HeldInput(EMBEDDED, row))


def test_rows_keep_their_biases_in_a_new_batch() -> None:
    for sizes in ([6], [3, 3], [1, 1, 1, 1, 1, 1]):
        actual, done = [], 0
        for n in sizes:
            batch = TokenBatch(n)
            add_held(batch, held()[done : done + n], Pos(0, done))
            actual += batch_inputs(batch)
            done += n
        assert actual == held()


def test_rows_of_a_block_keep_their_biases() -> None:
    ahead = np.array([0, 3, 2, 1, 0, 0], np.int32)
    inputs = held_inputs(np.array([5, *[EMBEDDED] * 4, 6], np.int32), rows=ROWS, bias=BIAS, ahead=ahead)
    assert biases_of(inputs).tolist() == BIAS.tolist()


def test_a_dump_contains_the_biases_of_removed_rows() -> None:
    inputs = held()
    remaining = [inputs[0], *inputs[4:]]
    snapshot = SequenceSnapshot(
        "a", "b", "c", np.array(token_ids(remaining), np.int32), (Edit(1, tuple(inputs[1:4]), 6),), b"",
        rows=rows_of(remaining), bias=biases_of(remaining),
    )  # fmt: skip
    data = snapshot.to_bytes()
    _, sections = unpack("sequence", data)
    assert sections[3:] == [
        np.concatenate([ROWS[3:], ROWS[:3]]).tobytes(),
        b"",
        b"",
        struct.pack("<4f", BIAS[3], *BIAS[:3]),
    ]
    restored = SequenceSnapshot.from_bytes(data)
    assert restored.held() == remaining
    assert restored.edits == snapshot.edits
    assert restored.to_bytes() == data
    for bad in (np.nan, INF, 1001):
        with pytest.raises(InvalidSnapshot, match="an attention bias that is out of range"):
            SequenceSnapshot.from_bytes(replace(snapshot, bias=np.full(1, bad, np.float32)).to_bytes())


def test_dumps_without_biases_are_as_before() -> None:
    snapshot = SequenceSnapshot("a", "b", "c", np.full(4, EMBEDDED, np.int32), (), b"", rows=ROWS)
    meta, sections = unpack("sequence", snapshot.to_bytes())
    assert len(sections) == 4
    with_biases = [*sections, b"", b"", BIAS.tobytes()]
    assert biases_of(SequenceSnapshot.from_bytes(pack("sequence", meta, with_biases)).held()).tolist() == BIAS.tolist()
    for wrong in ([*with_biases, b""], [*with_biases[:-1], BIAS[:3].tobytes()], [*with_biases[:-1], b"abc"]):
        with pytest.raises(InvalidSnapshot):
            SequenceSnapshot.from_bytes(pack("sequence", meta, wrong))


def test_biases_of_keys_end_with_the_last_bias() -> None:
    assert key_biases(held()).tolist() == [0, -INF, 0, 2.5, np.float32(-3e38)]
    assert key_biases([1, 2, HeldInput(EMBEDDED, ROWS[0])]).tolist() == []


def test_biases_by_sequence() -> None:
    """Batch after batch, one sequence has biases and another has none; both are edited."""
    contents: dict[int, list[Held]] = {0: [], 1: [], 2: []}
    biases = AttentionBiases(lambda seq_id: contents[seq_id])

    def after(*runs: tuple[int, list[Held]]) -> dict[int, list[float]]:
        batch = TokenBatch(32)
        for seq_id, run in runs:
            add_held(batch, run, Pos(seq_id, len(contents[seq_id])))
        actual = {seq_id: each.tolist() for seq_id, each in biases.of(batch).items()}
        for seq_id, run in runs:
            contents[seq_id] += run
            assert actual.get(seq_id, []) == key_biases(contents[seq_id]).tolist()
        return actual

    assert after((0, [1, 2]), (1, [3])) == {}
    first = [0, 0, *key_biases(held()).tolist()]
    assert after((0, held()), (1, [4])) == {0: first}
    assert after((1, [5]), (0, [5])) == {0: first}
    assert after((0, held())) == {0: [*first, 0, 0, *key_biases(held()).tolist()]}
    del contents[0][4:]
    biases.forget(0)
    assert after((0, [7])) == {0: first[:4]}
    contents[2], contents[0] = contents[0], []
    for seq_id in contents:
        biases.forget(seq_id)
    assert after((0, [1]), (1, [1]), (2, [1])) == {2: first[:4]}
    batch = TokenBatch(8)  # a batch that fails is not among the inputs
    add_held(batch, held(), Pos(0, 1))
    biases.of(batch)
    assert after((0, [1])) == {}


def test_a_restored_sequence_is_looked_through() -> None:
    biases, batch = AttentionBiases(lambda _: held()), TokenBatch(1)
    batch.add(3, Pos(0, 6))
    biases.look_for([1, 2])
    assert biases.of(batch) == {}, "nothing is looked for before the first bias"
    biases.look_for([1, *held()])
    assert biases.of(batch)[0].tolist() == key_biases(held()).tolist()
    assert all(bias_of(one) == 0 for one in batch_inputs(batch))
