"""Drafts of a model's layers for multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from slm_conformance.oracle.mtp_reference import predictions
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.workshop import Rows
from slm_core.errors import ContextFull, InvalidOption, InvalidSequence, InvalidToken, UnsupportedOutput
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos

_N = 5  # predictions of a draft


class TestMtp(Scenarios):
    """Clause 20: ``draft`` predicts the next tokens with the MTP layers, and changes nothing."""

    models = ("mtp_llama-f32", "small_mtp-f32")

    def test_as_declared(self, bench: Bench) -> None:
        """Clause 2: ``draft`` works if ``MTP`` is declared, else raises ``UnsupportedOutput``."""
        context = bench.context()
        bench.feed(context, bench.tokens(5))
        if Capability.MTP not in context.capabilities:
            with bench.refused("a draft of a context that does not declare it", UnsupportedOutput, context=context):
                context.draft(0, 1, 2)
            return
        top = context.draft(0, 1, 2, 3)
        types = [(values.dtype.name, values.shape) for values in (top.tokens, top.logits, top.log_totals)]
        expected = [("int32", (2, 3)), ("float32", (2, 3)), ("float32", (2,))]
        assert types == expected, f"the 3 largest logits of 2 predictions are {types}, not {expected}"

    def test_after_batches(self, bench: Bench) -> None:
        """Clauses 8, 9 and 20: chunks and single tokens give the predictions of the reference, or of one batch."""
        context, tokens = _context(bench), bench.tokens(60)
        for start, end in ((0, 33), (33, 34), (34, 35), (35, 50)):
            bench.feed(context, tokens[start:end])
            _check(bench, context, tokens[:end], f"a draft after {end} tokens")

    def test_changes_nothing(self, bench: Bench) -> None:
        """Clause 20: after drafts, all sequences and their next logits are as without them."""
        context, tokens = _context(bench, n_ctx=70), bench.tokens(50)
        bench.feed(context, tokens[:30])
        context.fork(0, 1)
        before = context.n_free, context.tokens(0), context.tokens(1)
        for seq_id, token in ((0, 7), (1, 8), (2, 9)):
            context.draft(seq_id, token, _N)
        assert (context.n_free, context.tokens(0), context.tokens(1)) == before, "a draft changed a sequence"
        for seq_id in (0, 1):
            rows = bench.feed(context, tokens[30:40], seq_id)
            bench.same(rows, bench.feed(bench.context(), tokens[:40])[30:], f"sequence {seq_id} after drafts")

    def test_after_edits(self, bench: Bench) -> None:
        """Clauses 3, 5, 7 and 20: a draft depends on the tokens that its sequence has now."""
        context, tokens, others = _context(bench), bench.tokens(60), bench.tokens(60, seed=1)
        bench.feed(context, tokens[:40])
        context.fork(0, 1)
        bench.feed(context, others[:6], 1)
        _check(bench, context, tokens[:40], "a draft of a sequence whose fork went on")
        _check(bench, context, [*tokens[:40], *others[:6]], "a draft of a fork", seq_id=1)
        context.decode(bench.batch(context, (0, 40, tokens[40:43]), (1, 46, others[6:8]), (2, 0, others[:9])))
        _check(bench, context, tokens[:43], "a draft after a batch of several sequences")
        _check(bench, context, others[:9], "a draft of another sequence of the batch", seq_id=2)
        context.drop(1)
        if bench.edit_level >= EditLevel.TRUNCATE:
            for length in (41, 11):
                context.truncate(Pos(0, length))
                _check(bench, context, tokens[:length], f"a draft after a truncate to {length} tokens")
            bench.feed(context, others[20:25])
            _check(bench, context, [*tokens[:11], *others[20:25]], "a draft after a truncate and other tokens")
            context.fork(2, 1, 4)
            _check(bench, context, others[:4], "a draft of a fork of a part", seq_id=1)

    def test_after_restores(self, bench: Bench) -> None:
        """Clauses 6, 18 and 20: a restored sequence drafts like the dumped one."""
        context, tokens = _context(bench), bench.tokens(40)
        bench.feed(context, tokens[:30])
        context.restore(1, context.dump(0))
        _check(bench, context, tokens[:30], "a draft of a restored sequence", seq_id=1)
        other = bench.context()
        other.restore_context(context.dump_context())
        bench.feed(other, tokens[30:33])
        _check(bench, other, tokens[:33], "a draft in a restored context")

    def test_refusals(self, bench: Bench) -> None:
        """Clauses 1 and 20: invalid arguments, and more predictions than positions, raise and change nothing."""
        context, size = _context(bench, n_ctx=40), bench.vocab.size
        bench.feed(context, bench.tokens(30))
        for why, error, arguments in (
            ("a token outside the vocabulary", InvalidToken, (0, size, 1)),
            ("a sequence outside the context", InvalidSequence, (context.n_seq_max, 1, 1)),
            ("no prediction", InvalidOption, (0, 1, 0)),
            ("more logits than tokens", InvalidOption, (0, 1, 1, size + 1)),
            ("more predictions than free positions", ContextFull, (0, 1, 11)),
        ):
            with bench.refused(f"a draft with {why}", error, context=context):
                context.draft(*arguments)
        assert context.draft(0, 1, 10).tokens.shape == (10, 1), "as many predictions as free positions"


def _context(bench: Bench, n_ctx: int = 256) -> Context:
    if Capability.MTP not in bench.capabilities:
        pytest.skip("declared absent: mtp")
    return bench.context(n_ctx=n_ctx)


def _check(bench: Bench, context: Context, tokens: Sequence[int], what: str, seq_id: int = 0) -> None:
    """Fail if a draft differs from the reference's; without a reference, from the draft of a fresh context.

    The fresh context decodes the tokens in one batch. Each prediction follows the largest logit of the row before, so
    rows are compared up to the first one with another largest logit.
    """
    token, size = (tokens[0] + 1) % bench.vocab.size, bench.vocab.size
    weights = bench.workshop.source(bench.name).weights
    rows = _rows(context, seq_id, token, size)
    if weights is not None:
        expected: Rows = predictions(weights, tokens, token, _N)
    else:
        with bench.context(n_seq_max=1, n_batch=len(tokens)) as fresh:
            bench.feed(fresh, tokens)
            expected = _rows(fresh, 0, token, size)
    differ = np.flatnonzero(rows.argmax(axis=1) != expected.argmax(axis=1))
    n = int(differ[0]) + 1 if len(differ) else _N
    bench.same(rows[:n], expected[:n], what)


def _rows(context: Context, seq_id: int, token: int, size: int) -> Rows:
    """Whole rows of logits of a draft, float32 [n, V]."""
    top = context.draft(seq_id, token, _N, size)
    rows = np.empty_like(top.logits)
    np.put_along_axis(rows, top.tokens, top.logits, axis=1)
    return rows
