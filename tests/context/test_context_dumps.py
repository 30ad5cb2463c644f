"""Dumps of contexts whose engine cannot export parts of sequences: tokens after a shared prefix are decoded again."""

from __future__ import annotations

import contextlib
import random

import pytest

from context.test_base import Engine, feed, random_call
from slm_core.container import Incoming, pack, unpack
from slm_core.context.ledger import tail_edits
from slm_core.context.snapshot import Edit
from slm_core.errors import ContextError, InvalidSequence, InvalidSnapshot


@pytest.mark.parametrize("payload_format", ["json-1", "other"])
@pytest.mark.parametrize("seed", range(40))
def test_a_restored_context_has_the_cells_of_the_dumped_context(seed, payload_format):
    rng = random.Random(seed)
    context, other = Engine(200, 4), Engine(2000, 4, payload_format=payload_format)
    for _ in range(25):
        with contextlib.suppress(ContextError):
            random_call(rng, context, rng.randrange(3))
    other.restore_context(context.dump_context(rng.randint(1, 500)))
    assert other.cells == context.cells, "after a cut, cells that attended to removed tokens are restored as they were"
    for seq_id in range(4):
        assert other.tokens(seq_id) == context.tokens(seq_id)
        edits = [
            [(e.start, e.removed, e.length_before) for e in each._ledger.edits(seq_id)] for each in (context, other)
        ]
        assert edits[0] == edits[1]
    if not any(context._ledger.edits(seq_id) for seq_id in range(4)):
        assert other.n_ctx - other.n_free == context.n_ctx - context.n_free
    other.clear()
    assert other.n_free == other.n_ctx


def test_a_tail_decoded_before_an_edit_is_not_dumped_alone():
    early = Edit(2, (5, 6), 30)
    assert tail_edits([early], 10) is None, "the sequence had more than 10 + 2 tokens at the time of the cut"
    assert tail_edits([Edit(2, (5, 6), 12)], 10) == []
    assert tail_edits([Edit(2, (5, 6), 12), Edit(15, (1,), 20)], 10) == [Edit(5, (1,), 10)]


@pytest.mark.parametrize(
    ("sequences", "error"),
    [
        (None, InvalidSnapshot),
        ([[0, 0, 0, 3]], InvalidSnapshot),
        ([[0, 0, 0, 2, {}]], InvalidSnapshot),
        ([[0, 0, 1, 3, {}]], InvalidSnapshot),
        ([[0, 1, 0, 3, {}]], InvalidSnapshot),
        ([[-1, 0, 0, 3, {}]], InvalidSnapshot),
        ([[7, 7, 0, 3, None]], InvalidSnapshot),
        ([[0, 0, 0, 3, {}], [0, 0, 0, 0, {}]], InvalidSnapshot),
    ],
)
def test_impossible_lists_of_sequences_are_refused(sequences, error):
    context = Engine()
    feed(context, range(9))
    _, sections = unpack("context", b"".join(context.dump_context()))
    other = Engine()
    with pytest.raises(error):
        other.restore_context([pack("context", {"sequences": sequences}, sections)])
    assert other.n_free == other.n_ctx


def test_a_sequence_that_comes_twice_is_refused():
    context, other = Engine(), Engine()
    feed(context, range(9))
    meta, sections = unpack("context", b"".join(context.dump_context()))
    (seq_id, _, *rest), unknown = meta["sequences"][0], 7
    meta["sequences"].append([seq_id, unknown, *rest])
    with pytest.raises(InvalidSnapshot, match="share tokens that the dump lacks"):
        other.restore_context([pack("context", meta, [*sections, *sections])])
    assert other.n_free == other.n_ctx


@pytest.mark.parametrize("change", [(0, 7), (2, 12), (2, 1000)])
def test_sequences_that_share_missing_tokens_are_refused(change):
    context = Engine()
    feed(context, range(9))
    context.fork(0, 1, 5)
    feed(context, range(3), seq_id=1)
    meta, sections = unpack("context", b"".join(context.dump_context()))
    place, value = change
    meta["sequences"][1][place] = value
    other = Engine()
    with pytest.raises((InvalidSequence, InvalidSnapshot)):
        other.restore_context([pack("context", meta, sections)])
    assert other.n_free == other.n_ctx
    assert Incoming("context", context.dump_context()).meta
