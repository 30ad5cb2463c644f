"""Bidirectional blocks: their logits, and how they are edited and dumped."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from slm_conformance.oracle.reference import Reference
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_conformance.suite.workshop import Rows
from slm_conformance.toy.backend import ToyBackend
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidOption, InvalidPosition, InvalidSnapshot, SnapshotMismatch, UnsupportedInput
from slm_core.protocols import Batch, Context
from slm_core.types import Capability, ContextOptions, EditLevel, ModelOptions, Pos

Blocks = tuple[tuple[int, int], ...]
"""Start and end position of each bidirectional block."""


class TestBidirectionalBlocks(Scenarios):
    """Clause 14: a token of a bidirectional block attends to the whole block and to all earlier tokens."""

    def test_as_declared(self, bench: Bench) -> None:
        """Clause 2: blocks of one run work if ``BIDIRECTIONAL_BLOCKS`` is declared, else raise ``UnsupportedInput``."""
        context = bench.context()
        batch = bench.batch(context, (0, 0, bench.tokens(2)), (1, 0, bench.tokens(4)))
        batch.join_block(3)
        batch.extend(bench.tokens(1), Pos(1, 4))
        wrong = {0: "of no tokens", 2: "with the end of another", 4: "with all of another", 8: "that is too long"}
        for n, why in wrong.items():
            with bench.refused(f"a block {why}", InvalidOption):
                batch.join_block(n)
        batch = bench.batch(context, (1, 0, bench.tokens(2)), (0, 0, bench.tokens(3)))
        with bench.refused("a block of two sequences", InvalidOption):
            batch.join_block(4)
        batch = bench.batch(context, (0, 0, bench.tokens(5)))
        batch.join_block(3)
        if Capability.BIDIRECTIONAL_BLOCKS not in bench.capabilities:
            with bench.refused(
                "a bidirectional block for a context that declares none", UnsupportedInput, context=context
            ):
                context.decode(batch)
            return
        rows = context.decode(batch)
        assert rows.shape == (5, bench.model.info.n_vocab), f"5 tokens, 3 of them a block, give logits {rows.shape}"

    def test_dumps_as_declared(self, bench: Bench) -> None:
        """Clauses 6 and 14: a dump with blocks raises ``SnapshotMismatch`` if they are not declared."""
        bench.requires_toy()
        tokens, reference, blocks = bench.tokens(12), bench.reference(), ((4, 9),)
        with ToyBackend().load(bench.path, ModelOptions()) as toy, toy.new_context(ContextOptions(64, 1, 64)) as other:
            _feed(other, tokens, blocks)
            data = other.dump(0)
        context = bench.context()
        if Capability.BIDIRECTIONAL_BLOCKS not in bench.capabilities:
            with bench.refused("a dump with bidirectional blocks", SnapshotMismatch, context=context):
                context.restore(1, data)
            return
        context.restore(1, data)
        _decode(reference, tokens, blocks)
        more = bench.tokens(3, seed=5)
        bench.agree(bench.feed(context, more, seq_id=1), reference.decode(more), "the tokens after the toy's block")

    def test_against_the_reference(self, bench: Bench) -> None:
        """Clauses 9 and 14: a block in the middle of a batch gives the reference's logits."""
        tokens, context, reference, blocks = bench.tokens(50), _context(bench), bench.reference(), ((10, 32),)
        expected = _decode(reference, tokens[:40], blocks)
        bench.agree(_feed(context, tokens[:40], blocks), expected, "40 tokens with a block of 22")
        bench.agree(bench.feed(context, tokens[40:]), reference.decode(tokens[40:]), "the next 10 tokens")
        # Sequences that grow in turn do not lie side by side.
        tokens, context, n = bench.tokens(146), bench.context(n_ctx=300, n_batch=70), 140
        for first in (0, 70):
            for seq_id in (0, 1):
                bench.feed(context, tokens[first : first + 70], seq_id)
        batch = bench.batch(context, (0, n, tokens[n:]))
        batch.join_block(6)
        expected = _decode(bench.reference(), tokens, ((n, n + 6),))[n:]
        bench.agree(context.decode(batch).copy(), expected, "a block of 6 after 140 tokens, beside another sequence")

    def test_of_rows_and_tokens(self, bench: Bench) -> None:
        """Clauses 13 and 14: embedding rows and tokens form one block after a row, and after tokens decoded before."""
        if Capability.EMBEDDING_INPUT not in bench.capabilities:
            pytest.skip("declared absent: embedding_input")
        tokens, context, reference = bench.tokens(21), _context(bench), bench.reference()
        table = reference.table(tokens).astype(np.float32)
        bench.feed(context, tokens[:12])
        batch = context.new_batch()
        batch.add_embeddings(table[12:15], Pos(0, 12), logits="all")
        batch.extend(tokens[15:19], Pos(0, 15), logits="all")
        batch.add_embeddings(table[19:], Pos(0, 19), logits="all")
        batch.join_block(8)
        expected = _decode(reference, tokens, ((13, 21),))
        bench.agree(context.decode(batch).copy(), expected[12:], "a row, and a block of 4 tokens and 4 rows")

    def test_side_by_side(self, bench: Bench) -> None:
        """Clauses 7 and 14: of adjacent blocks, the shortest first, none attends to the next or to other sequences."""
        ours, theirs = bench.tokens(20), bench.tokens(12, seed=1)
        context, blocks = _context(bench), ((3, 5), (5, 8), (8, 14))
        batch = context.new_batch()
        batch.extend(theirs[:6], Pos(1, 0))
        _add(batch, ours, blocks, 0)
        batch.extend(theirs[6:], Pos(1, 6))
        expected, after = _decode(bench.reference(), ours, blocks), bench.reference()
        bench.agree(context.decode(batch).copy(), expected, "three adjacent blocks, among tokens of another sequence")
        after.decode(theirs)
        bench.agree(bench.feed(context, ours[:4], seq_id=1), after.decode(ours[:4]), "the other sequence")

    def test_are_kept_whole(self, bench: Bench) -> None:
        """Clause 14: ``truncate`` and ``fork`` may end at either end of a block, but not inside it."""
        tokens, context, blocks = bench.tokens(24), _context(bench), ((6, 12),)
        expected = _feed(context, tokens[:16], blocks)
        with bench.refused("a fork of 9 tokens, inside a block", InvalidPosition, context=context):
            context.fork(0, 1, 9)
        if bench.edit_level >= EditLevel.CUT:
            with bench.refused("cut(10, 16), from inside a block to the end", InvalidPosition, context=context):
                context.cut(Pos(0, 10), Pos(0, 16))
        if bench.edit_level >= EditLevel.TRUNCATE:
            with bench.refused("truncate(11), inside a block", InvalidPosition, context=context):
                context.truncate(Pos(0, 11))
            context.truncate(Pos(0, 12))
            bench.same(
                bench.feed(context, tokens[12:16]), expected[12:], "4 tokens after a truncate to the end of a block"
            )
            context.truncate(Pos(0, 6))
            bench.agree(
                bench.feed(context, tokens[6:]),
                bench.reference().decode(tokens)[6:],
                "after a truncate to the start of a block",
            )

    def test_cut(self, bench: Bench) -> None:
        """Clauses 4 and 14: a cut inside a block keeps the values of its other tokens."""
        bench.requires(EditLevel.CUT)
        tokens, context, reference, blocks = bench.tokens(30), _context(bench), bench.reference(), ((4, 12),)
        _feed(context, tokens[:20], blocks)
        _decode(reference, tokens[:20], blocks)
        context.cut(Pos(0, 6), Pos(0, 9))
        reference.cut(6, 9)
        bench.agree(
            bench.feed(context, tokens[20:]), reference.decode(tokens[20:]), "10 tokens after a cut inside a block"
        )

    def test_dump_and_restore(self, bench: Bench) -> None:
        """Clauses 6 and 14: a dump with blocks continues in another context of the same backend."""
        tokens, context, blocks = bench.tokens(30), _context(bench), ((5, 11),)
        _feed(context, tokens[:20], blocks)
        other = bench.context(n_ctx=64)
        other.restore(1, context.dump(0))
        expected = _decode(bench.reference(), tokens, blocks)
        bench.agree(bench.feed(other, tokens[20:], seq_id=1), expected[20:], "a restored dump with a block")
        if bench.edit_level < EditLevel.CUT:
            return
        reference = bench.reference()
        _decode(reference, tokens[:20], blocks)
        context.cut(Pos(0, 5), Pos(0, 11))
        reference.cut(5, 11)
        other.restore(2, context.dump(0))
        rows = bench.feed(other, tokens[20:], seq_id=2)
        bench.agree(rows, reference.decode(tokens[20:]), "a dump whose only block was cut")

    def test_decoded_again(self, bench: Bench) -> None:
        """Clauses 6 and 14: blocks in another backend's dump are decoded again as blocks."""
        tokens, context, reference, blocks = bench.tokens(30), _context(bench), bench.reference(), ((3, 7), (10, 16))
        _feed(context, tokens[:20], blocks)
        _decode(reference, tokens[:20], blocks)
        if bench.edit_level >= EditLevel.CUT:
            context.cut(Pos(0, 2), Pos(0, 8))
            reference.cut(2, 8)
        other = bench.context(n_batch=7)
        other.restore(0, foreign(SequenceSnapshot.from_bytes(context.dump(0))).to_bytes())
        rows = bench.feed(other, tokens[20:])
        bench.agree(rows, reference.decode(tokens[20:]), "another backend's dump with blocks, decoded 7 at a time")

    def test_bad_dumps(self, bench: Bench) -> None:
        """Clauses 6 and 14: dumps with parts of blocks, or with blocks longer than ``n_batch``, are refused."""
        context, tokens = _context(bench), bench.tokens(20)
        _feed(context, tokens, ((5, 11),))
        snapshot = SequenceSnapshot.from_bytes(context.dump(0))
        for what, error, other, ahead in (
            ("with a block past its end", InvalidSnapshot, context, np.arange(20, 0, -1, dtype=np.int32)),
            ("with parts of a block", InvalidSnapshot, context, snapshot.ahead // 2),
            ("with a block of 6 for batches of 5", SnapshotMismatch, bench.context(n_batch=5), snapshot.ahead),
        ):
            dump = dataclasses.replace(snapshot, ahead=ahead)
            for data in (dump, foreign(dump)):
                with bench.refused(f"a dump {what}", error, context=other):
                    other.restore(1, data.to_bytes())
        with_larger_batches = bench.context(n_batch=6)
        with_larger_batches.restore(1, foreign(snapshot).to_bytes())
        assert with_larger_batches.length(1) == 20, "a dump with a block of 6 was not restored for batches of 6"


def _context(bench: Bench) -> Context:
    if Capability.BIDIRECTIONAL_BLOCKS not in bench.capabilities:
        pytest.skip("declared absent: bidirectional_blocks")
    return bench.context()


def _add(batch: Batch, tokens: list[int], blocks: Blocks, seq_id: int) -> None:
    start = 0
    for first, end in blocks:
        batch.extend(tokens[start:first], Pos(seq_id, start), logits="all")
        batch.extend(tokens[first:end], Pos(seq_id, first), logits="all")
        batch.join_block(end - first)
        start = end
    batch.extend(tokens[start:], Pos(seq_id, start), logits="all")


def _feed(context: Context, tokens: list[int], blocks: Blocks) -> Rows:
    batch = context.new_batch()
    _add(batch, tokens, blocks, 0)
    return context.decode(batch).copy()


def _decode(reference: Reference, tokens: list[int], blocks: Blocks) -> Rows:
    """Logits of the reference."""
    bounds = sorted({0, len(tokens), *(bound for block in blocks for bound in block)})
    rows = []
    for first, end in itertools.pairwise(bounds):
        rows.append(reference.embed_rows(reference.table(tokens[first:end]), bidirectional=(first, end) in blocks))
    return reference.logits(np.concatenate(rows))
