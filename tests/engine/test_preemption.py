"""Preemption: which requests are preempted, and how they resume."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator

import pytest

from scripted import ALL, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.context.snapshot import drained
from slm_core.engine.core import EngineCore
from slm_core.engine.options import EngineOptions
from slm_core.engine.requests import Request
from slm_core.engine.swap import Swap
from slm_core.errors import DecodeFailed
from slm_core.generation import FinishReason
from slm_core.sampling import Sampling
from slm_core.types import Capability

VOCAB = ByteVocab()
ENDLESS = Sampling(temperature=0, max_tokens=40, logit_bias={257: -1e9})
TEXTS = [f"{i} {'x' * (11 * i % 30)}" for i in range(10)]


def small_engine(swap_s: Callable[[int], float | None] | None = None, **options: object) -> EngineCore:
    """An engine whose context holds a third of its requests' tokens; ``swap_s`` estimates the seconds of a dump."""
    context = ScriptedContext(n_ctx=150, n_seq_max=8, n_batch=16)
    engine = EngineCore(context, EngineOptions(n_parallel=6, prefix_cache=False, **options))  # type: ignore[arg-type]
    if swap_s is not None:
        engine._swap.seconds = swap_s  # type: ignore[method-assign]
    return engine


def requests() -> list[Request]:
    return [Request(VOCAB, list(text.encode()), ENDLESS) for text in TEXTS]


def run(engine: EngineCore, submitted: list[Request]) -> None:
    for request in submitted:
        engine.add(request)
    for _ in range(5000):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


def tokens_alone(text: str) -> tuple[int, ...]:
    with Session(ScriptedContext(n_ctx=1000), VOCAB) as session:
        session.append(text)
        return session.generate(ENDLESS).run().tokens


def test_a_restored_dump_saves_all_computation() -> None:
    """If dumps are fast, no token is computed twice."""
    engine, submitted = small_engine(lambda n: 0.0), requests()
    run(engine, submitted)
    assert [request.answer.tokens for request in submitted] == [tokens_alone(text) for text in TEXTS]
    assert engine.totals.n_preempted == engine.totals.n_swapped > 0
    n_decoded = sum(request.n_prompt + len(request.answer.tokens) - 1 for request in submitted)
    assert engine.totals.computed_tokens == n_decoded
    assert engine._swap.held_bytes == 0


def test_nothing_is_dumped_if_computing_is_faster() -> None:
    engine, submitted = small_engine(lambda n: math.inf), requests()
    run(engine, submitted)
    assert [request.answer.tokens for request in submitted] == [tokens_alone(text) for text in TEXTS]
    assert (engine.totals.n_preempted > 0, engine.totals.n_swapped) == (True, 0)


def test_dumps_stay_within_their_budget() -> None:
    for budget in (0, 400, 3000):
        engine, submitted = small_engine(swap_bytes=budget), requests()
        for request in submitted:
            engine.add(request)
        while engine.step():
            assert engine._swap.held_bytes <= budget
        assert [request.answer.tokens for request in submitted] == [tokens_alone(text) for text in TEXTS]
        assert (engine.totals.n_swapped > 0) == (budget == 3000)


def test_a_refused_dump_is_reported_and_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    engine, submitted = small_engine(lambda n: 0.0), requests()

    def refuse(seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        raise DecodeFailed("no restore today")

    engine.context.restore_steps = refuse  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.WARNING):
        run(engine, submitted)
    assert [request.answer.tokens for request in submitted] == [tokens_alone(text) for text in TEXTS]
    assert len([r for r in caplog.records if "no restore today" in r.message]) == engine.totals.n_swapped > 0


@pytest.mark.parametrize("error", [MemoryError("no memory for a dump"), DecodeFailed("no dump today")])
def test_a_dump_that_fails_is_reported_and_computed_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    engine, submitted = small_engine(lambda n: 0.0), requests()

    def fail(seq_id: int) -> bytes:
        raise error

    engine.context.dump = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        run(engine, submitted)
    assert [request.answer.tokens for request in submitted] == [tokens_alone(text) for text in TEXTS]
    assert len([r for r in caplog.records if str(error) in r.message]) == engine.totals.n_preempted > 0
    assert (engine.totals.n_swapped, engine.context.n_free) == (0, 150)


def test_a_prompt_that_waits_for_its_first_piece_is_preempted() -> None:
    """While answers that come first grow, prompts of a token each wait for their turn: no sequence has a token yet."""
    engine = EngineCore(
        ScriptedContext(n_ctx=120, n_seq_max=64, n_batch=64), EngineOptions(n_parallel=64, prefix_cache=False)
    )
    engine._costs.affordable = lambda *_: 1  # type: ignore[method-assign]
    first = [Request(VOCAB, list(b"d"), ENDLESS, priority=5) for _ in range(20)]
    for request in first:
        engine.add(request)
    while not all(request.begun for request in first):
        engine.step()
    prompts = [Request(VOCAB, [i], Sampling(temperature=0, max_tokens=2)) for i in range(30)]
    run(engine, prompts)
    assert all(request.answer.finish_reason is not FinishReason.CANCELLED for request in [*first, *prompts])
    assert (engine.totals.n_failed, engine.context.n_free) == (0, 120)


def test_a_cancelled_request_leaves_no_dump() -> None:
    engine, submitted = small_engine(lambda n: 0.0), requests()
    for request in submitted:
        engine.add(request)
    while not engine._swap.held_bytes:
        assert engine.step()
    for request in submitted:
        request.loop.cancel()
    assert not engine.step()
    assert (engine._swap.held_bytes, engine.context.n_free) == (0, 150)
    assert any(request.answer.finish_reason is FinishReason.CANCELLED for request in submitted)


def test_without_payloads_nothing_is_dumped() -> None:
    """``restore`` of a dump without payload decodes all tokens in one call; the engine prefills them in chunks."""
    context = ScriptedContext(n_ctx=100, capabilities=ALL - {Capability.KV_PAYLOAD})
    assert Swap(context, 1 << 30).seconds(1) == math.inf


def test_dumps_are_measured() -> None:
    """An exponentially weighted mean of the times of a dump and of the steps of its restore together."""
    now = [0.0]

    class Timed(ScriptedContext):
        def dump(self, seq_id: int) -> bytes:
            now[0] += 20
            return super().dump(seq_id)

        def restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
            steps = super().restore_steps(seq_id, parts)
            now[0] += 10
            yield from steps

    context = Timed(n_ctx=100, n_seq_max=2)
    context.restore(0, _dumped(b"0123456789"))
    swap = Swap(context, 1 << 20, clock=lambda: now[0])
    assert swap.seconds(10) is None
    assert swap.put(7, 0)
    assert swap.seconds(10) == pytest.approx(40)  # until a restore is measured, it counts as much as a dump
    steps = swap.bring_back(7, 1)
    next(steps)
    now[0] += 1000
    assert drained(steps)
    assert swap.seconds(10) == pytest.approx(30)
    assert 7 not in swap
    assert swap.put(8, 1)
    assert swap.seconds(5) == pytest.approx(15)
    assert list(context.tokens(1)) == list(b"0123456789")


def _dumped(tokens: bytes) -> bytes:
    with Session(ScriptedContext(n_ctx=100), VOCAB) as session:
        session.append(tokens.decode())
        session.prefill()
        return session.context.dump(0)


def test_the_cheapest_request_is_preempted() -> None:
    """The lowest priority is preempted; among equal priorities, the request that resumes fastest."""
    context = ScriptedContext(n_ctx=112, n_seq_max=4, n_batch=64)
    engine = EngineCore(context, EngineOptions(prefix_cache=False, swap_bytes=0))
    long, short, urgent = (Request(VOCAB, list(b"y" * n), ENDLESS, priority=p) for n, p in ((60, 0), (20, 0), (10, 1)))
    for request in (short, long, urgent):
        engine.add(request)
    while not engine.totals.n_preempted:
        assert engine.step()
    assert [request.n_preempted for request in (long, short, urgent)] == [0, 1, 0]
