"""Opening, closing, sharing and sizing contexts and models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from slm_conformance.bench import Bench, Rows
from slm_conformance.scenarios.base import Scenarios
from slm_core.batch import TokenBatch
from slm_core.errors import ContextBusy, ContextClosed, InvalidOption, InvalidSequence, ModelClosed
from slm_core.protocols import Context
from slm_core.types import ContextOptions, EditLevel, KvType, Pos


class TestClose(Scenarios):
    """Clause 10."""

    def test_use_after_close(self, bench: Bench) -> None:
        """Clause 10: every call of a closed context raises ``ContextClosed``."""
        context = bench.context()
        bench.feed(context, bench.tokens(20))
        data, batch = context.dump(0), bench.batch(context, (0, 20, bench.tokens(2)))
        context.close()
        calls: dict[str, Callable[[], object]] = {
            "decode": lambda: context.decode(batch),
            "new_batch": lambda: context.new_batch(),
            "length": lambda: context.length(0),
            "tokens": lambda: context.tokens(0),
            "fork": lambda: context.fork(0, 1),
            "drop": lambda: context.drop(0),
            "clear": lambda: context.clear(),
            "dump": lambda: context.dump(0),
            "restore": lambda: context.restore(0, data),
        }
        if bench.edit_level >= EditLevel.TRUNCATE:
            calls["truncate"] = lambda: context.truncate(Pos(0, 3))
        if bench.edit_level >= EditLevel.CUT:
            calls["cut"] = lambda: context.cut(Pos(0, 3), Pos(0, 5))
        for name, call in calls.items():
            with bench.refused(f"{name} of a closed context", ContextClosed):
                call()

    def test_twice(self, bench: Bench) -> None:
        """Clause 10: closing twice is fine, for contexts and models; ``with`` closes."""
        with bench.own_model() as model:
            context = bench.context(model=model)
            with context:
                bench.feed(context, bench.tokens(5))
            with bench.refused("length after the with block of a context", ContextClosed):
                context.length(0)
            context.close()
        model.close()
        with bench.refused("a context after the with block of its model", ModelClosed):
            bench.context(model=model)

    def test_of_the_model(self, bench: Bench) -> None:
        """Clause 10: closing a model closes its contexts first; what is known of it stays readable."""
        model = bench.own_model()
        context, info = bench.context(model=model), model.info
        bench.feed(context, bench.tokens(10))
        model.close()
        with bench.refused("decoding after the model was closed", ContextClosed):
            bench.feed(context, bench.tokens(1))
        with bench.refused("new_context of a closed model", ModelClosed):
            bench.context(model=model)
        assert model.info == info, "the info of a closed model is another than before"

    def test_leaves_other_contexts(self, bench: Bench) -> None:
        """Contexts of one model are independent: closing one leaves the others."""
        first, second, tokens = bench.context(), bench.context(), bench.tokens(30)
        bench.feed(second, tokens[:20])
        bench.feed(first, bench.tokens(40, seed=1))
        first.close()
        expected = bench.reference().decode(tokens)[20:]
        bench.agree(bench.feed(second, tokens[20:]), expected, "a context, after another of its model was closed")

    def test_the_interpreter_ends_with_open_contexts(self, bench: Bench) -> None:
        """Clause 10: a program may end without closing: no crash, no hang, status 0."""
        bench.in_another_process("exit", bench.tokens(20))


class TestSizes(Scenarios):
    """What a context is made with."""

    def test_are_as_asked(self, bench: Bench) -> None:
        """A new context is empty, has the sizes it was asked for, and all of it is free."""
        context = bench.context(n_ctx=100, n_seq_max=3, n_batch=20)
        sizes = (context.n_ctx, context.n_seq_max, context.n_batch, context.n_free)
        assert sizes == (100, 3, 20, 100), f"asked for (100, 3, 20), n_ctx, n_seq_max, n_batch and n_free are {sizes}"
        assert [context.length(seq_id) for seq_id in range(3)] == [0, 0, 0], "a new context holds tokens"

    def test_below_one(self, bench: Bench) -> None:
        """A size below 1 is refused with ``InvalidOption``."""
        for size in (0, -1):
            sized = (ContextOptions(n_ctx=size), ContextOptions(n_seq_max=size), ContextOptions(n_batch=size))
            for name, options in zip(("n_ctx", "n_seq_max", "n_batch"), sized, strict=True):
                with bench.refused(f"a context with {name}={size}", InvalidOption):
                    bench.model.new_context(options)

    def test_batch_capacity(self, bench: Bench) -> None:
        """A batch larger than ``n_batch``, or without room, is refused with ``InvalidOption``."""
        context = bench.context(n_batch=20)
        for capacity in (0, 21, -3):
            with bench.refused(f"new_batch({capacity}) where n_batch is 20", InvalidOption):
                context.new_batch(capacity)

    def test_unknown_sequences_have_no_length(self, bench: Bench) -> None:
        """Clause 1: ``length`` and ``tokens`` of an unknown sequence are refused."""
        context = bench.context(n_seq_max=2)
        for seq_id in (2, -1):
            for call in (context.length, context.tokens):
                with bench.refused(f"{call.__name__}({seq_id}) of 2 sequences", InvalidSequence, context=context):
                    call(seq_id)

    def test_kv_types(self, bench: Bench) -> None:
        """A KV type that the backend has works; any other is refused with ``InvalidOption``, not ignored."""
        declared = {KvType(name) for name in bench.workshop.fixtures.kv_types}
        for kv_type in sorted(set(KvType) - declared):
            with bench.refused(f"KV type {kv_type.value}, which is not declared", InvalidOption):
                bench.context(kv_type=kv_type)
        for kv_type in bench.kv_types():
            context = bench.context(kv_type=kv_type)
            bench.feed(context, bench.tokens(8))
            context.close()


class TestThreads(Scenarios):
    """A context is for one thread at a time, a model for any."""

    def test_a_busy_context_refuses(self, bench: Bench) -> None:
        """A second thread inside a call gets ``ContextBusy``, never corruption: it may try again, and all is right."""
        runs = {seq_id: bench.tokens(24, seed=seq_id) for seq_id in (0, 1)}
        expected = {seq_id: bench.reference().decode(tokens) for seq_id, tokens in runs.items()}
        for _ in range(40):
            context = bench.context()
            refusals: list[int] = []
            with _quick_switching(), ThreadPoolExecutor(2) as threads:
                jobs = {s: threads.submit(_insist, context, tokens, s, refusals) for s, tokens in runs.items()}
            for seq_id, job in jobs.items():
                bench.agree(job.result(), expected[seq_id], "a sequence, while a second thread decoded another")
            context.close()
            if refusals:
                return
        pytest.fail(
            "two threads decoded 40 times with one context, and neither was ever told ContextBusy: their calls are not"
            " kept apart (or the engine holds Python's global lock through each call)"
        )

    def test_contexts_in_parallel(self, bench: Bench) -> None:
        """Three threads, each with a context of its own over one model, give what each gives alone."""
        runs = [bench.tokens(30, seed=seed) for seed in range(3)]
        contexts = [bench.context() for _ in runs]
        with _quick_switching(), ThreadPoolExecutor(3) as threads:
            jobs = [threads.submit(bench.feed, c, run, 0, 5) for c, run in zip(contexts, runs, strict=True)]
        for job, run in zip(jobs, runs, strict=True):
            bench.agree(job.result(), bench.reference().decode(run), "one of three contexts in parallel threads")


def _insist(context: Context, tokens: Sequence[int], seq_id: int, refusals: list[int]) -> Rows:
    """Decode two tokens at a time, again whenever another thread is inside the context."""
    rows: list[Rows] = []
    for first in range(0, len(tokens), 2):
        batch = TokenBatch(2)
        batch.extend(tokens[first : first + 2], Pos(seq_id, first), logits="all")
        while len(rows) * 2 == first:
            try:
                rows.append(context.decode(batch).copy())
            except ContextBusy:
                refusals.append(first)
    return np.concatenate(rows)


@contextmanager
def _quick_switching() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
