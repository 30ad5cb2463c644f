"""Logits against float64, and against themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.tolerance import N_ROW_SAMPLES, N_SAMPLE
from slm_conformance.suite.workshop import N_OTHER_PROCESS
from slm_core.types import ContextOptions, KvType


class TestNumbers(Scenarios):
    """Clause 9: errors of logits stay within the tolerance."""

    def test_against_the_reference(self, bench: Bench) -> None:
        """Clause 9: the mean error over many rows is within the bound for the weight type."""
        bench.reference()  # skips models without a reference
        self._compare(bench, bench.kv_type)

    def test_each_kv_type(self, bench: Bench) -> None:
        """Clause 9: the mean error is within the bound for each KV type."""
        for kv_type in bench.kv_types[1:]:
            self._compare(bench, kv_type)

    def test_the_default_kv_type(self, bench: Bench) -> None:
        """Clause 9: the default KV type has 16 bits or more."""
        context, tokens = bench.model.new_context(ContextOptions(256, 1, 64)), bench.tokens(N_SAMPLE)
        with context:
            rows = bench.feed(context, tokens)
        bench.agree_in_the_mean(rows, bench.oracle().decode(tokens), "with the default KV type", KvType.F16)

    def test_the_greedy_choice(self, bench: Bench) -> None:
        """Clause 9: the best token is the reference's if its lead exceeds the allowed error."""
        bench.reference()  # skips models without a reference
        for kv_type in bench.kv_types:
            # With errors as large as coarse types allow, a random model may have no clear choice.
            n_clear = self._choose(bench, bench.name, kv_type) or self._choose(bench, bench.calm_name, kv_type)
            assert n_clear, f"with a {kv_type.value} KV cache no row has a clear choice, so that nothing was tested"

    def test_the_same_again(self, bench: Bench) -> None:
        """Context: the same calls give the same logits, bit for bit, in another context, thread or process."""
        tokens = bench.tokens(N_OTHER_PROCESS)
        first = bench.feed(bench.context(), tokens)
        with ThreadPoolExecutor(1) as thread:
            in_a_thread = thread.submit(bench.feed, bench.context(), tokens).result()
        in_a_process = bench.in_another_process().logits.reshape(first.shape)
        others = {"": bench.feed(bench.context(), tokens), " of another thread": in_a_thread}
        for where, second in {**others, " of another process": in_a_process}.items():
            differing = int((first != second).any(axis=1).sum())
            assert differing == 0, (
                f"the same calls on a new context{where}: {differing} of {len(tokens)} rows of logits differ"
            )

    def test_every_token(self, bench: Bench) -> None:
        """Clause 9: logits are within the bound after each token of the vocabulary, the first 512 of a larger one."""
        context, size = bench.context(n_ctx=96), min(bench.vocab.size, 512)
        for first in range(0, size, 96):
            ids = list(range(first, min(first + 96, size)))
            rows = bench.feed(context, ids)
            bench.agree(rows, bench.reference().decode(ids), f"tokens {first} to {ids[-1]} of the vocabulary in turn")
            context.drop(0)

    @staticmethod
    def _choose(bench: Bench, name: str, kv_type: KvType) -> int:
        """Compare the best tokens; returns for how many rows the choice is clear."""
        model, gap, n_clear = bench.workshop.model(name), bench.workshop.tolerance(name, kv_type).gap, 0
        for seed in range(N_ROW_SAMPLES):
            expected = bench.workshop.expected(name, seed)
            rows = bench.feed(bench.context(model=model, kv_type=kv_type), bench.tokens(N_SAMPLE, seed))
            second, best = np.sort(expected, axis=1)[:, -2:].T
            clear = best - second > gap * np.linalg.norm(expected, axis=1)
            wrong = np.flatnonzero((rows.argmax(axis=1) != expected.argmax(axis=1)) & clear)
            assert len(wrong) == 0, (
                f"with a {kv_type.value} KV cache the best token of {len(wrong)} rows is not the reference's, the first"
                f" is row {wrong[0]} of prompt {seed}; its gap to the second exceeds {gap:.1e} of the row's norm"
            )
            n_clear += int(clear.sum())
        return n_clear

    @staticmethod
    def _compare(bench: Bench, kv_type: KvType) -> None:
        tokens = bench.tokens(N_SAMPLE)
        rows = bench.feed(bench.context(kv_type=kv_type), tokens)
        bench.agree_in_the_mean(rows, bench.oracle().decode(tokens), f"with a {kv_type.value} KV cache", kv_type)
