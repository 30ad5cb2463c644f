"""The largest logits of rows, computed on the device."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.workshop import Rows
from slm_core.errors import ContextFull, InvalidOption, InvalidPosition, InvalidToken, UnsupportedOutput
from slm_core.protocols import Context
from slm_core.types import Capability, Pos, TopLogits

_TOTAL = 1e-5
"""Bound of the relative error of a float32 sum of a few thousand exponentials."""


class TestDeviceSampling(Scenarios):
    """Clause 12: ``decode_top`` gives the largest logits of each row of ``decode``; all else is as in ``decode``."""

    def test_as_declared(self, bench: Bench) -> None:
        """Clause 2: ``decode_top`` works if ``DEVICE_SAMPLING`` is declared, else raises ``UnsupportedOutput``."""
        context = bench.context()
        batch = bench.batch(context, (0, 0, bench.tokens(5)))
        if Capability.DEVICE_SAMPLING not in context.capabilities:
            with bench.refused("decode_top of a context that does not declare it", UnsupportedOutput, context=context):
                context.decode_top(batch, 3)
            return
        top = context.decode_top(batch, 3)
        types = [(values.dtype.name, values.shape) for values in (top.tokens, top.logits, top.log_totals)]
        expected = [("int32", (5, 3)), ("float32", (5, 3)), ("float32", (5,))]
        assert types == expected, f"the 3 largest logits of 5 rows are {types}, not {expected}"

    def test_of_the_rows_of_decode(self, bench: Bench) -> None:
        """Clause 12: tokens and logits are the largest of the row that ``decode`` gives, bit for bit."""
        tokens, context, other = bench.tokens(50), _context(bench), bench.context()
        rows = bench.feed(other, tokens, chunk=25)
        for k in (1, 2, 40, rows.shape[1]):
            context.clear()
            for first in (0, 25):
                top = context.decode_top(bench.batch(context, (0, first, tokens[first : first + 25])), k)
                _check_top(top, rows[first : first + 25], k)

    def test_rows_asked_for(self, bench: Bench) -> None:
        """Clause 12: requested rows come in the order of the batch, also among other sequences; no others come."""
        tokens, others, context = bench.tokens(9), bench.tokens(9, seed=1), _context(bench)
        batches = []
        for tested in (context, bench.context()):
            batch = tested.new_batch()
            for i in range(9):
                batch.add(others[i], Pos(1, i), logits=i == 4)
                batch.add(tokens[i], Pos(0, i), logits=i in (1, 2, 6))
            batches.append(tested.decode(batch) if tested is not context else tested.decode_top(batch, 4))
        top, rows = batches
        assert isinstance(top, TopLogits) and isinstance(rows, np.ndarray)
        _check_top(top, rows, 4)
        batch = context.new_batch()
        batch.extend(tokens, Pos(2, 0), logits="none")
        shapes = context.decode_top(batch, 4).tokens.shape, context.decode_top(context.new_batch(), 4).logits.shape
        assert shapes == ((0, 4),) * 2, f"no row asked for, and an empty batch, give shapes {shapes}"

    def test_in_turns_with_decode(self, bench: Bench) -> None:
        """Clause 12: sequences hold the same tokens as after ``decode``, and later calls do not change the result."""
        tokens, context, reference = bench.tokens(30), _context(bench), bench.reference()
        bench.feed(context, tokens[:10])
        top = context.decode_top(bench.batch(context, (0, 10, tokens[10:20])), 5)
        copies = top.tokens.copy(), top.logits.copy(), top.log_totals.copy()
        assert context.tokens(0) == tuple(tokens[:20]), "10 tokens decoded, and 10 once more: the sequence holds others"
        bench.agree(bench.feed(context, tokens[20:]), reference.decode(tokens)[20:], "decode after decode_top")
        after = top.tokens, top.logits, top.log_totals
        assert all(map(np.array_equal, copies, after)), "a later decode wrote into what decode_top had given"

    def test_refusals(self, bench: Bench) -> None:
        """Clauses 1 and 12: an invalid k, and batches that ``decode`` refuses, raise and change nothing."""
        context, size = _context(bench, n_ctx=40), bench.vocab.size
        bench.feed(context, bench.tokens(20))
        for k in (0, -1, size + 1):
            with bench.refused(f"decode_top with k={k}", InvalidOption, context=context):
                context.decode_top(bench.batch(context, (0, 20, [1])), k)
        for why, first, tokens, error in (
            ("a token outside the vocabulary", 20, [1, size], InvalidToken),
            ("a position that is not the next", 21, [1], InvalidPosition),
            ("more tokens than positions", 20, [1] * 21, ContextFull),
        ):
            with bench.refused(f"decode_top with {why}", error, context=context):
                context.decode_top(bench.batch(context, (0, first, tokens)), 2)


def _context(bench: Bench, n_ctx: int = 256) -> Context:
    if Capability.DEVICE_SAMPLING not in bench.capabilities:
        pytest.skip("declared absent: device_sampling")
    return bench.context(n_ctx=n_ctx)


def _check_top(top: TopLogits, rows: Rows, k: int) -> None:
    """Require the result to equal the first columns of a stable sort of the rows."""
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    wrong = np.flatnonzero((top.tokens != expected).any(axis=1))
    assert not len(wrong), f"row {wrong[0]}: the {k} likeliest tokens are {expected[wrong[0]]}, not {top.tokens[wrong]}"
    assert np.array_equal(top.logits, np.take_along_axis(rows, expected, 1)), "the logits are not those of the rows"
    exact = np.log(np.exp(rows.astype(np.float64)).sum(axis=1))
    errors = np.abs(top.log_totals - exact)
    assert (errors <= _TOTAL * (1 + np.abs(exact))).all(), f"log totals are up to {errors.max():.1e} away"
