"""Calls that fail half-way although they are legal: an interrupt, or a batch that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.interrupting import interrupted, n_calls_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_core.context.batch import TokenBatch
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import ContextFull, DecodeFailed, InvalidModelFile, SlmError, UnsupportedModel
from slm_core.protocols import Batch, Context
from slm_core.types import Capability, EditLevel, Pos

_SHARES = (0.25, 0.5, 0.9, 1.0)
"""Where to interrupt a call: after this share of its calls of Python functions. It records changes at its end."""


class TestFailures(Scenarios):
    """Clause 1: a call that raises leaves the context as it was, whatever the error and its source."""

    def test_a_batch_that_cannot_be_read(self, bench: Bench) -> None:
        """Clause 1: if an array of the batch cannot be read, nothing changes, and the context continues."""
        context, tokens = bench.context(), bench.tokens(30)
        bench.feed(context, tokens[:20])
        before, n_reads = contents_of(context), 0
        while True:
            batch = _UnreadableBatch(10, n_reads)
            batch.extend(tokens[20:], Pos(0, 20), logits="all")
            try:
                rows = context.decode(batch)
                break
            except _Unreadable:
                n_reads += 1
            assert contents_of(context) == before, (
                f"reading the batch failed at read {n_reads}, and the context has changed"
            )
        assert n_reads, "the batch was decoded, but never read"
        bench.agree(rows, bench.oracle().decode(tokens)[20:], f"a batch that failed to be read {n_reads} times")

    def test_numbers_that_are_not_finite(self, bench: Bench) -> None:
        """Clauses 1, 7 and 11: a sequence with a token whose embedding is NaN raises ``DecodeFailed``; others go on."""
        broken, others = bench.tokens(1, seed=9)[0], bench.tokens(40, seed=1)
        others = [token for token in others if token != broken]
        try:
            model = bench.broken_model(broken)
        except (InvalidModelFile, UnsupportedModel) as error:
            bench.note(f"refuses a file with NaN: {error}")
            return
        context = bench.context(model=model)
        bench.feed(context, others[:8], seq_id=1)
        n_decoded = 8
        for what, call in _calls_with_rows(bench, context):
            for n_others in (0, 1):
                batch = context.new_batch()
                batch.extend([others[0], broken], Pos(0, 0), logits="last")
                batch.extend(others[n_decoded : n_decoded + n_others], Pos(1, n_decoded), logits="all")
                before = contents_of(context)
                with pytest.raises(DecodeFailed) as raised:
                    call(batch)
                assert contents_of(context) == before, f"{what} raised for NaN, and the context has changed"
                expected_id = None if n_others else 0
                assert raised.value.seq_id == expected_id, (
                    f"{what} named sequence {raised.value.seq_id}, not {expected_id}"
                )
                _check_continues(
                    bench, context, others[: n_decoded + 3], f"a sequence beside {what} that failed", seq_id=1
                )
                n_decoded += 3
        _check_continues(bench, context, others[:8], "a sequence whose first batch failed")

    def test_an_interrupted_decode(self, bench: Bench) -> None:
        """Clause 1: an interrupt (Ctrl-C) takes effect before or after a ``decode``, for both of its sequences."""
        tokens, others = bench.tokens(50), bench.tokens(20, seed=1)

        def prepare() -> tuple[Context, Callable[[], object]]:
            context = bench.context()
            bench.feed(context, tokens[:20])
            bench.feed(context, others[:5], seq_id=1)
            batch = bench.batch(context, (0, 20, tokens[20:45]), (1, 5, others[5:15]))
            return context, lambda: context.decode(batch)

        for context, what in _interrupted(prepare):
            _check_continues(bench, context, others, what, seq_id=1)
            _check_continues(bench, context, tokens, what)

    def test_an_interrupted_truncate(self, bench: Bench) -> None:
        """Clause 1: an interrupt (Ctrl-C) takes effect before or after a ``truncate``."""
        bench.requires(EditLevel.TRUNCATE)
        tokens = bench.tokens(30)

        def prepare() -> tuple[Context, Callable[[], object]]:
            context = bench.context()
            bench.feed(context, tokens[:20])
            return context, lambda: context.truncate(Pos(0, 10))

        for context, what in _interrupted(prepare):
            _check_continues(bench, context, tokens, what)

    def test_an_interrupted_cut(self, bench: Bench) -> None:
        """Clauses 1 and 4: an interrupt (Ctrl-C) takes effect before or after a ``cut``."""
        bench.requires(EditLevel.CUT)
        tokens = bench.tokens(30)
        oracle = bench.oracle()
        oracle.decode(tokens[:20])
        oracle.cut(3, 10)
        after_cut = oracle.decode(tokens[20:])

        def prepare() -> tuple[Context, Callable[[], object]]:
            context = bench.context()
            bench.feed(context, tokens[:20])
            return context, lambda: context.cut(Pos(0, 3), Pos(0, 10))

        for context, what in _interrupted(prepare):
            if context.length(0) == 20:
                _check_continues(bench, context, tokens, what)
            else:
                bench.agree(bench.feed(context, tokens[20:]), after_cut, what)

    def test_an_interrupted_fork(self, bench: Bench) -> None:
        """Clauses 1 and 5: an interrupt (Ctrl-C) takes effect before or after a ``fork``."""
        tokens = bench.tokens(30)

        def prepare() -> tuple[Context, Callable[[], object]]:
            context = bench.context()
            bench.feed(context, tokens[:20])
            return context, lambda: context.fork(0, 1)

        for context, what in _interrupted(prepare):
            _check_continues(bench, context, tokens, what, seq_id=1)
            _check_continues(bench, context, tokens, what)

    def test_an_interrupted_drop(self, bench: Bench) -> None:
        """Clause 1: an interrupt (Ctrl-C) takes effect before or after a ``drop``."""
        tokens = bench.tokens(30)

        def prepare() -> tuple[Context, Callable[[], object]]:
            context = bench.context()
            bench.feed(context, tokens[:20])
            return context, lambda: context.drop(0)

        for context, what in _interrupted(prepare):
            _check_continues(bench, context, tokens, what)

    def test_an_interrupted_restore(self, bench: Bench) -> None:
        """Clauses 1 and 6: an interrupt (Ctrl-C) takes effect before or after a ``restore``."""
        tokens, others, source = bench.tokens(30), bench.tokens(50, seed=1), bench.context()
        bench.feed(source, others[:40])
        dump_of_source = source.dump(0)
        for data in (dump_of_source, foreign(SequenceSnapshot.from_bytes(dump_of_source)).to_bytes()):

            def prepare(data: bytes = data) -> tuple[Context, Callable[[], object]]:
                context = bench.context(n_batch=16)
                bench.feed(context, tokens[:20])
                return context, lambda: context.restore(0, data)

            for context, what in _interrupted(prepare):
                _check_continues(bench, context, tokens if context.length(0) == 20 else others, what)

    def test_an_interrupted_restore_over_a_fork(self, bench: Bench) -> None:
        """Clause 1: an interrupted ``restore`` over a fork that shares storage needs no additional room.

        The context is almost full. The fork's tokens could not be decoded again, because dropping the fork frees
        nothing. A backend may also refuse the dump with ``ContextFull``.
        """
        if Capability.SHARED_FORK not in bench.capabilities:
            pytest.skip("declared absent: shared_fork")
        tokens, others, source = bench.tokens(24), bench.tokens(7, seed=1), bench.context()
        bench.feed(source, others[:3])
        data = source.dump(0)

        def prepare() -> tuple[Context, Callable[[], object]]:
            context = bench.context(n_ctx=48, n_seq_max=3)
            bench.feed(context, tokens[:20])
            context.fork(0, 1)
            bench.feed(context, bench.tokens(24, seed=2), seq_id=2)
            return context, lambda: context.restore(1, data)

        context, restore = prepare()
        try:
            restore()
        except ContextFull:
            assert context.tokens(1) == tuple(tokens[:20]), "a restore was refused, and the fork has changed"
            return
        for context, what in _interrupted(prepare):
            context.drop(2)
            _check_continues(bench, context, tokens if context.length(1) == 20 else others, what, seq_id=1)


def _calls_with_rows(bench: Bench, context: Context) -> list[tuple[str, Callable[[Batch], object]]]:
    """The calls of a context that run a batch and return rows."""
    calls: list[tuple[str, Callable[[Batch], object]]] = [("decode", context.decode)]
    if Capability.EMBEDDINGS in bench.capabilities:
        calls.append(("embed", context.embed))
    if Capability.DEVICE_SAMPLING in bench.capabilities:
        calls.append(("decode_top", lambda batch: context.decode_top(batch, 3)))
    if Capability.LAYER_STATES in bench.capabilities:
        calls.append(("layer_states", lambda batch: context.layer_states(batch, [0])))
    return calls


class _Unreadable(Exception):
    """An array of a batch could not be read."""


class _UnreadableBatch(TokenBatch):
    """A batch whose arrays can be read ``n_reads`` times; later reads raise."""

    def __init__(self, capacity: int, n_reads: int) -> None:
        super().__init__(capacity)
        self._n_reads = n_reads

    def _read(self, array: NDArray[Any]) -> NDArray[Any]:
        if self._n_reads == 0:
            raise _Unreadable("this array cannot be read")
        self._n_reads -= 1
        return array

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, or an exception."""
        return self._read(super().tokens)

    @property
    def seq_ids(self) -> NDArray[np.int32]:
        """Sequences, or an exception."""
        return self._read(super().seq_ids)

    @property
    def positions(self) -> NDArray[np.int32]:
        """Positions, or an exception."""
        return self._read(super().positions)

    @property
    def logits_mask(self) -> NDArray[np.bool_]:
        """The requested rows, or an exception."""
        return self._read(super().logits_mask)


def _check_continues(bench: Bench, context: Context, tokens: Sequence[int], what: str, *, seq_id: int = 0) -> None:
    """Check the logits of the remaining ``tokens``; the sequence already has the first of them."""
    length = context.length(seq_id)
    rows = bench.feed(context, tokens[length:], seq_id=seq_id)
    bench.agree(rows, bench.oracle().decode(tokens)[length:], what)


def _interrupted(prepare: Callable[[], tuple[Context, Callable[[], object]]]) -> list[tuple[Context, str]]:
    """Contexts with an interrupted call, each with a description; fails if one is neither as before nor as after it."""
    finished_context, call = prepare()
    call()  # the first call of a context may have more to prepare than later ones
    after = contents_of(finished_context)
    n_calls = n_calls_of(prepare()[1])
    interrupted_contexts = []
    for share in _SHARES:
        context, call = prepare()
        before, what = contents_of(context), f"a call that was interrupted after {share:.0%} of it"
        try:
            has_returned = interrupted(call, max(1, int(n_calls * share)), partial(context.fork_cost, 0))
        except SlmError as error:
            raise AssertionError(f"{what} raised {type(error).__name__} ({error})") from error
        if has_returned:
            assert contents_of(context) == after, f"{what} has returned, without the effect of the call"
        else:
            assert contents_of(context) == before, f"{what} has raised the interrupt, and the context has changed"
        interrupted_contexts.append((context, what))
    return interrupted_contexts
