"""Concurrent requests over a scripted context: each gets the tokens that it gets alone, and each fails alone.

Some tests are named after bug reports against other engines: if the engine had the bug, the test would fail.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence

import pytest

from scripted import ALL, ByteVocab, Script, ScriptedContext
from slm_core.chat import Session
from slm_core.constraints import Choice, Regex, compile  # noqa: A004
from slm_core.engine.core import EngineCore
from slm_core.engine.options import EngineOptions
from slm_core.engine.requests import Request
from slm_core.errors import BackendCrashed, ContextFull, DecodeFailed, InvalidOption, SlmError
from slm_core.generation import Event, FinishReason, StoppingAction
from slm_core.protocols import Batch, Context
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel, Logits

VOCAB = ByteVocab()
GREEDY = Sampling(temperature=0, max_tokens=12)


class FailingContext(ScriptedContext):
    """Raises the error that ``fails`` returns for a batch."""

    fails: Callable[[Batch], BaseException | None] = staticmethod(lambda batch: None)

    def _engine_decode(self, batch: Batch) -> Logits:
        error = self.fails(batch)
        if error is not None:
            raise error
        return super()._engine_decode(batch)


class DyingContext(ScriptedContext):
    """Every call raises ``BackendCrashed`` from call ``dies_at`` on, as an isolated context does after a crash."""

    CALLS = frozenset(vars(Context)) - {"close", "new_batch", "n_ctx", "n_batch", "n_seq_max"}
    dies_at = math.inf
    n_calls = 0

    def __getattribute__(self, name: str) -> object:
        if name in DyingContext.CALLS and not name.startswith("_"):
            self.n_calls += 1
            if self.n_calls >= self.dies_at:
                raise BackendCrashed(f"gone before {name}")
        return super().__getattribute__(name)


class Countdown:
    """Returns an error at one call, and None at all others."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.n_left = at
        self._error = error

    def __call__(self, batch: Batch) -> BaseException | None:
        self.n_left -= 1
        return self._error if self.n_left == 0 else None


def core(context: ScriptedContext | None = None, **options: object) -> EngineCore:
    return EngineCore(context or ScriptedContext(n_ctx=1000, n_seq_max=8), EngineOptions(**options))  # type: ignore[arg-type]


def request(text: str, sampling: Sampling = GREEDY, **options: object) -> Request:
    return Request(VOCAB, list(text.encode()), sampling, **options)  # type: ignore[arg-type]


def run(engine: EngineCore, requests: Sequence[Request], most: int = 5000) -> None:
    for each in requests:
        engine.add(each)
    for _ in range(most):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


def tokens_alone(
    text: str, sampling: Sampling = GREEDY, script: Script = lambda data: None, **options: object
) -> tuple[int, ...]:
    with Session(ScriptedContext(script, n_ctx=1000), VOCAB) as session:
        session.append(text)
        return session.generate(sampling, **options).run().tokens  # type: ignore[arg-type]


TEXTS = [f"{'shared beginning ' * (i % 3)}{i} {'x' * (7 * i % 50)}" for i in range(24)]


@pytest.mark.parametrize("n_ctx", [1000, 150, 110])
@pytest.mark.parametrize("capabilities", [ALL, frozenset({Capability.KV_PAYLOAD})], ids=["shared", "copied"])
@pytest.mark.parametrize("level", list(EditLevel))
def test_requests_get_the_same_tokens_as_alone(
    n_ctx: int, capabilities: frozenset[Capability], level: EditLevel
) -> None:
    """Greedy, sampled and constrained requests; with and without enough room; with few sequences."""
    context = ScriptedContext(n_ctx=n_ctx, n_seq_max=5, n_batch=16, level=level, capabilities=capabilities)
    engine = core(context, n_parallel=4)
    samplings = [
        GREEDY,
        Sampling(seed=3, max_tokens=20),
        Sampling(temperature=1.5, top_k=5, seed=8, max_tokens=9, repeat_penalty=1.3),
    ]
    options = [(text, samplings[i % 3]) for i, text in enumerate(TEXTS)]
    requests = [request(text, sampling) for text, sampling in options]
    run(engine, requests)
    assert [r.answer.tokens for r in requests] == [tokens_alone(text, sampling) for text, sampling in options]
    assert (engine.totals.n_finished, engine.totals.n_failed) == (24, 0)
    if n_ctx != 150:
        assert (engine.totals.n_preempted > 0) == (n_ctx == 110)


def test_forced_tokens_are_one_batch() -> None:
    """The first letter decides the choice. The forced rest is decoded in one batch, and the answer is the same."""
    spec = Choice(["elephants and zebras", "quite another thing"])
    steps = []
    engine = core()
    requests = [request(text, constraint=compile(spec, VOCAB)) for text in ("a", "b")]
    engine.context.on_decode = lambda: steps.append(1)  # type: ignore[attr-defined]
    run(engine, requests)
    assert [r.answer.tokens for r in requests] == [tokens_alone(text, constraint=spec) for text in "ab"]
    assert len(steps) <= 4


def test_max_tokens_limits_forced_tokens() -> None:
    spec = Choice(["elephants and zebras"])
    for n in range(1, 8):
        limited = Sampling(temperature=0, max_tokens=n)
        each = request("a", limited, constraint=compile(spec, VOCAB))
        run(core(), [each])
        assert each.answer.tokens == tokens_alone("a", limited, constraint=spec)
        assert len(each.answer.tokens) == n


# Prefixes.


def test_a_common_prefix_of_simultaneous_prompts_is_computed_once() -> None:
    engine = core(ScriptedContext(n_ctx=2000, n_seq_max=16))
    shared = "a long beginning that all of them have " * 8
    requests = [request(shared + str(i)) for i in range(8)]
    run(engine, requests)
    n_answers = sum(len(r.answer.tokens) for r in requests)
    assert engine.totals.computed_tokens <= len(shared) + 8 + n_answers
    assert [r.answer.tokens for r in requests] == [tokens_alone(shared + str(i)) for i in range(8)]
    assert [r.answer.usage.cached_tokens for r in requests] == [0] + [len(shared)] * 7


def test_a_later_prompt_reuses_a_common_prefix() -> None:
    engine = core()
    first = request("what all prompts of this user begin with: one")
    run(engine, [first])
    second = request("what all prompts of this user begin with: two")
    run(engine, [second])
    assert second.answer.usage.cached_tokens == len("what all prompts of this user begin with: ")
    assert second.answer.tokens == tokens_alone("what all prompts of this user begin with: two")


def test_a_follow_up_question_reuses_the_conversation() -> None:
    engine = core()
    first = request("question one")
    run(engine, [first])
    answer = bytes(token for token in first.answer.tokens if token < 256).decode("latin-1")
    tokens = [*b"question one", *answer.encode("latin-1"), *b" and question two"]
    second = Request(VOCAB, tokens, GREEDY)
    run(engine, [second])
    # The last token of an answer was chosen, not decoded.
    assert second.answer.usage.cached_tokens >= len("question one") + len(answer) - 1


def test_different_salts_share_no_prefix() -> None:
    engine = core()
    run(engine, [request("the same words, twice over", salt="a"), request("the same words, twice over", salt="b")])
    assert engine.totals.cached_tokens == 0
    run(engine, [request("the same words, twice over", salt="c")])  # not the cached sequences either
    assert engine.totals.cached_tokens == 0
    run(engine, [request("the same words, twice over", salt="a")])
    assert engine.totals.cached_tokens > 0


def test_without_a_prefix_cache_no_sequence_is_cached() -> None:
    engine = core(prefix_cache=False)
    run(engine, [request(text) for text in TEXTS])
    assert (engine.totals.cached_tokens, engine.n_cached_sequences, engine.context.n_free) == (0, 0, 1000)


def test_cache_grows_until_the_oom_killer() -> None:
    """The prefix cache has no memory of its own: it is evicted when requests need room."""
    engine = core(ScriptedContext(n_ctx=200, n_seq_max=4))
    for i in range(40):
        run(engine, [request(f"{i} is the beginning of a prompt of its own {'y' * 60}")])
        assert engine.n_cached_sequences <= 4
    assert engine.totals.n_failed == 0


# Fair shares.


def test_one_prompt_freezes_all_streams() -> None:
    """While a long prompt is prefilled, every other request gets one token per step."""
    engine = core(ScriptedContext(n_ctx=2000, n_seq_max=8, n_batch=64))
    events: list[int] = []
    others = [
        request(f"{i}", Sampling(temperature=0, max_tokens=60), on_event=lambda e: events.append(1)) for i in range(3)
    ]
    run_some(engine, others, 2)
    long = request("z" * 600, Sampling(temperature=0, max_tokens=1))
    engine.add(long)
    while not long.over:
        before, n_active = len(events), sum(not other.over for other in others)
        engine.step()
        assert len(events) - before == n_active
    assert engine.totals.n_preempted == 0


def run_some(engine: EngineCore, requests: Sequence[Request], n_steps: int) -> None:
    for each in requests:
        engine.add(each)
    for _ in range(n_steps):
        engine.step()


def test_higher_priorities_are_answered_first() -> None:
    order: list[str] = []
    engine = core(n_parallel=1)
    requests = [
        request(name, priority=p, on_end=lambda n=name: order.append(n)) for name, p in [("a", 0), ("b", 5), ("c", 1)]
    ]  # type: ignore[misc]
    run(engine, requests)
    assert order == ["b", "c", "a"]


def test_equal_priorities_are_ordered_by_deadline() -> None:
    order: list[str] = []
    engine = core(n_parallel=1)
    timeouts = [("a", None), ("b", 500.0), ("c", 60.0)]
    run(engine, [request(name, timeout=s, on_end=lambda n=name: order.append(n)) for name, s in timeouts])  # type: ignore[misc]
    assert order == ["c", "b", "a"]


def test_keys_get_equal_shares() -> None:
    """A key with many requests does not delay a key with few requests."""
    order: list[str] = []
    engine = core(n_parallel=1, aging_s=1e9)
    greedy = [request(f"{i}", key="much", on_end=lambda: order.append("much")) for i in range(10)]
    modest = [request(f"x{i}", key="little", on_end=lambda: order.append("little")) for i in range(2)]
    run(engine, [*greedy, *modest])
    assert order.index("little") <= 1
    assert max(i for i, name in enumerate(order) if name == "little") <= 4


def test_a_key_owes_nothing_for_service_without_competition() -> None:
    """A key that comes when no other has requests does not come before a key that was served much earlier."""
    order: list[str] = []
    engine = core(n_parallel=1, aging_s=1e9)
    run(engine, [request(f"{i} long ago", key="early") for i in range(20)])

    def asked(name: str) -> Request:
        return request(name, key=name, on_end=lambda: order.append(name))

    run(engine, [asked(name) for name in ["late"] * 4 + ["early"] * 4])
    assert [set(order[i : i + 2]) for i in range(0, 8, 2)] == [{"early", "late"}] * 4


def test_keys_without_requests_are_forgotten() -> None:
    """Keys are names of users: there may be any number of them over time."""
    engine = core()
    for i in range(50):
        run(engine, [request("a", key=f"user {i}"), request("b", key=f"other user {i}")])
        assert len(engine._shares) <= 2


# Ends.


def test_one_overflow_aborts_all_slots() -> None:
    """A full context ends one request; the other request is answered."""
    endless = Sampling(temperature=0, max_tokens=None, logit_bias={257: -1e9})
    engine = core(ScriptedContext(n_ctx=120, n_seq_max=4))
    neighbour = request("a neighbour")
    big = request("never ends", endless)
    run(engine, [big, neighbour])
    assert neighbour.answer.tokens == tokens_alone("a neighbour")
    assert big.answer.finish_reason is FinishReason.LENGTH
    assert len(big.answer.tokens) + len("never ends") >= 120


def test_a_prompt_longer_than_the_context_is_refused_at_once() -> None:
    engine = core(ScriptedContext(n_ctx=100))
    with pytest.raises(ContextFull):
        engine.add(request("x" * 100))
    assert not engine.step()


def test_a_failed_decode_ends_only_the_request_that_caused_it() -> None:
    context = FailingContext(n_ctx=1000, n_seq_max=8)
    context.fails = lambda batch: DecodeFailed("q") if ord("q") in batch.tokens.tolist() else None  # type: ignore[method-assign]
    engine = core(context)
    texts = ["one", "two with a q", "three", "four", "five"]
    requests = [request(text, Sampling(temperature=0, max_tokens=9, logit_bias={ord("q"): -1e9})) for text in texts]
    run(engine, requests)
    sampling = Sampling(temperature=0, max_tokens=9, logit_bias={ord("q"): -1e9})
    for i, text in enumerate(texts):
        if i == 1:
            with pytest.raises(DecodeFailed, match="q"):
                _ = requests[i].answer
        else:
            assert requests[i].answer.tokens == tokens_alone(text, sampling)


@pytest.mark.parametrize("error", [DecodeFailed("no"), MemoryError(), ContextFull(3, 1), OSError(28, "ENOSPC")])
def test_failures_at_every_step(error: BaseException) -> None:
    """Any error of any decode: no request hangs, the answers of other requests are right, all positions are freed."""
    texts = TEXTS[:6]
    expected = [tokens_alone(text) for text in texts]
    for at in itertools.count():
        context = FailingContext(n_ctx=400, n_seq_max=8, n_batch=16)
        calls = Countdown(at, error)
        context.fails = calls  # type: ignore[method-assign]
        engine = core(context, prefix_cache=False)
        requests = [request(text) for text in texts]
        run(engine, requests)
        for each, tokens in zip(requests, expected, strict=True):
            if each.error is not None:
                assert each.error is error
            else:
                assert each.answer.tokens == tokens or isinstance(error, ContextFull)
        assert context.n_free == 400
        if at and calls.n_left > 0:
            return


@pytest.mark.parametrize("n_requests", [1, 2, 5])
def test_no_reader_waits_for_a_context_that_is_gone(n_requests: int) -> None:
    """The context fails at every call from some call on: every request ends once, with its answer or an error."""
    for dies_at in range(1, 2000):
        context = DyingContext(n_ctx=110, n_seq_max=4, n_batch=16)
        engine = core(context, n_parallel=3)
        n_ends = [0] * n_requests

        def count(i: int, n_ends: list[int] = n_ends) -> None:
            n_ends[i] += 1

        requests = [
            request(TEXTS[i], Sampling(temperature=0, max_tokens=5), on_end=functools.partial(count, i))
            for i in range(n_requests)
        ]
        context.dies_at = dies_at
        try:
            run(engine, requests)
        except BackendCrashed as crash:
            engine.abort(crash)
        assert n_ends == [1] * n_requests, dies_at
        assert all(each.over for each in requests)
        if context.n_calls < dies_at:
            return
    raise AssertionError("the context is called more often than the test foresees")


def test_a_failed_fork_ends_only_its_request() -> None:
    context = ScriptedContext(n_ctx=1000, n_seq_max=4)
    engine = core(context)
    run(engine, [request("a beginning that two prompts share: one")])

    def refuse(src: int, dst: int, end: int) -> None:
        raise DecodeFailed("no fork")

    context._engine_fork = refuse  # type: ignore[method-assign]
    forked, other = request("a beginning that two prompts share: two"), request("something else")
    run(engine, [forked, other])
    assert isinstance(forked.error, DecodeFailed)
    assert other.answer.tokens == tokens_alone("something else")
    assert len(engine._sequences._free) + engine.n_cached_sequences == 4, "no sequence is lost"


def test_a_callback_that_raises_ends_only_its_request() -> None:
    def refuse(event: Event, draft: object) -> StoppingAction:
        raise ZeroDivisionError

    bad, good = request("bad", stopping_criteria=[refuse]), request("good")
    run(core(), [bad, good])
    assert isinstance(bad.error, ZeroDivisionError)
    assert good.answer.tokens == tokens_alone("good")


def test_a_stopping_criterion_that_pauses_is_an_error() -> None:
    each = request("bad", stopping_criteria=[lambda event, draft: StoppingAction.PAUSE])
    run(core(), [each])
    with pytest.raises(InvalidOption, match="paused"):
        _ = each.answer


@pytest.mark.parametrize("n_steps", range(12))
def test_generates_for_nobody(n_steps: int) -> None:
    """Cancelled in queue, prefill or decode: the request ends after the running step and frees its positions."""
    context = ScriptedContext(n_ctx=400, n_seq_max=4, n_batch=16)
    engine = core(context, n_parallel=2)
    requests = [request(letter * 60, Sampling(temperature=0, max_tokens=30)) for letter in "abc"]
    run_some(engine, requests, n_steps)
    for each in requests:
        each.loop.cancel()
    before = context.n_decoded
    assert not engine.step()
    assert context.n_decoded == before
    assert context.n_free == 400
    assert [r.answer.finish_reason for r in requests] == [FinishReason.CANCELLED] * 3


def test_a_cancel_wedges_the_queue() -> None:
    """Requests queued after a cancelled request are answered."""
    engine = core(ScriptedContext(n_ctx=200, n_seq_max=2), n_parallel=1)
    requests = [request(f"{i}" * 40) for i in range(8)]
    for each in requests:
        engine.add(each)
    chosen = random.Random(1)
    while engine.step():
        waiting = [r for r in requests if not r.over]
        if waiting and chosen.random() < 0.05:
            chosen.choice(waiting).loop.cancel()
    assert all(r.over for r in requests)
    finished = [r for r in requests if r.answer.finish_reason is not FinishReason.CANCELLED]
    assert 0 < len(finished) < 8


def test_a_timeout_ends_a_waiting_request() -> None:
    engine = core(n_parallel=1)
    first, second = request("first"), request("second", timeout=0.001)
    engine.add(first)
    engine.step()
    engine.add(second)
    deadline = time.monotonic() + 0.001
    while time.monotonic() <= deadline:
        pass
    engine.step()
    assert second.answer.timed_out
    assert not first.over


def test_an_answer_may_have_no_tokens() -> None:
    each = request("x", Sampling(max_tokens=0))
    run(core(), [each])
    assert (each.answer.tokens, each.answer.finish_reason) == ((), FinishReason.LENGTH)


@pytest.mark.parametrize("bad", [{"step_ms": 0}, {"aging_s": -1}, {"n_parallel": 0}, {"n_parallel": True}])
def test_options_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(SlmError, match=next(iter(bad))):
        EngineOptions(**bad)  # type: ignore[arg-type]


def test_timings_of_a_request() -> None:
    engine = core()
    each = request("a prompt of some length")
    run(engine, [each])
    timings = each.answer.timings
    assert 0 < timings.prefill_s <= (timings.first_token_s or 0)
    assert timings.decode_s > 0


def test_concurrent_requests_keep_their_regular_expressions() -> None:
    specs = [Regex("[ab]{9}"), Regex("(cd)+e"), None]
    requests = [
        request(f"{i}", constraint=None if spec is None else compile(spec, VOCAB)) for i, spec in enumerate(specs)
    ]
    run(core(), requests)
    for i, spec in enumerate(specs):
        assert requests[i].answer.tokens == tokens_alone(f"{i}", constraint=spec)
