"""Calls that fail half-way although they are legal: an interrupt, or a batch that cannot be read."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.suite.bench import Bench, contents_of
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.scenarios.snapshots import foreign
from slm_core.context.batch import TokenBatch
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import ContextFull, SlmError
from slm_core.protocols import Context
from slm_core.types import Capability, Pos

_SHARES = (0.25, 0.5)
"""When to interrupt a call, as a share of its calls of Python functions, while the engine works."""
_SOON_AFTER = 0.9
"""When to interrupt a decode after the engine has worked."""


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

    def test_an_interrupted_decode(self, bench: Bench) -> None:
        """Clause 1: an interrupt (Ctrl-C) in the middle of ``decode`` leaves two sequences as they were."""
        tokens, others = bench.tokens(50), bench.tokens(20, seed=1)
        expected = bench.oracle().decode(tokens)[20:], bench.oracle().decode(others)[5:]

        def prepare() -> tuple[Context, Callable[[], object]]:
            context = bench.context()
            bench.feed(context, tokens[:20])
            bench.feed(context, others[:5], seq_id=1)
            batch = bench.batch(context, (0, 20, tokens[20:]), (1, 5, others[5:]))
            return context, lambda: context.decode(batch)

        for context, share in _interrupted(prepare, (*_SHARES, _SOON_AFTER)):
            what = f"a sequence whose decode was interrupted after {share:.0%} of it"
            bench.agree(bench.feed(context, others[5:], seq_id=1), expected[1], what)
            bench.agree(bench.feed(context, tokens[20:]), expected[0], what)

    def test_an_interrupted_restore(self, bench: Bench) -> None:
        """Clauses 1 and 6: an interrupt (Ctrl-C) in ``restore`` leaves the sequence as it was."""
        tokens, source = bench.tokens(30), bench.context()
        bench.feed(source, bench.tokens(40, seed=1))
        dump_of_source = source.dump(0)
        expected = bench.oracle().decode(tokens)[20:]
        for data in (dump_of_source, foreign(SequenceSnapshot.from_bytes(dump_of_source)).to_bytes()):

            def prepare(data: bytes = data) -> tuple[Context, Callable[[], object]]:
                context = bench.context(n_batch=16)
                bench.feed(context, tokens[:20])
                return context, lambda: context.restore(0, data)

            for context, share in _interrupted(prepare):
                what = f"a sequence, after a restore that was interrupted after {share:.0%} of it"
                bench.agree(bench.feed(context, tokens[20:]), expected, what)

    def test_an_interrupted_restore_over_a_fork(self, bench: Bench) -> None:
        """Clause 1: an interrupted ``restore`` over a fork that shares storage needs no additional room.

        The context is almost full. The fork's tokens could not be decoded again, as dropping the fork frees nothing.
        A backend may also refuse the dump with ``ContextFull``.
        """
        if Capability.SHARED_FORK not in bench.capabilities:
            pytest.skip("declared absent: shared_fork")
        tokens, source = bench.tokens(24), bench.context()
        bench.feed(source, bench.tokens(3, seed=1))
        data = source.dump(0)
        expected = bench.oracle().decode(tokens)[20:]

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
        for context, share in _interrupted(prepare):
            context.drop(2)
            what = f"a fork, after a restore over it that was interrupted after {share:.0%} of it"
            bench.agree(bench.feed(context, tokens[20:], seq_id=1), expected, what)


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


def _interrupted(
    prepare: Callable[[], tuple[Context, Callable[[], object]]], shares: Sequence[float] = _SHARES
) -> list[tuple[Context, float]]:
    """Contexts after an interrupted call, and how far it had come; fails if one has changed."""
    prepare()[1]()  # the first call of a context may have more to prepare than later ones
    n_calls = _watch(prepare()[1], None)
    done = []
    for share in shares:
        context, call = prepare()
        before = contents_of(context)
        try:
            _watch(call, max(1, int(n_calls * share)))
        except KeyboardInterrupt:
            assert contents_of(context) == before, (
                f"a call was interrupted after {share:.0%} of it, and the context has changed"
            )
            done.append((context, share))
        except SlmError as error:
            raise AssertionError(f"a call was interrupted, and raised {type(error).__name__} ({error})") from error
        else:
            with contextlib.suppress(KeyboardInterrupt):  # a call that succeeds may leave the interrupt to the next
                context.clear()
    return done


def _watch(call: Callable[[], object], stop: int | None) -> int:
    """Make a call, and interrupt it at the ``stop``-th call of a Python function; returns the number of such calls.

    Generators do not count: Python resumes an abandoned generator once more, and ignores its exceptions.
    """
    n = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n
        if event != "call" or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        n += 1
        if n == stop:
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return n
