"""Embedding rows in place of tokens: logits, edits, dumps, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_conformance.suite.tolerance import N_SAMPLE
from slm_conformance.suite.workshop import Rows
from slm_conformance.toy.backend import ToyBackend
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import (
    ContextFull,
    InvalidEmbedding,
    InvalidPosition,
    InvalidSnapshot,
    SnapshotMismatch,
    UnsupportedInput,
)
from slm_core.protocols import Context
from slm_core.types import EMBEDDED, Capability, ContextOptions, EditLevel, ModelOptions, Pos


class TestEmbeddingInput(Scenarios):
    """Clause 13: an embedding row can take a token's place, and is stored, edited and dumped like a token."""

    def test_as_declared(self, bench: Bench) -> None:
        """Clause 2: rows work if ``EMBEDDING_INPUT`` is declared, and raise ``UnsupportedInput`` otherwise."""
        context, rows = bench.context(), np.ones((5, bench.model.info.n_embd), np.float32)
        batch = context.new_batch()
        batch.add_embeddings(rows, Pos(0, 0), logits="last")
        if Capability.EMBEDDING_INPUT not in bench.capabilities:
            with bench.refused("rows for a context that declares none", UnsupportedInput, context=context):
                context.decode(batch)
            return
        width = bench.model.info.n_embd
        assert context.n_embd == width, f"n_embd is {context.n_embd}, embedding rows of the model are {width} wide"
        logits = context.decode(batch)
        assert logits.shape == (1, bench.model.info.n_vocab), (
            f"5 rows, one of them with logits, give logits {logits.shape}"
        )

    def test_dumps_as_declared(self, bench: Bench) -> None:
        """Clauses 6 and 13: a dump with rows raises ``SnapshotMismatch`` if they are not declared."""
        bench.requires_toy()
        tokens, reference = bench.tokens(12), bench.reference()
        with ToyBackend().load(bench.path, ModelOptions()) as toy, toy.new_context(ContextOptions(64, 1, 64)) as other:
            _feed(other, _table(bench, tokens))
            data = other.dump(0)
        context = bench.context()
        if Capability.EMBEDDING_INPUT not in bench.capabilities:
            with bench.refused("a dump with rows", SnapshotMismatch, context=context):
                context.restore(1, data)
            return
        context.restore(1, data)
        reference.decode(tokens)
        more = bench.tokens(3, seed=5)
        bench.agree(
            bench.feed(context, more, seq_id=1), reference.decode(more), "what follows the toy's dump with rows"
        )

    def test_rows_of_the_table(self, bench: Bench) -> None:
        """Clauses 9 and 13: rows of the embedding table give the logits of their tokens."""
        tokens = bench.tokens(N_SAMPLE)
        rows = _feed(_context(bench), _table(bench, tokens))
        bench.agree(rows, bench.workshop.expected(bench.name, 0), f"the rows of {N_SAMPLE} tokens, 64 at a time")

    def test_rows_that_no_token_has(self, bench: Bench) -> None:
        """Clauses 8 and 13: rows that no token has work, one at a time and in chunks."""
        table = _table(bench, bench.tokens(20))
        rows = (table + table[::-1]) / np.float32(2)
        reference = bench.reference()
        expected = reference.logits(reference.embed_rows(rows.astype(np.float64)))
        for chunk in (1, 7):
            bench.agree(_feed(_context(bench), rows, chunk=chunk), expected, f"rows between tokens', {chunk} at a time")

    def test_among_tokens(self, bench: Bench) -> None:
        """Clauses 7 and 13: a batch may mix rows, tokens and sequences."""
        ours, theirs = bench.tokens(12), bench.tokens(12, seed=1)
        context, tables = _context(bench), [_table(bench, ours), _table(bench, theirs)]
        batch = context.new_batch()
        for i in range(12):
            if i % 3:
                batch.add(ours[i], Pos(0, i), logits=True)
            else:
                batch.add_embeddings(tables[0][i : i + 1], Pos(0, i), logits="last")
            if i % 2:
                batch.add_embeddings(tables[1][i - 1 : i + 1], Pos(1, i - 1))
        rows, expected = context.decode(batch).copy(), bench.reference().decode(ours)
        bench.agree(rows, expected, "tokens among rows, beside rows of another sequence")
        after = bench.reference()
        after.decode(theirs)
        bench.agree(bench.feed(context, ours[:4], seq_id=1), after.decode(ours[:4]), "what follows those rows")

    def test_what_is_held(self, bench: Bench) -> None:
        """Clause 13: ``tokens`` has ``EMBEDDED`` for each row, and each row takes one position."""
        tokens, context = bench.tokens(10), _context(bench)
        bench.feed(context, tokens[:4])
        _feed(context, _table(bench, tokens[4:7]))
        bench.feed(context, tokens[7:])
        expected = (*tokens[:4], *[EMBEDDED] * 3, *tokens[7:])
        assert context.tokens(0) == expected, f"the sequence holds {context.tokens(0)}, not {expected}"
        assert (context.length(0), context.n_free) == (10, context.n_ctx - 10), "a row takes one position"

    def test_hidden_states(self, bench: Bench) -> None:
        """Clauses 11 and 13: ``embed`` takes rows, too."""
        if Capability.EMBEDDINGS not in bench.capabilities:
            pytest.skip("declared absent: embeddings")
        tokens, context = bench.tokens(9), _context(bench)
        batch = context.new_batch()
        batch.add_embeddings(_table(bench, tokens), Pos(0, 0), logits="all")
        bench.states_agree(context.embed(batch), bench.reference().embed(tokens), "hidden states of 9 rows")

    def test_truncate_and_fork(self, bench: Bench) -> None:
        """Clauses 3, 5 and 13: ``truncate`` and ``fork`` work on rows as on tokens."""
        bench.requires(EditLevel.TRUNCATE)
        tokens, context = bench.tokens(30), _context(bench)
        rows, expected = _table(bench, tokens), bench.reference().decode(tokens)
        _feed(context, rows)
        context.fork(0, 2, 20)
        context.truncate(Pos(0, 11))
        bench.agree(_feed(context, rows[11:]), expected[11:], "rows after truncate(11) of 30 rows")
        bench.agree(_feed(context, rows[20:], seq_id=2), expected[20:], "rows after a fork of 20 of 30 rows")

    def test_cut(self, bench: Bench) -> None:
        """Clauses 4 and 13: a cut among rows keeps the values of the other rows."""
        bench.requires(EditLevel.CUT)
        tokens, context, reference = bench.tokens(30), _context(bench), bench.reference()
        _feed(context, _table(bench, tokens[:20]))
        reference.decode(tokens[:20])
        context.cut(Pos(0, 3), Pos(0, 8))
        reference.cut(3, 8)
        bench.agree(bench.feed(context, tokens[20:]), reference.decode(tokens[20:]), "10 tokens after a cut of 20 rows")

    def test_dump_and_restore(self, bench: Bench) -> None:
        """Clauses 6 and 13: a dump with rows continues in another context of the same backend."""
        tokens = bench.tokens(30)
        data = _dump(bench, tokens, cut=False)
        context = bench.context(n_ctx=64)
        context.restore(0, data)
        assert context.tokens(0)[10:20] == (EMBEDDED,) * 10, "the restored sequence holds other tokens"
        rows = bench.feed(context, tokens[20:])
        bench.agree(rows, bench.reference().decode(tokens)[20:], "a restored dump with rows")

    def test_decoded_again(self, bench: Bench) -> None:
        """Clauses 6 and 13: rows in another backend's dump are decoded again from the dump."""
        cut, tokens, reference = bench.edit_level >= EditLevel.CUT, bench.tokens(30), bench.reference()
        snapshot = SequenceSnapshot.from_bytes(_dump(bench, tokens, cut=cut))
        context = _context(bench)
        context.restore(1, foreign(snapshot).to_bytes())
        reference.decode(tokens[:20])
        if cut:
            reference.cut(8, 13)
        rows = bench.feed(context, tokens[20:], seq_id=1)
        bench.agree(rows, reference.decode(tokens[20:]), "another backend's dump with rows")

    def test_refusals(self, bench: Bench) -> None:
        """Clauses 1 and 13: rows of a wrong shape or type, or with NaN, are refused, and nothing changes."""
        context, width = _context(bench, n_ctx=40), bench.model.info.n_embd
        bench.feed(context, bench.tokens(20))
        good = np.ones((3, width), np.float32)
        infinite = good.copy()
        infinite[1, 2] = np.inf
        for why, rows in (
            ("rows that are too wide", np.ones((3, width + 1), np.float32)),
            ("rows that are too narrow", np.ones((3, width - 1), np.float32)),
            ("rows in float64", good.astype(np.float64)),
            ("a flat row", good[0]),
            ("rows with an infinity", infinite),
            ("rows with a NaN", np.full_like(good, np.nan)),
        ):
            with bench.refused(why, InvalidEmbedding, context=context):
                _decode(bench, context, rows, 20)
        with bench.refused("rows at a position that is not the next", InvalidPosition, context=context):
            _decode(bench, context, good, 21)
        with bench.refused("more rows than positions", ContextFull, context=context):
            _decode(bench, context, np.ones((21, width), np.float32), 20)

    def test_hostile_dumps(self, bench: Bench) -> None:
        """Clauses 6 and 13: dumps with missing, surplus, misshapen or non-finite rows are refused."""
        context = _context(bench)
        snapshot = SequenceSnapshot.from_bytes(_dump(bench, bench.tokens(20), cut=False))
        infinite = snapshot.rows.copy()
        infinite[4, 3] = np.inf
        for why, rows in (
            ("without its rows", snapshot.rows[:0]),
            ("with 9 rows of 10", snapshot.rows[1:]),
            ("with rows that are too wide", np.concatenate([snapshot.rows] * 2, axis=1)),
            ("with an infinity in a row", infinite),
        ):
            for payload, backend in ((snapshot.payload, snapshot.backend), (b"", "stranger")):
                hostile = dataclasses.replace(snapshot, rows=rows, payload=payload, backend=backend).to_bytes()
                with bench.refused(f"a dump {why}", InvalidSnapshot, context=context):
                    context.restore(0, hostile)


def _context(bench: Bench, n_ctx: int = 256) -> Context:
    if Capability.EMBEDDING_INPUT not in bench.capabilities:
        pytest.skip("declared absent: embedding_input")
    return bench.context(n_ctx=n_ctx)


def _table(bench: Bench, tokens: list[int]) -> Rows:
    return bench.reference().table(tokens).astype(np.float32)


def _feed(context: Context, rows: Rows, seq_id: int = 0, chunk: int = 64) -> Rows:
    rows_of_batches = []
    for first in range(0, len(rows), chunk):
        batch = context.new_batch()
        batch.add_embeddings(rows[first : first + chunk], Pos(seq_id, context.length(seq_id)), logits="all")
        rows_of_batches.append(context.decode(batch).copy())
    return np.concatenate(rows_of_batches)


def _decode(bench: Bench, context: Context, rows: Rows, first: int) -> None:
    """Embedding rows after a valid run of tokens of another sequence."""
    batch = bench.batch(context, (1, 0, bench.tokens(2)))
    batch.add_embeddings(rows, Pos(0, first))
    context.decode(batch)


def _dump(bench: Bench, tokens: list[int], *, cut: bool) -> bytes:
    """A dump of ten tokens and ten rows, perhaps after a cut of [8, 13)."""
    context = _context(bench)
    bench.feed(context, tokens[:10])
    _feed(context, _table(bench, tokens[10:20]))
    if cut:
        context.cut(Pos(0, 8), Pos(0, 13))
    return context.dump(0)
