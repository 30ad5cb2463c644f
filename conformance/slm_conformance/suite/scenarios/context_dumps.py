"""Dumps of whole contexts: all sequences are restored, and forks share storage as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from slm_conformance.oracle.twin import Oracle
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_core.container import pack, unpack
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import (
    ContextClosed,
    ContextFull,
    InvalidSequence,
    InvalidSnapshot,
    SequenceChanged,
    SnapshotMismatch,
)
from slm_core.protocols import Context
from slm_core.types import EditLevel, Pos

_N_CTX, _N_SEQ_MAX = 160, 6


class TestContextDumps(Scenarios):
    """Clause 18: in a restored context every sequence continues, and the context has as much room as before."""

    def test_goes_on(self, bench: Bench) -> None:
        """Clause 18: each sequence has its tokens and continues like the reference, including forks of forks."""
        context, reference = self._context(bench)
        other = self._restored(bench, context)
        for seq_id in range(_N_SEQ_MAX):
            assert other.tokens(seq_id) == context.tokens(seq_id), f"sequence {seq_id} holds other tokens than before"
            more = bench.tokens(6, seed=20 + seq_id)
            what = f"sequence {seq_id} of a context that was dumped"
            bench.agree(bench.feed(other, more, seq_id), reference.decode(more, seq_id), what)

    def test_shares_again(self, bench: Bench) -> None:
        """Clause 18: sequences share storage as before: ``n_free`` and ``n_exclusive`` are equal."""
        context, _ = self._context(bench)
        other = self._restored(bench, context)
        assert other.n_free == context.n_free, f"{other.n_free} positions are free, and {context.n_free} were"
        exclusive = [[one.n_exclusive(seq_id) for seq_id in range(_N_SEQ_MAX)] for one in (context, other)]
        assert exclusive[0] == exclusive[1], f"exclusive positions are {exclusive[1]}, and were {exclusive[0]}"
        for seq_id in (1, 0, 4):
            context.drop(seq_id)
            other.drop(seq_id)
            assert other.n_free == context.n_free, f"after dropping sequence {seq_id}, another number is free"
        for one, name in ((context, "dumped"), (other, "restored")):
            one.clear()
            bench.feed(one, bench.tokens(_N_CTX, seed=9), seq_id=2)
            assert one.n_free == 0, f"{_N_CTX} tokens do not fill a context that was {name} and cleared"

    def test_after_edits(self, bench: Bench) -> None:
        """Clause 18: cuts before and after a fork are restored, with the same room."""
        bench.requires(EditLevel.CUT)
        context, reference = self._context(bench)
        for seq_id, start, end in ((0, 2, 5), (3, 1, 4), (1, 21, 23)):
            context.cut(Pos(seq_id, start), Pos(seq_id, end))
            reference.cut(start, end, seq_id)
        context.drop(4)
        reference.drop(4)
        context.fork(0, 4, 12)
        reference.fork(0, 4, 12)
        other = self._restored(bench, context)
        assert other.n_free == context.n_free, f"{other.n_free} positions are free, and {context.n_free} were"
        for seq_id in range(_N_SEQ_MAX):
            edits = [SequenceSnapshot.from_bytes(one.dump(seq_id)).edits for one in (context, other)]
            assert edits[0] == edits[1], f"sequence {seq_id} has the edits {edits[1]}, and had {edits[0]}"
            more = bench.tokens(6, seed=20 + seq_id)
            what = f"sequence {seq_id} of a context that was dumped after cuts"
            bench.agree(bench.feed(other, more, seq_id), reference.decode(more, seq_id), what)

    def test_by_another_backend(self, bench: Bench) -> None:
        """Clauses 16 and 18: another backend's dump is decoded and cut again, or refused; then the context is empty."""
        context, reference = self._context(bench)
        if bench.edit_level >= EditLevel.CUT:
            for seq_id, start, end in ((0, 2, 5), (5, 4, 7)):
                context.cut(Pos(seq_id, start), Pos(seq_id, end))
                reference.cut(start, end, seq_id)
        other = bench.context(n_ctx=_N_CTX, n_seq_max=_N_SEQ_MAX)
        try:
            other.restore_context(_tiny_parts(foreign_context(b"".join(context.dump_context()))))
        except SnapshotMismatch:
            assert other.n_free == _N_CTX, f"a dump was refused, and {_N_CTX - other.n_free} positions are taken"
            bench.note("another backend's dump of a context is refused")
            return
        for seq_id in range(_N_SEQ_MAX):
            assert other.tokens(seq_id) == context.tokens(seq_id), f"sequence {seq_id} holds other tokens than before"
            more = bench.tokens(6, seed=20 + seq_id)
            what = f"sequence {seq_id} of a context that another backend dumped"
            bench.agree(bench.feed(other, more, seq_id), reference.decode(more, seq_id), what)

    def test_in_parts(self, bench: Bench) -> None:
        """Clauses 17 and 18: parts have the requested size; after a change of a sequence, or ``close``, they raise."""
        context, _ = self._context(bench)
        data = b"".join(context.dump_context())
        size = len(data) // 24
        parts = list(context.dump_context(size))
        is_same = b"".join(parts) == data
        assert is_same, "a context's dump in small parts is another dump"
        assert {len(part) for part in parts[:-1]} == {size}, f"parts are not of the {size} bytes that were asked for"
        ends: tuple[tuple[type[SequenceChanged | ContextClosed], Callable[[], object]], ...] = (
            (SequenceChanged, lambda: bench.feed(context, bench.tokens(1), seq_id=3)),
            (SequenceChanged, lambda: context.drop(0)),
            (ContextClosed, lambda: context.close()),
        )
        for error, change in ends:
            open_parts = context.dump_context(size)
            next(open_parts)
            change()
            with bench.refused(f"a part of a context's dump that wants {error.__name__}", error):
                next(open_parts)

    def test_of_an_empty_context(self, bench: Bench) -> None:
        """Clause 18: an empty context can be dumped, too."""
        other = bench.context()
        other.restore_context(bench.context().dump_context())
        assert other.n_free == other.n_ctx, "a dump of nothing takes positions"

    def test_refusals(self, bench: Bench) -> None:
        """Clauses 1 and 18: a non-empty context, too little room, and invalid parts are refused; nothing changes."""
        context, _ = self._context(bench)
        data = b"".join(context.dump_context())
        with bench.refused("a context that holds tokens", InvalidSequence, context=context):
            context.restore_context([data])
        other = bench.context(n_ctx=_N_CTX, n_seq_max=_N_SEQ_MAX)
        half = len(data) // 2
        bad = {"half of it": data[:half], "nothing": b"", "a byte more": data + b"\0", "one sequence": context.dump(0)}
        bad |= {
            f"byte {at} changed": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (9, half, len(data) - 1)
        }
        for what, wrong in bad.items():
            with bench.refused(f"a context's dump: {what}", InvalidSnapshot, SnapshotMismatch, context=other):
                other.restore_context([wrong])
        n_taken = context.n_ctx - context.n_free
        small = bench.context(n_ctx=n_taken - 1, n_seq_max=_N_SEQ_MAX)
        with bench.refused(f"{n_taken} positions into {n_taken - 1}", ContextFull, context=small):
            small.restore_context([data])
        few = bench.context(n_ctx=_N_CTX, n_seq_max=_N_SEQ_MAX - 2)
        with bench.refused("more sequences than there are", InvalidSequence, context=few):
            few.restore_context([data])
        for refusing in (other, small):
            tokens = bench.tokens(20, seed=9)
            what = "what follows a context's dump that was refused"
            bench.agree(bench.feed(refusing, tokens), bench.oracle().decode(tokens), what)

    @staticmethod
    def _restored(bench: Bench, context: Context) -> Context:
        other = bench.context(n_ctx=_N_CTX, n_seq_max=_N_SEQ_MAX)
        other.restore_context(_tiny_parts(b"".join(context.dump_context())))
        return other

    @staticmethod
    def _context(bench: Bench) -> tuple[Context, Oracle]:
        """A context and its reference: with forks of forks, of parts if the edit level allows; sequence 2 is empty."""
        context, reference = bench.context(n_ctx=_N_CTX, n_seq_max=_N_SEQ_MAX), bench.oracle()

        def feed(n: int, seq_id: int) -> None:
            tokens = bench.tokens(n, seed=seq_id)
            bench.feed(context, tokens, seq_id)
            reference.decode(tokens, seq_id)

        def fork(src: int, dst: int, end: int | None = None) -> None:
            context.fork(src, dst, end)
            reference.fork(src, dst, end)

        feed(20, 0)
        fork(0, 1)
        feed(5, 1)
        can_part = bench.edit_level >= EditLevel.TRUNCATE
        fork(1, 3, 12 if can_part else None)
        feed(6, 3)
        fork(3, 4)
        feed(9, 5)
        if can_part:
            context.truncate(Pos(0, 17))
            reference.truncate(17, 0)
        return context, reference


def foreign_context(data: bytes) -> bytes:
    """The same dump of a context as another backend would make it.

    Raises:
        SnapshotMismatch: the backend has a format of its own for dumps of contexts.
    """
    with contextlib.suppress(SnapshotMismatch):
        meta, dumps = unpack("toy context", data)
        return pack("toy context", meta, [foreign(SequenceSnapshot.from_bytes(dump)).to_bytes() for dump in dumps])
    meta, sections = unpack("context", data)
    for *_, sequence_meta in meta["sequences"]:  # type: ignore[attr-defined]
        sequence_meta |= {"backend": "stranger", "payload_format": "stranger-9"}
    return pack("context", meta, sections)


def _tiny_parts(data: bytes) -> Iterator[bytes]:
    """A dump in parts with arbitrary ends."""
    size = len(data) // 24
    return (data[first : first + size] for first in range(0, len(data), size))
