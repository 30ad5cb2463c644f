"""Attention biases of embedding rows: masked rows, weighed rows, and how biases are edited and dumped."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.adapters import adapter_name
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.references import reference_of
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.sessions import next_row
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_conformance.suite.workshop import Rows
from slm_conformance.toy.backend import ToyBackend
from slm_core.chat import Session
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import InvalidEmbedding, InvalidSnapshot, SnapshotMismatch, UnsupportedInput
from slm_core.protocols import Batch, Context
from slm_core.types import Capability, ContextOptions, EditLevel, ModelOptions, Pos

_FIRST, _LAST, _N = 6, 14, 24  # text, rows from 6 on, text from 14 on, 24 inputs in all
_BIAS = np.array([-np.inf, 2.0, 0.5, -np.inf, -1.5, 0.0, 1.0, -3.0], np.float32)


class TestAttentionBias(Scenarios):
    """Clause 22: the bias of a row is added to the scores of all other queries on its key; -inf masks the row."""

    on_one_model = ("test_bad_dumps", "test_in_a_session")

    def test_as_declared(self, bench: Bench) -> None:
        """Clauses 2 and 22: a bias works if ``ATTENTION_BIAS`` is declared, else raises ``UnsupportedInput``."""
        context, rows = bench.context(), np.ones((3, bench.model.info.n_embd), np.float32)
        batch = context.new_batch()
        wrong: dict[str, NDArray[Any]] = {
            "in two dimensions": np.zeros((3, 1), np.float32),
            "for another number of rows": np.zeros(2, np.float32),
            "in float64": np.zeros(3),
            "with NaN": np.array([0, np.nan, 0], np.float32),
            "with +inf": np.array([0, 0, np.inf], np.float32),
            "that float32 cannot add to scores": np.array([1e6, 0, 0], np.float32),
        }
        for what, bias in wrong.items():
            with bench.refused(f"a bias {what}", InvalidEmbedding):
                batch.add_embeddings(rows, Pos(0, 0), bias=bias)
        assert len(batch) == 0, f"refused rows left {len(batch)} inputs in the batch"
        if Capability.EMBEDDING_INPUT in bench.capabilities:
            batch.add_embeddings(rows, Pos(1, 0), bias=np.zeros(3, np.float32), logits="last")
            context.decode(batch)  # a bias of 0 counts as absent
        batch = context.new_batch()
        batch.add_embeddings(rows, Pos(0, 0), bias=_BIAS[:3], logits="all")
        if Capability.ATTENTION_BIAS not in bench.capabilities:
            with bench.refused("a bias for a context that declares none", UnsupportedInput, context=context):
                context.decode(batch)
            return
        logits = context.decode(batch)
        assert logits.shape == (3, bench.model.info.n_vocab), f"3 rows with biases give logits {logits.shape}"

    def test_dumps_as_declared(self, bench: Bench) -> None:
        """Clauses 6 and 22: a dump with biases raises ``SnapshotMismatch`` if they are not declared."""
        bench.requires_toy()
        with ToyBackend().load(bench.path, ModelOptions()) as toy, toy.new_context(ContextOptions(64, 1, 64)) as other:
            _feed(bench, other, 0, _LAST)
            data = other.dump(0)
        context = bench.context()
        if Capability.ATTENTION_BIAS not in bench.capabilities:
            with bench.refused("a dump with biases", SnapshotMismatch, context=context):
                context.restore(1, data)
            return
        context.restore(1, data)
        bench.agree(
            _feed(bench, context, _LAST, _N, seq_id=1), _expected(bench)[_LAST:], "the text after the toy's rows"
        )

    def test_against_the_reference(self, bench: Bench) -> None:
        """Clauses 8, 9 and 22: rows with biases give the reference's logits in one batch, several, and one by one."""
        for sizes in ([_N], [_LAST, _N - _LAST], [9, 8, _N - 17], [_FIRST, *[1] * (_N - _FIRST)]):
            context, start, rows = _context(bench), 0, []
            for n in sizes:
                rows.append(_feed(bench, context, start, start + n))
                start += n
            bench.agree(
                np.concatenate(rows), _expected(bench), f"text, rows with biases and text in batches of {sizes}"
            )

    def test_masked(self, bench: Bench) -> None:
        """Clause 22: text after masked padding gives the logits of the text alone, because positions are relative."""
        text, padding = bench.tokens(12), _rows(bench)[:5]
        for chunk in (12, 1):
            context = _context(bench)
            batch = context.new_batch()
            batch.add_embeddings(padding, Pos(0, 0), bias=np.full(5, -np.inf, np.float32), logits="all")
            masked_logits = context.decode(batch).copy()
            assert np.isfinite(masked_logits).all(), "the logits of masked rows are not finite: each has its own key"
            rows = bench.feed(context, text, chunk=chunk)
            bench.agree(rows, bench.reference().decode(text), f"text after masked padding, {chunk} at a time")

    def test_of_other_sequences(self, bench: Bench) -> None:
        """Clauses 7 and 22: in one batch, a sequence without biases is as alone, and so is one with biases."""
        context, tokens = _context(bench), bench.tokens(_N, seed=5)
        batch = context.new_batch()
        _add(bench, batch, 0, 9, seq_id=1)
        batch.add_embeddings(_rows(bench)[:4], Pos(0, 0), logits="all")
        _add(bench, batch, 9, _N, seq_id=1)
        batch.extend(tokens[:10], Pos(0, 4), logits="all")
        owners, rows = batch.seq_ids.copy(), context.decode(batch).copy()
        plain = bench.reference()
        states = [plain.embed_rows(_rows(bench)[:4].astype(np.float64)), plain.embed(tokens[:10])]
        bench.agree(
            rows[owners == 0], plain.logits(np.concatenate(states)), "rows without biases, beside rows with some"
        )
        bench.agree(rows[owners == 1], _expected(bench), "rows with biases, beside rows without")
        context.drop(1)
        bench.feed(context, tokens[:_LAST], seq_id=1)
        after = bench.reference()
        after.decode(tokens[:_LAST])
        bench.agree(
            bench.feed(context, tokens[_LAST:], seq_id=1), after.decode(tokens[_LAST:]), "text in place of the rows"
        )

    def test_in_blocks(self, bench: Bench) -> None:
        """Clauses 14 and 22: in a bidirectional block, the bias of a row also applies to the queries before it."""
        if Capability.BIDIRECTIONAL_BLOCKS not in bench.capabilities:
            pytest.skip("declared absent: bidirectional_blocks")
        context, tokens, reference = _context(bench), bench.tokens(_N), bench.reference()
        batch = _batch(bench, context, 0, _LAST)
        batch.join_block(_LAST - _FIRST)
        rows, exact = context.decode(batch).copy(), _rows(bench).astype(np.float64)
        states = [reference.embed(tokens[:_FIRST])]
        states.append(reference.embed_rows(exact, bidirectional=True, bias=_BIAS.astype(np.float64)))
        bench.agree(rows, reference.logits(np.concatenate(states)), "a block of rows with biases")
        bench.agree(bench.feed(context, tokens[_LAST:]), reference.decode(tokens[_LAST:]), "the text after the block")

    def test_with_adapters(self, bench: Bench) -> None:
        """Clauses 19 and 22: sequences of one batch with different adapters add the biases of their rows."""
        context, adapter = _context(bench), bench.adapter()
        weights, allowed = bench.workshop.adapted(bench.name, bench.kv_type, (adapter, 1.0))
        context.set_adapters(1, {adapter_name(1): 1.0})
        batch = context.new_batch()
        _add(bench, batch, 0, 9, seq_id=1)
        _add(bench, batch, 0, _LAST, seq_id=0)
        _add(bench, batch, 9, _LAST, seq_id=1)
        owners, rows = batch.seq_ids.copy(), context.decode(batch).copy()
        bench.agree(rows[owners == 0], _expected(bench)[:_LAST], "rows with biases, beside a sequence with an adapter")
        expected = _decode(bench, reference_of(weights), 0, _LAST)
        bench.agree(rows[owners == 1], expected, "rows with biases and an adapter", allowed)

    def test_forked_and_truncated(self, bench: Bench) -> None:
        """Clauses 3, 5 and 22: a fork or truncate inside the rows keeps the biases of the rows that remain."""
        context = _context(bench)
        _feed(bench, context, 0, 20)
        context.fork(0, 1, 10)
        bench.agree(_feed(bench, context, 10, _N, seq_id=1), _expected(bench)[10:], "the text after a fork inside rows")
        if bench.edit_level >= EditLevel.TRUNCATE:
            context.truncate(Pos(0, 17))
            bench.agree(_feed(bench, context, 17, _N), _expected(bench)[17:], "the text after a truncate")
            context.truncate(Pos(0, 8))
            reference, more = bench.reference(), bench.tokens(12, seed=3)
            _decode(bench, reference, 0, 8)
            bench.agree(bench.feed(context, more), reference.decode(more), "text in place of the last rows")

    def test_cut(self, bench: Bench) -> None:
        """Clauses 4 and 22: biases move with their rows when a cut removes inputs before or between them."""
        bench.requires(EditLevel.CUT)
        for start, end in ((1, 4), (7, 9), (3, 11)):
            context, reference = _context(bench), bench.reference()
            _feed(bench, context, 0, 20)
            _decode(bench, reference, 0, 20)
            context.cut(Pos(0, start), Pos(0, end))
            reference.cut(start, end)
            more = bench.tokens(6, seed=4)
            bench.agree(bench.feed(context, more), reference.decode(more), f"6 tokens after a cut of [{start}, {end})")

    def test_dump_and_restore(self, bench: Bench) -> None:
        """Clauses 6 and 22: a dump with biases replaces text of the same length, with room for both or for one."""
        context = _context(bench)
        _feed(bench, context, 0, 18)
        for n_ctx in (64, 32):
            other = bench.context(n_ctx=n_ctx)
            bench.feed(other, bench.tokens(18, seed=3), seq_id=1)
            other.restore(1, context.dump(0))
            bench.agree(_feed(bench, other, 18, _N, seq_id=1), _expected(bench)[18:], "a restored dump with biases")

    def test_decoded_again(self, bench: Bench) -> None:
        """Clauses 6 and 22: rows in another backend's dump are decoded again with their biases, also after a cut."""
        context, reference = _context(bench), bench.reference()
        _feed(bench, context, 0, 20)
        _decode(bench, reference, 0, 20)
        if bench.edit_level >= EditLevel.CUT:
            context.cut(Pos(0, 3), Pos(0, 8))
            reference.cut(3, 8)
        other, more = bench.context(n_batch=7), bench.tokens(6, seed=4)
        other.restore(0, foreign(SequenceSnapshot.from_bytes(context.dump(0))).to_bytes())
        rows = bench.feed(other, more)
        bench.agree(rows, reference.decode(more), "another backend's dump with biases, decoded 7 at a time")

    def test_bad_dumps(self, bench: Bench) -> None:
        """Clauses 6 and 22: dumps with biases that are NaN, too large, or of another number are refused."""
        context = _context(bench)
        _feed(bench, context, 0, _LAST)
        snapshot = SequenceSnapshot.from_bytes(context.dump(0))
        for what, bias in (
            ("with NaN", np.full(8, np.nan, np.float32)),
            ("with +inf", np.full(8, np.inf, np.float32)),
            ("that float32 cannot add to scores", np.full(8, 1e9, np.float32)),
            ("of 9 for 8 rows", np.ones(9, np.float32)),
        ):
            for dump in (dataclasses.replace(snapshot, bias=bias), foreign(dataclasses.replace(snapshot, bias=bias))):
                with bench.refused(f"a dump with biases {what}", InvalidSnapshot, context=context):
                    context.restore(1, dump.to_bytes())

    def test_in_a_session(self, bench: Bench) -> None:
        """Clause 22: ``Session.append_rows`` keeps a bias, also when rows are decoded again, and in its dump."""
        _context(bench)
        session, expected = Session(bench.context(n_batch=_FIRST + 4), bench.vocab), _expected(bench)
        session.append_tokens(bench.tokens(_N)[:_FIRST])
        session.append_rows(_rows(bench), bias=_BIAS)
        data = session.dump()  # the rows are not decoded yet
        session.append_tokens(bench.tokens(_N)[_LAST:])
        bench.agree(next_row(session), expected[-1:], "the next logits after rows with biases")
        session.truncate(_FIRST + 6)
        bench.agree(next_row(session), expected[_FIRST + 5 : _FIRST + 6], "the next logits within the rows")
        loaded = Session.restore(bench.context(), bench.vocab, data)
        bench.agree(next_row(loaded), expected[_LAST - 1 : _LAST], "the next logits of a session from a dump")


def _context(bench: Bench) -> Context:
    if Capability.ATTENTION_BIAS not in bench.capabilities:
        pytest.skip("declared absent: attention_bias")
    return bench.context()


def _rows(bench: Bench) -> Rows:
    """The embedding rows, which differ from every token's."""
    table = bench.reference().table(bench.tokens(2 * len(_BIAS), seed=9))
    return (0.7 * table[::2] + 0.5 * table[1::2]).astype(np.float32)


def _batch(bench: Bench, context: Context, start: int, stop: int, seq_id: int = 0) -> Batch:
    batch = context.new_batch()
    _add(bench, batch, start, stop, seq_id)
    return batch


def _add(bench: Bench, batch: Batch, start: int, stop: int, seq_id: int) -> None:
    """Add the inputs [start, stop) of the text with rows."""
    tokens = bench.tokens(_N)
    first, last = (min(max(bound, start), stop) for bound in (_FIRST, _LAST))
    batch.extend(tokens[start:first], Pos(seq_id, start), logits="all")
    biased = slice(first - _FIRST, last - _FIRST)
    batch.add_embeddings(_rows(bench)[biased], Pos(seq_id, first), bias=_BIAS[biased], logits="all")
    batch.extend(tokens[last:stop], Pos(seq_id, last), logits="all")


def _feed(bench: Bench, context: Context, start: int, stop: int, seq_id: int = 0) -> Rows:
    return context.decode(_batch(bench, context, start, stop, seq_id)).copy()


def _decode(bench: Bench, reference: Reference, start: int, stop: int) -> Rows:
    """Logits of the reference for the inputs from ``start``, at most 6, to ``stop``, at least 6."""
    tokens, n = bench.tokens(_N), min(stop, _LAST) - _FIRST
    states = [reference.embed(tokens[start:_FIRST])]
    states.append(reference.embed_rows(_rows(bench)[:n].astype(np.float64), bias=_BIAS[:n].astype(np.float64)))
    if stop > _LAST:
        states.append(reference.embed(tokens[_LAST:stop]))
    return reference.logits(np.concatenate(states))


def _expected(bench: Bench) -> Rows:
    return _decode(bench, bench.reference(), 0, _N)
