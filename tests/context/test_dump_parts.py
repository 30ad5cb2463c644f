"""Dumps in parts, compared with whole dumps; payload writers that fail; iterators of parts that call the context."""

from __future__ import annotations

import pytest

from context.test_base import Engine, assert_refused, feed, state
from slm_core.container import PART_BYTES, Incoming, Pieces, pack, pack_parts, unpack
from slm_core.context.payload import PayloadWriter, Section, SectionWriter
from slm_core.errors import ContextBusy, ContextClosed, ContextFull, DecodeFailed, InvalidSnapshot, SequenceChanged


class Staging(Engine):
    """An engine that stages payloads outside its sequences; the test can make ``put`` fail."""

    fails_at = ""

    def _engine_writer(self, seq_id, n_tokens, n_bytes):
        return Writer(self, seq_id, n_tokens)


class Writer(PayloadWriter):
    def __init__(self, context, seq_id, n_tokens):
        self.context, self.seq_id, self.n_tokens = context, seq_id, n_tokens
        self.before, self.payload = context.cells[seq_id], b""

    def write(self, piece):
        self.payload += piece
        if self.context.fails_at == "write":
            raise InvalidSnapshot("hostile")

    def put(self):
        if self.context.fails_at == "put":
            raise DecodeFailed("put failed")
        self.context.cells[self.seq_id] = []
        self.context._engine_import(self.seq_id, self.n_tokens, self.payload)
        if self.context.fails_at == "interrupt":
            raise KeyboardInterrupt

    def undo(self):
        self.context.cells[self.seq_id] = self.before


def test_a_staged_payload_replaces_the_old_sequence():
    source, context = Engine(), Staging()
    feed(source, range(9))
    feed(context, range(20, 35))
    context.fork(0, 1)
    context.restore_parts(0, source.dump_parts(0, 10))
    assert context.cells[0] == source.cells[0] and context.tokens(0) == tuple(range(9))
    assert context.n_free == 64 - 15 - 9
    assert "drop" not in context.calls


@pytest.mark.parametrize(
    ("place", "error"), [("write", InvalidSnapshot), ("put", DecodeFailed), ("interrupt", KeyboardInterrupt)]
)
def test_a_failed_staged_payload_changes_nothing(place, error):
    source, context = Engine(), Staging()
    feed(source, range(9))
    feed(context, range(20, 35))
    context.fork(0, 1)
    parts = context.dump_parts(0, 10)
    context.fails_at = place
    with assert_refused(context, error):
        context.restore(0, source.dump(0))
    with assert_refused(context, error):
        context.restore(2, source.dump(0))
    assert context.n_exclusive(0) == 0, "the old sequence is shared as before"
    assert b"".join(parts) == context.dump(0), "a dump that had begun before continues"
    context.drop(1)
    context.drop(0)
    assert context.n_free == 64


class Reserving(Staging):
    """An engine that reserves storage for restores in steps."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.reserved = {}

    def _engine_reserving_writer(self, seq_id, n_tokens, n_bytes):
        self.reserved[seq_id] = n_tokens
        return ReservingWriter(self, seq_id, n_tokens)


class ReservingWriter(Writer):
    def put(self):
        super().put()
        del self.context.reserved[self.seq_id]

    def undo(self):
        super().undo()
        self.context.reserved.pop(self.seq_id, None)


@pytest.mark.parametrize("new_context", [Engine, Reserving])
def test_a_restore_in_steps_reserves_its_positions_until_it_is_over(new_context):
    source, context = Engine(), new_context()
    feed(source, range(9))
    feed(context, range(20, 35))
    steps = context.restore_steps(1, source.dump_parts(0, 10))
    while context.n_free == 64 - 15:
        next(steps)
    assert (context.n_free, context.n_exclusive(1), context.length(1)) == (64 - 15 - 9, 9, 0)
    for first in range(0, 40, 16):
        feed(context, [1] * min(16, 40 - first), seq_id=2)
    with pytest.raises(ContextFull):
        feed(context, [1])
    assert list(steps)[-1:] in ([], [None])
    assert (context.tokens(1), context.cells[1], context.n_free) == (tuple(range(9)), source.cells[0], 0)
    assert next(steps, "over") == "over"


@pytest.mark.parametrize("n_made", range(0, 24, 3))
@pytest.mark.parametrize("call", ["drop", "clear", "close"])
def test_a_restore_that_is_given_up_frees_its_storage(n_made, call):
    source, context = Engine(), Reserving()
    feed(source, range(9))
    steps = context.restore_steps(1, source.dump_parts(0, 10))
    for _ in range(n_made):
        next(steps)
    context.drop(1) if call == "drop" else getattr(context, call)()
    with pytest.raises(ContextClosed if call == "close" else SequenceChanged):
        next(steps)
    assert context.n_free == 64
    if call != "close":
        assert context.reserved == {}


def test_an_iterator_that_is_garbage_changes_nothing():
    source, context = Engine(), Reserving()
    feed(source, range(9))
    steps = context.restore_steps(1, source.dump_parts(0, 10))
    next(steps)
    context.drop(1)
    feed(context, range(3), seq_id=1)
    del steps
    assert (context.tokens(1), context.n_free) == ((0, 1, 2), 61)


@pytest.mark.parametrize(
    ("place", "error"), [("write", InvalidSnapshot), ("put", DecodeFailed), ("interrupt", KeyboardInterrupt)]
)
def test_a_restore_whose_step_fails_leaves_the_sequence_empty(place, error):
    source, context = Engine(), Reserving()
    feed(source, range(9))
    feed(context, range(20, 35))
    context.fails_at = place
    steps = context.restore_steps(1, source.dump_parts(0, 10))
    with assert_refused(context, error):
        list(steps)
    with pytest.raises(error):
        next(steps)
    assert context.reserved == {}
    context.fails_at = ""
    list(context.restore_steps(1, source.dump_parts(0, 10)))
    assert context.tokens(1) == tuple(range(9))


def test_a_failed_exchange_of_another_sequence_keeps_a_restore():
    """``restore`` puts the whole ledger back after a failure."""
    source, context = Engine(), Reserving()
    feed(source, range(9))
    feed(context, range(5))
    steps = context.restore_steps(1, source.dump_parts(0, 10))
    while context.n_free == 64 - 5:
        next(steps)
    context.fails_at = "put"
    with assert_refused(context, DecodeFailed):
        context.restore(0, source.dump(0))
    context.fails_at = ""
    list(steps)
    assert (context.tokens(1), context.n_free) == (tuple(range(9)), 64 - 5 - 9)


def test_parts_that_call_the_context_are_refused_and_can_be_retried():
    context = Engine()
    feed(context, range(9))
    parts = context.dump_parts(0, 40)
    with assert_refused(context, ContextBusy):
        context.restore_parts(1, parts)
    assert b"".join(parts) == context.dump(0)


def test_all_parts_after_a_failed_part_fail():
    class Failing(Engine):
        def _engine_export(self, seq_id):
            def pieces():
                yield b"{}"
                raise DecodeFailed("the device is gone")

            return Pieces(100, pieces())

    context = Failing()
    feed(context, range(9))
    parts = context.dump_parts(0, 20)
    for _ in range(2):
        with pytest.raises(DecodeFailed, match="the device is gone"):
            list(parts)


def test_a_changed_sequence_raises_at_every_further_part():
    context = Engine()
    feed(context, range(9))
    parts = context.dump_parts(0, 40)
    before = state(context)
    next(parts)
    assert state(context) == before
    context.drop(0)
    for _ in range(2):
        with pytest.raises(SequenceChanged, match="sequence 0 was changed"):
            next(parts)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, PART_BYTES])
def test_a_container_has_the_same_bytes_whole_and_in_parts(size):
    sections = [b"abc", b"", bytes(range(256)) * 3]
    data = pack("kind", {"a": [1]}, sections)
    lazy = Pieces(768, iter([sections[2][:5], memoryview(sections[2][5:])]))
    assert b"".join(pack_parts("kind", {"a": [1]}, [*sections[:2], lazy], size)) == data
    incoming = Incoming("kind", (data[i : i + size] for i in range(0, len(data), size)))
    assert [b"".join(incoming.section(i)) for i in range(3)] == sections
    incoming.finish()
    assert unpack("kind", data) == ({"a": [1]}, sections)


def test_sections_receive_whole_units_for_any_split_of_the_bytes():
    writes = []
    sections = [
        Section(3, 5, lambda i, data: writes.append((0, i, data))),
        Section(0, 4, None),
        Section(2, 1, writes.append),
    ]
    sections[2] = sections[2]._replace(write=lambda i, data: writes.append((2, i, data)))
    writer, data = SectionWriter(sections), bytes(range(17))
    assert writer.n_bytes == 17
    with pytest.raises(InvalidSnapshot, match="ends early"):
        writer.check_whole()
    for first in range(0, 17, 7):
        writer.write(memoryview(data[first : first + 7]))
    writer.check_whole()
    assert b"".join(units for *_, units in writes) == data
    assert [(which, first) for which, first, _ in writes] == [(0, 0), (0, 1), (0, 2), (2, 0)][: len(writes)]
    with pytest.raises(InvalidSnapshot, match="1 bytes too many"):
        writer.write(memoryview(b"x"))
