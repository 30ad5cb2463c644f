"""Dumps of contexts whose engine knows no parts of sequences: what follows a shared prefix is decoded again."""

from __future__ import annotations

import contextlib
import random

import pytest

from context.test_base import Engine, do_something, feed
from slm_core.container import Incoming, pack, unpack
from slm_core.context.ledger import tail_edits
from slm_core.context.snapshot import Edit
from slm_core.errors import ContextError, InvalidSequence, InvalidSnapshot


@pytest.mark.parametrize("payload_format", ["json-1", "other"])
@pytest.mark.parametrize("seed", range(40))
def test_a_restored_context_holds_what_the_dumped_one_held(seed, payload_format):
    rng = random.Random(seed)
    context, other = Engine(200, 4), Engine(2000, 4, payload_format=payload_format)
    for _ in range(25):
        with contextlib.suppress(ContextError):
            do_something(rng, context, rng.randrange(3))
    other.restore_context(context.dump_context(rng.randint(1, 500)))
    assert other.cells == context.cells, "a cut leaves cells that saw what was removed: they come back so"
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


def test_tails_that_were_decoded_before_an_edit_do_not_go_by_themselves():
    early = Edit(2, (5, 6), 30)
    assert tail_edits([early], 10) is None, "the sequence held more than 10 + 2 tokens when it was cut"
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
def test_lists_of_sequences_that_no_context_has_are_refused(sequences, error):
    context = Engine()
    feed(context, range(9))
    _, sections = unpack("context", b"".join(context.dump_context()))
    other = Engine()
    with pytest.raises(error):
        other.restore_context([pack("context", {"sequences": sequences}, sections)])
    assert other.n_free == other.n_ctx


@pytest.mark.parametrize("change", [(0, 7), (2, 12), (2, 1000)])
def test_sequences_that_share_what_is_not_there_are_refused(change):
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
