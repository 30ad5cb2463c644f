"""Logits against float64, and against themselves."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.bench import Bench, Rows
from slm_conformance.scenarios.base import Scenarios
from slm_conformance.tolerance import N_SAMPLE, relative_errors
from slm_core.types import ContextOptions, KvType


class TestNumbers(Scenarios):
    """Clause 9."""

    def test_against_the_reference(self, bench: Bench) -> None:
        """Clause 9: the mean error over many rows is within the bound for the weight type."""
        rows, expected = self._rows(bench, bench.kv_type)
        self._check(bench, bench.kv_type, rows, expected)

    def test_each_kv_type(self, bench: Bench) -> None:
        """Clause 9: so it is with each storage type of keys and values."""
        for kv_type in bench.kv_types[1:]:
            rows, expected = self._rows(bench, kv_type)
            self._check(bench, kv_type, rows, expected)

    def test_the_default_kv_type(self, bench: Bench) -> None:
        """Clause 9: a context that names no KV type has 16 bits or better."""
        context, tokens = bench.model.new_context(ContextOptions(256, 1, 64)), bench.tokens(N_SAMPLE)
        with context:
            self._check(bench, KvType.F16, bench.feed(context, tokens), bench.reference().decode(tokens))

    def test_the_greedy_choice(self, bench: Bench) -> None:
        """Clause 9: the best token is the reference's wherever the gap to the second exceeds the error allowed."""
        rows, expected = self._rows(bench, bench.kv_type)
        # Two entries of a row can differ by the norm of its error times the square root of two, and no more.
        allowed = np.sqrt(2) * bench.tolerance.row * np.linalg.norm(expected, axis=1)
        two_best = np.sort(expected, axis=1)[:, -2:]
        clear = two_best[:, 1] - two_best[:, 0] > allowed
        if not clear.any():
            pytest.skip("with errors as large as quantization allows, not one row has a choice that is clear")
        wrong = np.flatnonzero((rows.argmax(axis=1) != expected.argmax(axis=1)) & clear)
        assert len(wrong) == 0, f"in {len(wrong)} rows the best token is not the reference's, first in row {wrong[:1]}"

    def test_the_same_again(self, bench: Bench) -> None:
        """Context: the same calls on a new one give the same logits, bit for bit."""
        tokens = bench.tokens(40)
        first, second = bench.feed(bench.context(), tokens), bench.feed(bench.context(), tokens)
        differing = int((first != second).any(axis=1).sum())
        assert differing == 0, f"the same calls on two new contexts: {differing} of 40 rows of logits differ"

    def test_are_finite(self, bench: Bench) -> None:
        """Clause 9: logits are numbers, for every token of the vocabulary."""
        context = bench.context(n_ctx=128)
        for first in range(0, bench.vocab.size, 96):
            rows = bench.feed(context, list(range(first, min(first + 96, bench.vocab.size))))
            assert np.isfinite(rows).all(), f"tokens {first} to {first + len(rows) - 1}: a row holds inf or nan"
            context.drop(0)
            if first > 1000:
                break

    @staticmethod
    def _rows(bench: Bench, kv_type: KvType) -> tuple[Rows, Rows]:
        tokens = bench.tokens(N_SAMPLE)
        return bench.feed(bench.context(kv_type=kv_type), tokens), bench.reference().decode(tokens)

    @staticmethod
    def _check(bench: Bench, kv_type: KvType, rows: Rows, expected: Rows) -> None:
        allowed = bench.workshop.tolerance(bench.name, kv_type)
        errors = relative_errors(rows, expected)
        if not errors.mean() <= allowed.mean:
            pytest.fail(
                f"with a {kv_type.value} KV cache the logits of {len(rows)} tokens differ by {errors.mean():.2e} of"
                f" their norm in the mean, and by {errors.max():.2e} at most (allowed in the mean: {allowed.mean:.1e})",
                pytrace=False,
            )
