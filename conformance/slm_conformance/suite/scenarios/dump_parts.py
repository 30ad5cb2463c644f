"""Dumps in parts: other sequences may change between two parts, and a restore is all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pytest

from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import (
    ContextClosed,
    ContextFull,
    InvalidOption,
    InvalidSequence,
    InvalidSnapshot,
    SequenceChanged,
    SlmError,
    SnapshotMismatch,
)
from slm_core.protocols import Context
from slm_core.types import EditLevel, Logits, Pos

_N_PARTS = 24
_MOST = 8 << 20


class TestDumpParts(Scenarios):
    """Clause 17: the parts join to the dump, whatever happens to other sequences between two parts."""

    def test_are_the_dump(self, bench: Bench) -> None:
        """Clause 17: all parts but the last have the requested size; together they are the dump."""
        context = bench.context()
        bench.feed(context, bench.tokens(20))
        for seq_id in (0, 1):
            data = context.dump(seq_id)
            for part_bytes in (_size(data), len(data) // 2, len(data) - 1, len(data), len(data) + 1, None):
                sized = context.dump_parts(seq_id) if part_bytes is None else context.dump_parts(seq_id, part_bytes)
                parts, size = list(sized), part_bytes or _MOST
                is_same = b"".join(parts) == data
                assert is_same, f"parts of {size} bytes are not the dump of sequence {seq_id}"
                sizes = {len(part) for part in parts[:-1]}
                assert sizes <= {size}, f"parts of {size} bytes were asked for, and there are some of {sizes}"
                assert 0 < len(parts[-1]) <= size, f"the last part of {size} bytes has {len(parts[-1])}"

    def test_sizes_and_sequences_that_do_not_exist(self, bench: Bench) -> None:
        """Clauses 1 and 17: an illegal dump is refused by the call, not by the first part."""
        context = bench.context(n_seq_max=2)
        bench.feed(context, bench.tokens(5))
        for part_bytes in (0, -1, _MOST + 1):
            with bench.refused(f"parts of {part_bytes} bytes", InvalidOption, context=context):
                context.dump_parts(0, part_bytes)
        for seq_id in (2, -1):
            with bench.refused(f"dump_parts of sequence {seq_id} of 2", InvalidSequence, context=context):
                context.dump_parts(seq_id)

    def test_others_go_on_between_parts(self, bench: Bench) -> None:
        """Clause 17: other sequences may be decoded, forked, cut and dropped between two parts; parts do not change."""
        context, tokens = bench.context(n_ctx=512), bench.tokens(30)
        bench.feed(context, tokens[:20])
        context.fork(0, 1)
        bench.feed(context, bench.tokens(9, seed=3), seq_id=2)
        data, parts = context.dump(0), []
        for i, part in enumerate(context.dump_parts(0, _size(data))):
            parts.append(part)
            if i < 6:
                _change_others(bench, context, i)
        assert len(parts) > 6, f"a dump of {len(data)} bytes in parts of {_size(data)} has {len(parts)} parts"
        assert b"".join(parts) == data, "the parts of a dump are another dump, as other sequences went on between them"
        other = bench.context()
        other.restore(0, b"".join(parts))
        bench.agree(bench.feed(other, tokens[20:]), bench.oracle().decode(tokens)[20:], "a dump whose parts took turns")
        bench.agree(bench.feed(context, tokens[20:]), bench.oracle().decode(tokens)[20:], "a sequence dumped in parts")

    def test_two_at_once(self, bench: Bench) -> None:
        """Clause 17: two dumps of one sequence, or of two, may alternate part by part."""
        context = bench.context()
        for seq_id in (0, 1):
            bench.feed(context, bench.tokens(20, seed=seq_id), seq_id)
        data = [context.dump(seq_id) for seq_id in (0, 1, 0)]
        open_dumps, got = [context.dump_parts(i, _size(data[0])) for i in (0, 1, 0)], [b"", b"", b""]
        for i in range(3 * 2 * _N_PARTS):
            got[i % 3] += next(open_dumps[i % 3], b"")
        is_same = got == data  # not in the assert: pytest would compare the bytes for a minute where CI is set
        assert is_same, "the parts of dumps that took turns are not the dumps"

    def test_of_a_sequence_that_changes(self, bench: Bench) -> None:
        """Clause 17: after a change of the sequence, the next part raises ``SequenceChanged``; the context works on."""
        tokens = bench.tokens(30)
        changes: dict[str, Callable[[Context], object]] = {
            "decoded": lambda context: bench.feed(context, tokens[20:22]),
            "dropped": lambda context: context.drop(0),
            "restored": lambda context: context.restore(0, context.dump(0)),
        }
        if bench.edit_level >= EditLevel.TRUNCATE:
            changes["truncated"] = lambda context: context.truncate(Pos(0, 12))
        if bench.edit_level >= EditLevel.CUT:
            changes["cut"] = lambda context: context.cut(Pos(0, 3), Pos(0, 7))
        for what, change in changes.items():
            for n_parts in (0, 2):
                context = bench.context()
                bench.feed(context, tokens[:20])
                parts = context.dump_parts(0, _size(context.dump(0)))
                for _ in range(n_parts):
                    next(parts)
                change(context)
                why = f"the part after {n_parts} of a dump of a sequence that was {what}"
                with bench.refused(why, SequenceChanged, context=context):
                    next(parts)
                context.drop(0)
                bench.agree(bench.feed(context, tokens), bench.oracle().decode(tokens), f"what follows {why}")

    def test_of_a_context_that_is_closed(self, bench: Bench) -> None:
        """Clauses 10 and 17: after ``close``, the next part raises ``ContextClosed``."""
        context = bench.context()
        bench.feed(context, bench.tokens(20))
        parts = context.dump_parts(0, _size(context.dump(0)))
        next(parts)
        context.close()
        for _ in range(2):
            with bench.refused("a part of a dump after the context was closed", ContextClosed):
                next(parts)

    def test_given_up(self, bench: Bench) -> None:
        """Clause 17: an abandoned iterator holds no positions, even if it is still referenced."""
        context, tokens = bench.context(n_ctx=40), bench.tokens(40)
        bench.feed(context, tokens[:20])
        iterators = [context.dump_parts(0, _size(context.dump(0))) for _ in range(9)]
        for parts in iterators:
            next(parts)
        assert context.n_free == 20, f"dumps that are not finished take positions: {context.n_free} of 20 are free"
        context.drop(0)
        assert context.n_free == 40, f"dumps that were given up hold positions: {context.n_free} of 40 are free"
        bench.agree(bench.feed(context, tokens), bench.oracle().decode(tokens), "40 tokens, after dumps were given up")
        del iterators  # referenced until here


class TestRestoreParts(Scenarios):
    """Clause 17: a dump in parts is restored, or refused, like the dump as a whole."""

    def test_of_any_size(self, bench: Bench) -> None:
        """Clauses 6 and 17: parts of any size, including empty ones, restore the same sequence as the dump."""
        data, tokens = _dump(bench)
        for is_own, dump in ((True, data), (False, _foreign(data))):
            for sizes in ((_size(dump),), (7, 0, _size(dump)), (len(dump),), (10, len(dump)), (0, len(dump) // 2)):
                context = bench.context()
                bench.feed(context, bench.tokens(9, seed=5))
                what = f"{'a' if is_own else 'another backend'}'s dump in parts of {sizes} bytes"
                assert context.restore_parts(0, _in_parts(dump, sizes)) == Pos(0, 20), f"{what}: 20 tokens were dumped"
                assert context.tokens(0) == tuple(tokens[:20]), f"{what}: other tokens than were dumped"
                assert context.n_free == context.n_ctx - 20, f"{what}: the tokens take {context.n_free} positions"
                expected = bench.oracle().decode(tokens)[20:]
                bench.agree(bench.feed(context, tokens[20:]), expected, what)

    def test_from_a_context(self, bench: Bench) -> None:
        """Clause 17: a context can restore parts while another context yields them, with all edits."""
        context, other, tokens = bench.context(), bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20])
        reference = bench.oracle()
        reference.decode(tokens[:20])
        if bench.edit_level >= EditLevel.CUT:
            context.cut(Pos(0, 3), Pos(0, 7))
            reference.cut(3, 7)
        data = context.dump(0)
        other.restore_parts(2, context.dump_parts(0, _size(data)))
        assert other.tokens(2) == context.tokens(0), "what was restored in parts holds other tokens"
        edits = [SequenceSnapshot.from_bytes(dump).edits for dump in (data, other.dump(2))]
        assert edits[0] == edits[1], f"the dump has the edits {edits[0]}, what was restored in parts has {edits[1]}"
        bench.agree(bench.feed(other, tokens[20:], seq_id=2), reference.decode(tokens[20:]), "a dump restored in parts")

    def test_over_what_a_sequence_holds(self, bench: Bench) -> None:
        """Clause 17: ``restore_parts`` replaces the sequence and nothing else, even without room for both."""
        data, tokens = _dump(bench)
        for n_ctx in (100, 50):
            context, theirs = bench.context(n_ctx=n_ctx), bench.tokens(30, seed=2)
            bench.feed(context, bench.tokens(28, seed=1), seq_id=0)
            bench.feed(context, theirs[:20], seq_id=1)
            context.restore_parts(0, _in_parts(data, (_size(data),)))
            assert context.n_free == n_ctx - 40, f"of {n_ctx} positions, {context.n_free} are free, not {n_ctx - 40}"
            what = f"in a context of {n_ctx}"
            more = min(10, context.n_free // 2)
            expected = bench.oracle().decode(theirs)[20 : 20 + more]
            bench.agree(bench.feed(context, theirs[20 : 20 + more], seq_id=1), expected, f"its neighbour {what}")
            expected = bench.oracle().decode(tokens)[20 : 20 + more]
            bench.agree(bench.feed(context, tokens[20 : 20 + more]), expected, f"a sequence restored in parts {what}")

    def test_that_are_not_a_dump(self, bench: Bench) -> None:
        """Clauses 6 and 17: missing, changed, reordered or additional parts raise and change nothing."""
        data, _ = _dump(bench)
        parts = list(_in_parts(data, (_size(data),)))
        indices = (0, len(parts) // 2, len(parts) - 1)
        bad: dict[str, Sequence[bytes]] = {f"without part {i}": [*parts[:i], *parts[i + 1 :]] for i in indices}
        bad |= {f"with part {i} changed": [*parts[:i], _changed(parts[i]), *parts[i + 1 :]] for i in indices}
        bad |= {"with a part twice": [*parts[:2], *parts[1:]], "in another order": [parts[0], *parts[:0:-1]]}
        bad |= {"with a byte more": [*parts, b"\0"], "that are a dump twice": [*parts, *parts], "that are none": []}
        bad |= {"one of which is empty, and no other": [b""], "cut off": [*parts[:-1], parts[-1][:-1]]}
        bad |= {"one of which is a text": [*parts[:-1], "text"]}  # type: ignore[list-item]
        self._refused(bench, bad, InvalidSnapshot, SnapshotMismatch)

    def test_without_room(self, bench: Bench) -> None:
        """Clauses 1 and 17: a dump in parts that does not fit raises ``ContextFull`` and changes nothing."""
        data, _ = _dump(bench)
        context, tokens = bench.context(n_ctx=32), bench.tokens(12, seed=7)
        bench.feed(context, tokens[:8])
        bench.feed(context, bench.tokens(20, seed=8), seq_id=1)
        for what, dump in (("a dump", data), ("a dump of another backend", _foreign(data))):
            with bench.refused(f"{what} of 20 tokens, in parts, where 12 fit", ContextFull, context=context):
                context.restore_parts(0, _in_parts(dump, (_size(dump),)))
        context.drop(1)
        bench.agree(
            bench.feed(context, tokens[8:]), bench.oracle().decode(tokens)[8:], "what follows parts without room"
        )

    def test_that_cannot_be_read(self, bench: Bench) -> None:
        """Clauses 1 and 17: an exception of the iterator is raised, at any part, and nothing has changed."""
        data, _ = _dump(bench)
        n_parts = -(-len(data) // _size(data))
        context, tokens = bench.context(), bench.tokens(24, seed=7)
        bench.feed(context, tokens[:12])
        before = contents_of(context)
        for error in (OSError("the connection was lost"), KeyboardInterrupt()):
            for n in sorted({0, 1, n_parts // 2, n_parts}):
                with pytest.raises(type(error)):
                    context.restore_parts(0, _broken(data, n, error))
                assert contents_of(context) == before, f"part {n} could not be read, and the context has changed"
        expected = bench.oracle().decode(tokens)[12:]
        bench.agree(bench.feed(context, tokens[12:]), expected, "what follows parts that could not be read")

    @staticmethod
    def _refused(bench: Bench, dumps: dict[str, Sequence[bytes]], *errors: type[SlmError]) -> None:
        context, tokens = bench.context(), bench.tokens(16, seed=7)
        bench.feed(context, tokens[:12])
        for what, parts in dumps.items():
            with bench.refused(f"parts {what}", *errors, context=context):
                context.restore_parts(0, iter(parts))
        expected = bench.oracle().decode(tokens)[12:]
        bench.agree(bench.feed(context, tokens[12:]), expected, "what follows parts that were refused")


class TestRestoreSteps(Scenarios):
    """Clause 17: other sequences may change between two steps of a restore, which is all or nothing."""

    def test_others_go_on_between_steps(self, bench: Bench) -> None:
        """Clauses 6 and 17: the restored sequence and its neighbours continue as if alone, with all edits."""
        data, tokens = _dump(bench)
        for is_own, dump in ((True, data), (False, _foreign(data))):
            context, theirs = bench.context(n_ctx=128), bench.tokens(60, seed=3)
            bench.feed(context, theirs[:8], seq_id=1)
            rows, n_steps = [], 0
            for _ in context.restore_steps(0, _in_parts(dump, (_size(data),))):
                assert context.length(0) == 0, f"a sequence has tokens before the last step, {n_steps + 1} were made"
                if n_steps < 20:
                    rows.append(_decode_neighbour(bench, context, n_steps, theirs))
                n_steps += 1
            what = f"{'a' if is_own else 'another backend'}'s dump restored in {n_steps} steps"
            assert n_steps >= min(20, len(dump) // _size(data) // 2), f"{what} of {len(dump)} bytes"
            assert context.tokens(0) == tuple(tokens[:20]), f"{what}: other tokens than were dumped"
            context.drop(2)
            n_taken = 20 + context.length(1)
            assert context.n_free == context.n_ctx - n_taken, f"{what}: {context.n_free} positions are free"
            expected = bench.oracle().decode(theirs)[8 : 8 + len(rows)]
            bench.agree(np.concatenate(rows), expected, f"the neighbour of {what}")
            bench.agree(bench.feed(context, tokens[20:]), bench.oracle().decode(tokens)[20:], what)

    def test_given_up(self, bench: Bench) -> None:
        """Clause 17: ``drop`` and ``clear`` give up a restore after any step, any number of times; its room is free."""
        data, tokens = _dump(bench)
        context, expected = bench.context(n_ctx=40), bench.oracle().decode(tokens)
        for i, n_steps in enumerate((0, 1, 3, _N_PARTS - 2) * 4):
            steps = context.restore_steps(0, _in_parts(data, (_size(data),)))
            for _ in range(n_steps):
                next(steps)
                n_free, n_taken = context.n_free, context.n_exclusive(0)
                assert n_free + n_taken == 40 and n_taken <= 20, (
                    f"{n_taken} of 40 positions are held, {n_free} are free"
                )
            context.clear() if i // 4 % 2 else context.drop(0)
            assert context.n_free == 40, (
                f"a restore was given up after {n_steps} steps: {context.n_free} of 40 are free"
            )
            with bench.refused(f"a step of a restore that was given up after {n_steps}", SequenceChanged):
                next(steps)
            bench.agree(bench.feed(context, tokens), expected, f"what follows a restore given up after {n_steps} steps")
            context.drop(0)

    def test_calls_that_fill_the_sequence(self, bench: Bench) -> None:
        """Clauses 1 and 17: until the last step, calls that would fill the sequence are refused; it is restored."""
        data, tokens = _dump(bench)
        context = bench.context()
        bench.feed(context, bench.tokens(9, seed=3), seq_id=1)
        with bench.refused("a restore in steps of a sequence that is not empty", InvalidSequence, context=context):
            context.restore_steps(1, [data])
        steps = context.restore_steps(0, _in_parts(data, (_size(data),)))
        next(steps)
        calls: dict[str, Callable[[], object]] = {
            "decode": lambda: bench.feed(context, tokens[:2]),
            "fork": lambda: context.fork(1, 0),
            "restore": lambda: context.restore(0, data),
            "restore_parts": lambda: context.restore_parts(0, [data]),
            "restore_steps": lambda: context.restore_steps(0, [data]),
        }
        for name, call in calls.items():
            with bench.refused(f"{name} into a sequence that is being restored", InvalidSequence, context=context):
                call()
        for _ in steps:
            pass
        bench.agree(bench.feed(context, tokens[20:]), bench.oracle().decode(tokens)[20:], "what follows a restore")

    def test_that_are_not_a_dump(self, bench: Bench) -> None:
        """Clauses 6 and 17: damaged or missing parts raise at the last step or before; the sequence is empty."""
        data, _ = _dump(bench)
        parts = list(_in_parts(data, (_size(data),)))
        bad: dict[str, Sequence[bytes]] = {
            f"without part {i}": [*parts[:i], *parts[i + 1 :]] for i in range(len(parts))
        }
        bad |= {f"with part {i} changed": [*parts[:i], _changed(part), *parts[i + 1 :]] for i, part in enumerate(parts)}
        bad |= {"with a byte more": [*parts, b"\0"], "that are none": [], "cut off": [*parts[:-1], parts[-1][:-1]]}
        bad |= {"one of which is a text": [*parts[:-1], "text"]}  # type: ignore[list-item]
        damaged = {what: partial(iter, wrong_parts) for what, wrong_parts in bad.items()}
        self._refused(bench, damaged, InvalidSnapshot, SnapshotMismatch)

    def test_that_cannot_be_read(self, bench: Bench) -> None:
        """Clauses 1 and 17: an exception of the iterator is raised, at any part; the sequence is empty."""
        data, _ = _dump(bench)
        for error in (OSError("the connection was lost"), KeyboardInterrupt()):
            broken = {f"of which {n} can be read": partial(_broken, data, n, error) for n in range(_N_PARTS)}
            self._refused(bench, broken, type(error))

    def test_without_room(self, bench: Bench) -> None:
        """Clauses 1 and 17: a dump that does not fit raises ``ContextFull``; the sequence is empty."""
        data, _ = _dump(bench)
        parts = list(_in_parts(data, (_size(data),)))
        self._refused(bench, {"of 20 tokens, where 19 fit": lambda: parts}, ContextFull, n_free=19)

    @staticmethod
    def _refused(
        bench: Bench,
        dumps: Mapping[str, Callable[[], Iterable[bytes]]],
        *errors: type[BaseException],
        n_free: int = 40,
    ) -> None:
        context, theirs, tokens = bench.context(n_ctx=n_free + 12), bench.tokens(16, seed=7), bench.tokens(19)
        bench.feed(context, theirs[:12], seq_id=1)
        before = contents_of(context)
        for what, parts in dumps.items():
            with pytest.raises(errors):
                for _ in context.restore_steps(0, parts()):
                    pass
            assert contents_of(context) == before, f"parts {what} were refused in steps, and the context has changed"
        bench.agree(bench.feed(context, tokens[:15]), bench.oracle().decode(tokens[:15]), "what follows refused steps")
        expected = bench.oracle().decode(theirs)[12:]
        bench.agree(bench.feed(context, theirs[12:], seq_id=1), expected, "the neighbour of refused steps")


def _decode_neighbour(bench: Bench, context: Context, i: int, theirs: Sequence[int]) -> Logits:
    """Decode the next of the tokens ``theirs`` in sequence 1, after other sequences took and freed positions."""
    if i % 3 == 1:
        context.drop(2)
        bench.feed(context, bench.tokens(20, seed=i), seq_id=2)
    elif i % 3 == 2:
        context.drop(2)
        context.fork(1, 2)
    return bench.feed(context, [theirs[8 + i]], seq_id=1)


def _dump(bench: Bench) -> tuple[bytes, list[int]]:
    """A dump of 20 tokens, and 30 tokens that begin with them."""
    context, tokens = bench.context(), bench.tokens(30)
    bench.feed(context, tokens[:20])
    return context.dump(0), tokens


def _size(data: bytes) -> int:
    """A part size in bytes that gives a few more parts than ``_N_PARTS``."""
    return len(data) // _N_PARTS


def _foreign(data: bytes) -> bytes:
    return foreign(SequenceSnapshot.from_bytes(data)).to_bytes()


def _in_parts(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """A dump in parts of these sizes, repeated cyclically."""
    first = i = 0
    while first < len(data):
        size = sizes[i % len(sizes)]
        yield data[first : first + size]
        first, i = first + size, i + 1


def _changed(part: bytes) -> bytes:
    middle = len(part) // 2
    return part[:middle] + bytes([part[middle] ^ 1]) + part[middle + 1 :]


def _broken(data: bytes, n: int, error: BaseException) -> Iterator[bytes]:
    """The first parts of a dump, then an error."""
    for i, part in enumerate(_in_parts(data, (_size(data),))):
        if i == n:
            break
        yield part
    raise error


def _change_others(bench: Bench, context: Context, i: int) -> None:
    """Change the sequences other than 0; sequence 1 is a fork of it."""
    match i:
        case 0 | 3:
            bench.feed(context, bench.tokens(11, seed=i), seq_id=1)
        case 1 if bench.edit_level >= EditLevel.CUT:
            context.cut(Pos(1, 2), Pos(1, 8))
        case 2:
            context.drop(2)
        case 4:
            context.fork(0, 3)
            bench.feed(context, bench.tokens(70, seed=4), seq_id=3)
        case 5:
            context.drop(1)
            context.drop(3)
