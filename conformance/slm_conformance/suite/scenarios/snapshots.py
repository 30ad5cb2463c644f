"""Dumps: a restored sequence continues in another context, and invalid dumps are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest

from slm_conformance.oracle.twin import Oracle
from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.tolerance import KV_LEVELS
from slm_conformance.suite.workshop import N_OTHER_PROCESS
from slm_conformance.toy.backend import ToyBackend
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import ContextFull, InvalidSequence, InvalidSnapshot, SlmError, SnapshotMismatch
from slm_core.protocols import Context
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, ModelOptions, Pos

_KV_BYTES = {
    KvType.F32: 4,
    KvType.F16: 2,
    KvType.BF16: 2,
    KvType.Q8_0: 34 / 32,
    KvType.Q6_0: 26 / 32,
    KvType.Q5_0: 22 / 32,
    KvType.Q4_0: 18 / 32,
    KvType.F8_E4M3: 1,
}
"""Bytes of one number of each type."""


class TestDumpRestore(Scenarios):
    """Clause 6: a restored sequence continues as the dumped one would."""

    on_one_model = ("test_in_another_process",)

    def test_in_another_context(self, bench: Bench) -> None:
        """Clause 6: a dump continues in a context of other sizes."""
        data, tokens = self._dump(bench)
        other = bench.context(n_ctx=64, n_seq_max=2, n_batch=16)
        assert other.restore(1, data) == Pos(1, 20), "restore says where the next token goes: position 20"
        self._check_continues(bench, other, 1, tokens, "a dump restored in another context")

    def test_in_another_sequence(self, bench: Bench) -> None:
        """Clause 6: a dump continues in another sequence of the same context."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20], seq_id=3)
        context.restore(1, context.dump(3))
        self._check_continues(bench, context, 1, tokens, "a dump restored in another sequence")
        self._check_continues(bench, context, 3, tokens, "the sequence it was taken from")

    def test_in_the_same_sequence(self, bench: Bench) -> None:
        """Clause 6: restoring an earlier dump undoes the tokens that were decoded since, in a full context, too."""
        for n_ctx, n in ((256, 20), (224, 200)):
            context, tokens = bench.context(n_ctx=n_ctx, n_seq_max=1, n_batch=n_ctx), bench.tokens(n + 10)
            bench.feed(context, tokens[:n])
            data = context.dump(0)
            bench.feed(context, bench.tokens(12, seed=1))
            context.restore(0, data)
            assert context.n_free == n_ctx - n, "the tokens that restore replaced still take positions"
            assert context.tokens(0) == tuple(tokens[:n]), "a restored sequence holds other tokens than were dumped"
            expected = bench.oracle().decode(tokens)[n:]
            bench.agree(bench.feed(context, tokens[n:]), expected, f"a dump of {n} tokens, over its own continuation")

    def test_in_place_of_another_history(self, bench: Bench) -> None:
        """Clause 6: ``restore`` replaces the tokens of one sequence, and changes nothing else."""
        data, tokens = self._dump(bench)
        context, theirs = bench.context(), bench.tokens(30, seed=2)
        bench.feed(context, bench.tokens(33, seed=1), seq_id=0)
        bench.feed(context, theirs[:20], seq_id=1)
        context.restore(0, data)
        self._check_continues(bench, context, 0, tokens, "a dump restored over another history")
        self._check_continues(bench, context, 1, theirs, "the neighbour of a restored sequence")

    def test_between_two_tokens(self, bench: Bench) -> None:
        """Clause 6: each of 5 steps of a generation continues in a new context from a dump."""
        context, tokens = bench.context(), bench.tokens(20)
        bench.feed(context, tokens[:15])
        rows = []
        for token in tokens[15:]:
            moved = bench.context()
            moved.restore(0, context.dump(0))
            rows.append(bench.feed(moved, [token]))
            context = moved
        bench.agree(np.concatenate(rows), bench.oracle().decode(tokens)[15:], "a generation that moves 5 times")

    def test_with_each_kv_type(self, bench: Bench) -> None:
        """Clause 6: with each KV type, dumps of any length continue as the dumped sequences do."""
        for kv_type in bench.kv_types:
            for n in (1, 7, 70):
                context, other = (bench.context(n_batch=n + 3, kv_type=kv_type) for _ in range(2))
                tokens = bench.tokens(n + 3)
                bench.feed(context, tokens[:n])
                other.restore(1, context.dump(0))
                rows, expected = bench.feed(other, tokens[n:], seq_id=1), bench.feed(context, tokens[n:])
                what = f"3 tokens after a dump of {n} with a {kv_type.value} KV cache"
                bench.agree_in_the_mean(rows, expected, what, kv_type)

    def test_after_edits(self, bench: Bench) -> None:
        """Clause 6: a dump of a sequence with cuts continues as the reference does."""
        bench.requires(EditLevel.CUT)
        context, other, reference = bench.context(), bench.context(), bench.oracle()
        _make_history(bench, context, reference)
        other.restore(2, context.dump(0))
        assert other.tokens(2) == context.tokens(0), "the restored sequence holds other tokens than the dumped one"
        more = bench.tokens(6, seed=9)
        bench.agree(
            bench.feed(other, more, seq_id=2), reference.decode(more), "a dump of a sequence that was cut twice"
        )
        bench.agree(bench.feed(other, more[:1], seq_id=2), reference.decode(more[:1]), "and one token later")

    def test_of_an_empty_sequence(self, bench: Bench) -> None:
        """Clause 6: an empty sequence can be dumped, and restoring its dump empties a sequence."""
        context, tokens = bench.context(), bench.tokens(12)
        data = context.dump(2)
        before = bench.feed(context, tokens)
        assert context.restore(0, data) == Pos(0, 0), "after restoring an empty sequence, position 0 is next"
        assert context.n_free == context.n_ctx, "restoring an empty sequence did not free the positions"
        bench.same(bench.feed(context, tokens), before, "a prompt after restoring an empty sequence")

    def test_leaves_the_dumped_sequence(self, bench: Bench) -> None:
        """Clause 6: ``dump`` changes nothing, and a second dump has equal bytes."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20])
        first, second = context.dump(0), context.dump(0)
        assert first == second, "two dumps of the same sequence differ"
        self._check_continues(bench, context, 0, tokens, "a sequence that was dumped")

    def test_by_another_backend(self, bench: Bench) -> None:
        """Clause 6: another backend's dump is decoded and cut again, as its payload cannot be read."""
        context, other, reference = bench.context(), bench.context(), bench.oracle()
        _make_history(bench, context, reference)
        data = _foreign(context.dump(0))
        bench.feed(other, bench.tokens(9, seed=4), seq_id=1)
        assert other.restore(1, data) == Pos(1, context.length(0)), "restore returned another place"
        more = bench.tokens(6, seed=9)
        bench.agree(bench.feed(other, more, seq_id=1), reference.decode(more), "a dump of another backend")
        copy = bench.context()
        copy.restore(0, _foreign(other.dump(1)))
        more = bench.tokens(6, seed=10)
        bench.agree(bench.feed(copy, more), reference.decode(more), "a dump that went through two backends")

    def test_to_the_toy_and_back(self, bench: Bench) -> None:
        """Clause 6: a dump goes to another engine, the toy, and comes back with its edits."""
        bench.requires_toy()
        context, back, reference = bench.context(), bench.context(), bench.oracle()
        _make_history(bench, context, reference)
        with ToyBackend().load(bench.path, ModelOptions()) as toy, toy.new_context(ContextOptions(256, 2, 64)) as other:
            other.restore(1, context.dump(0))
            more = bench.tokens(6, seed=9)
            expected = reference.decode(more)
            bench.agree(bench.feed(other, more, seq_id=1), expected, "the dump, as the toy continues with it")
            back.restore(3, other.dump(1))
        more = bench.tokens(6, seed=10)
        bench.agree(
            bench.feed(back, more, seq_id=3), reference.decode(more), "the toy's dump, as the backend continues"
        )

    def test_payload_as_declared(self, bench: Bench) -> None:
        """Clause 6: a dump has a payload, hardly larger than the KV cache, if ``KV_PAYLOAD`` is declared, else none."""
        context = bench.context()
        bench.feed(context, bench.tokens(64))
        payload = SequenceSnapshot.from_bytes(context.dump(0)).payload
        if Capability.KV_PAYLOAD not in bench.capabilities:
            assert payload == b"", f"kv_payload is not declared, but a dump has a payload of {len(payload)} bytes"
            return
        assert payload, "kv_payload is declared, but the dump of 64 tokens has no payload"
        kv_bytes = bench.weights().kv_bytes(64, _KV_BYTES[bench.kv_type])
        assert len(payload) <= 1.1 * kv_bytes, (
            f"the payload of 64 tokens takes {len(payload)} bytes, their keys and values take {kv_bytes}"
        )

    def test_in_another_process(self, bench: Bench) -> None:
        """Clause 6: a dump can be restored in another process."""
        first, context = bench.tokens(N_OTHER_PROCESS), bench.context()
        context.restore(0, bench.in_another_process().dump)
        tokens = [*first, *bench.tokens(10, seed=1)]
        self._check_continues(bench, context, 0, tokens, "a dump made in another process", len(first))

    @staticmethod
    def _dump(bench: Bench) -> tuple[bytes, list[int]]:
        """A dump of 20 tokens, and 30 tokens that begin with them."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20])
        return context.dump(0), tokens

    @staticmethod
    def _check_continues(
        bench: Bench, context: Context, seq_id: int, tokens: list[int], what: str, n: int = 20
    ) -> None:
        assert context.tokens(seq_id) == tuple(tokens[:n]), f"{what}: it holds other tokens than were dumped"
        bench.agree(bench.feed(context, tokens[n:], seq_id), bench.oracle().decode(tokens)[n:], what)


class TestBadDumps(Scenarios):
    """Clause 6: bytes that are not a valid dump of this model raise and change nothing."""

    def test_not_a_dump(self, bench: Bench) -> None:
        """Clause 6: random bytes, no bytes, and a dump with trailing bytes are refused."""
        data = self._data(bench)
        random = np.random.default_rng(3).bytes(500)
        for what, other in (("no bytes", b""), ("random bytes", random), ("a dump and a byte more", data + b"\0")):
            self._refused(bench, [(what, other)])

    def test_of_another_model(self, bench: Bench) -> None:
        """Clause 6: a valid dump of another model raises ``SnapshotMismatch``."""
        snapshot = SequenceSnapshot.from_bytes(self._data(bench))
        other = dataclasses.replace(snapshot, fingerprint="0" * len(snapshot.fingerprint))
        self._refused(bench, [("a dump of another model", other.to_bytes())], SnapshotMismatch)

    def test_with_a_payload_that_does_not_fit(self, bench: Bench) -> None:
        """Clause 6: a payload of a wrong size is refused, even if its checksum is right."""
        snapshot = SequenceSnapshot.from_bytes(self._data(bench))
        if Capability.KV_PAYLOAD not in bench.capabilities:
            assert not snapshot.payload, "kv_payload is not declared, but a dump has a payload"
            return
        payload = snapshot.payload
        wrong = {"shorter by a byte": payload[:-1], "halved": payload[: len(payload) // 2]}
        wrong |= {"longer": payload + bytes(64), "doubled": payload * 2, "of one byte": b"\1"}
        hostile = ((name, dataclasses.replace(snapshot, payload=data).to_bytes()) for name, data in wrong.items())
        self._refused(bench, ((f"a payload that is {name}, rightly checksummed", data) for name, data in hostile))

    def test_with_numbers_that_are_none(self, bench: Bench) -> None:
        """Clause 6: a payload with NaN, infinity or magnitudes above 1e12 in keys or values is refused."""
        snapshot = SequenceSnapshot.from_bytes(self._data(bench))
        payload, n = snapshot.payload, len(snapshot.payload) // 8
        if Capability.KV_PAYLOAD not in bench.capabilities or bench.kv_type in KV_LEVELS:
            return  # all integers are finite numbers
        # Equal bytes, as the numbers may begin at any byte. All bits set are NaN in each of the remaining types.
        bad = {"NaN": 0xFF}
        if bench.kv_type in (KvType.F32, KvType.BF16):
            bad |= {"1.5e13": 0x55, "-2.9e13": 0xD5}
        for number, byte in bad.items():
            spoilt = [payload[: i * n] + bytes([byte]) * n + payload[(i + 1) * n :] for i in range(8)]
            dumps = (dataclasses.replace(snapshot, payload=data).to_bytes() for data in spoilt)
            self._refused(bench, ((f"a payload with {number} in its eighth {i}", data) for i, data in enumerate(dumps)))

    def test_with_tokens_that_do_not_exist(self, bench: Bench) -> None:
        """Clause 6: tokens outside the vocabulary are refused, in dumps of any backend."""
        snapshot = SequenceSnapshot.from_bytes(self._data(bench))
        for bad in (bench.vocab.size, 2**31 - 1, -1, -2):
            tokens = snapshot.tokens.copy()
            tokens[3] = bad
            changed = dataclasses.replace(snapshot, tokens=tokens)
            dumps = [(f"token {bad}", changed), (f"a stranger's token {bad}", foreign(changed))]
            self._refused(bench, ((what, dump.to_bytes()) for what, dump in dumps))

    def test_without_room(self, bench: Bench) -> None:
        """Clause 1: a dump that does not fit raises ``ContextFull``, and the sequence keeps its tokens."""
        data, tokens = self._data(bench), bench.tokens(12, seed=7)
        for what, dump in (("a dump", data), ("a dump of another backend", _foreign(data))):
            context = bench.context(n_ctx=32)
            bench.feed(context, tokens[:8], seq_id=0)
            bench.feed(context, bench.tokens(20, seed=8), seq_id=1)
            with bench.refused(f"{what} of 20 tokens where 12 fit", ContextFull, context=context):
                context.restore(0, dump)
            context.drop(1)
            expected = bench.oracle().decode(tokens)[8:]
            bench.agree(bench.feed(context, tokens[8:]), expected, f"what follows {what} that had no room")

    def test_room_for_what_was_cut(self, bench: Bench) -> None:
        """Clauses 1 and 6: decoding an edited sequence again takes room for its largest length at most, or raises."""
        bench.requires(EditLevel.CUT)
        context, reference, theirs = bench.context(), bench.oracle(), bench.tokens(14, seed=7)
        for i, (n, start, end) in enumerate(((24, 4, 14), (10, 2, 12))):
            tokens = bench.tokens(n, seed=i)
            bench.feed(context, tokens)
            reference.decode(tokens)
            context.cut(Pos(0, start), Pos(0, end))
            reference.cut(start, end)
        data, more = _foreign(context.dump(0)), bench.tokens(6, seed=9)
        expected, after_theirs = reference.decode(more), bench.oracle().decode(theirs)[8:]
        for n_free in (24, 23, 15):
            other = bench.context(n_ctx=8 + n_free)
            bench.feed(other, theirs[:8], seq_id=1)
            before = contents_of(other)
            what = f"a sequence of 14 tokens that had 24 before a cut, restored where {n_free} fit"
            try:
                other.restore(0, data)
            except ContextFull:
                assert n_free < 24, f"{what}: it is refused"
                assert contents_of(other) == before, f"{what}: it is refused, and the context has changed"
            else:
                n_more = min(6, other.n_free)
                bench.agree(bench.feed(other, more[:n_more]), expected[:n_more], what)
            other.drop(0)
            bench.agree(bench.feed(other, theirs[8:], seq_id=1), after_theirs, f"the neighbour of {what}")

    def test_without_room_over_a_fork(self, bench: Bench) -> None:
        """Clauses 1 and 5: restoring over a fork does not free the storage that it shares."""
        if Capability.SHARED_FORK not in bench.capabilities:
            pytest.skip("declared absent: shared_fork")
        data, tokens = self._data(bench), bench.tokens(24, seed=7)
        for what, dump in (("a dump", data), ("a dump of another backend", _foreign(data))):
            context = bench.context(n_ctx=40)
            bench.feed(context, tokens[:20])
            context.fork(0, 1)
            bench.feed(context, bench.tokens(10, seed=8), seq_id=2)
            with bench.refused(f"{what} of 20 tokens where 10 fit", ContextFull, context=context):
                context.restore(1, dump)
            expected = bench.oracle().decode(tokens)[20:]
            bench.agree(bench.feed(context, tokens[20:], seq_id=1), expected, f"a fork, after {what} that had no room")

    def test_into_a_sequence_that_does_not_exist(self, bench: Bench) -> None:
        """Clause 1: an unknown sequence is refused, in ``dump`` and in ``restore``."""
        data, context = self._data(bench), bench.context(n_seq_max=2)
        bench.feed(context, bench.tokens(5))
        for seq_id in (2, -1):
            with bench.refused(f"restore into sequence {seq_id} of 2", InvalidSequence, context=context):
                context.restore(seq_id, data)
            with bench.refused(f"dump of sequence {seq_id} of 2", InvalidSequence, context=context):
                context.dump(seq_id)

    @staticmethod
    def _data(bench: Bench) -> bytes:
        context = bench.context()
        bench.feed(context, bench.tokens(20))
        return context.dump(0)

    @staticmethod
    def _refused(
        bench: Bench,
        dumps: Iterable[tuple[str, bytes]],
        *errors: type[SlmError],
    ) -> None:
        """Require that a context with tokens refuses each dump, and continues."""
        context, tokens = bench.context(), bench.tokens(16, seed=7)
        bench.feed(context, tokens[:12])
        for what, data in dumps:
            with bench.refused(what, *(errors or (InvalidSnapshot, SnapshotMismatch)), context=context):
                context.restore(0, data)
        expected = bench.oracle().decode(tokens)[12:]
        bench.agree(bench.feed(context, tokens[12:]), expected, "what follows dumps that were refused")


def _make_history(bench: Bench, context: Context, reference: Oracle) -> None:
    """Decode 26 tokens in both; if the edit level allows it, then edit them to 18 by two cuts and a truncate."""
    first, second = bench.tokens(26), bench.tokens(8, seed=1)
    bench.feed(context, first)
    reference.decode(first)
    if bench.edit_level < EditLevel.CUT:
        return
    context.cut(Pos(0, 3), Pos(0, 9))
    reference.cut(3, 9)
    bench.feed(context, second)
    reference.decode(second)
    context.cut(Pos(0, 15), Pos(0, 23))
    reference.cut(15, 23)
    context.truncate(Pos(0, 18))
    reference.truncate(18)


def foreign(snapshot: SequenceSnapshot) -> SequenceSnapshot:
    """The same dump as another backend would make it: tokens and edits count, the payload has no meaning here."""
    return dataclasses.replace(snapshot, backend="stranger", payload_format="stranger-9", payload=b"\7" * 99)


def _foreign(data: bytes) -> bytes:
    return foreign(SequenceSnapshot.from_bytes(data)).to_bytes()
