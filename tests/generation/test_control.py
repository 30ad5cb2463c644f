"""Timeouts, callbacks, progress and timings of an answer."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from scripted import N_VOCAB, ByteVocab, ScriptedContext
from slm_conformance.suite.scripted import Script
from slm_core.chat import Session
from slm_core.errors import InvalidOption
from slm_core.generation import Answer, Event, FinishReason, StoppingAction, ToolResult
from slm_core.generation import control as control_module
from slm_core.generation.events import Timings, Usage
from slm_core.generation.token_loop import Progress, TokenLoop
from slm_core.sampling import Sampling
from slm_core.types import EditLevel, MalformedCall, ToolCall


def session(*, n_prompt: int = 60, **options: object) -> Session:
    session = Session(ScriptedContext(n_batch=16, **options), ByteVocab(), sampling=Sampling(seed=1, max_tokens=10))
    session.append("x" * n_prompt)
    return session


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(control_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_timeout_is_over_when_its_seconds_have_passed(clock: Clock) -> None:
    countdown = control_module.Countdown(2.5)
    assert not countdown.is_over
    countdown.start()
    for now, over in ((102.0, False), (102.5, True)):
        clock.now = now
        assert countdown.is_over == over


def test_a_timeout_in_prefill_takes_at_most_one_more_batch(clock: Clock) -> None:
    s = session()
    generation = s.generate(timeout=2.5)

    def second() -> None:
        clock.now += 1

    s.context.on_decode = second
    answer = generation.run()
    assert (answer.finish_reason, answer.timed_out, answer.tokens) == (FinishReason.CANCELLED, True, ())
    assert s.context.n_decoded == 48, "three batches begin within 2.5 seconds"
    assert s.generate().run().finish_reason is FinishReason.LENGTH, "the session can continue"


def test_a_timeout_in_decode_ends_the_answer_where_it_is(clock: Clock) -> None:
    s = session(n_prompt=3)
    generation = s.generate(timeout=4.5)
    events = []
    for event in generation:
        events.append(event)
        clock.now += 1
    assert len([event for event in events if event.token is not None]) == 5
    assert generation.answer.timed_out
    assert generation.answer.text == "".join(event.text for event in events)


def test_a_cancelled_answer_is_not_timed_out(clock: Clock) -> None:
    generation = session().generate(timeout=1)
    generation.cancel()
    clock.now += 5
    assert not generation.run().timed_out


def test_pauses_do_not_count_and_the_remaining_time_is_dumped(clock: Clock) -> None:
    s = session(n_prompt=3)
    second = s.generate(
        timeout=3.5,
        stopping_criteria=[lambda e, d: StoppingAction.PAUSE if len(d.tokens) == 2 else StoppingAction.NEXT],
    )
    next(second)
    clock.now += 1
    next(second)
    clock.now += 1000
    twins = [Session.restore(ScriptedContext(n_batch=16), ByteVocab(), s.dump()) for _ in range(2)]
    clock.now += 1000
    for generation in (s.generate(), twins[0].generate()):
        assert generation.progress.time_left_s == 2.5
        next(generation)
        clock.now += 2
        next(generation)
        clock.now += 1
        answer = generation.run()
        assert (answer.timed_out, len(answer.tokens)) == (True, 4)
    longer = twins[1].generate(timeout=50)
    next(longer)
    clock.now += 20
    assert not longer.run().timed_out, "a new timeout counts from the resumption"


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, 10**400, 10**5000, "1", True], ids=type)
def test_a_timeout_is_a_number_above_zero(timeout: object) -> None:
    s = session()
    paused = s.generate(stopping_criteria=[lambda event, draft: StoppingAction.PAUSE])
    with pytest.raises(InvalidOption, match="timeout"):
        s.generate(timeout=timeout)
    next(paused)
    with pytest.raises(InvalidOption, match="timeout"):
        s.generate(timeout=timeout)
    assert paused.paused


def test_on_event_gets_events_before_the_iteration() -> None:
    observed: list[Event] = []
    generation = session().generate(on_event=observed.append)
    for n, event in enumerate(generation, start=1):
        assert observed[-1] == event
        assert len(observed) == n
    assert len(observed) == 10


def test_a_session_continues_after_an_error_of_a_callback() -> None:
    s, plain = session(), session()

    def burst(event: Event) -> None:
        raise RuntimeError("on_event")

    whole = plain.generate().run()
    with pytest.raises(RuntimeError, match="on_event"):
        s.generate(on_event=burst).run()
    assert s.tokens[60:] == whole.tokens[:1]
    assert s.generate(Sampling(temperature=0, max_tokens=2)).run().finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("level", list(EditLevel))
def test_progress_counts_tokens_decoded_before_the_first_token(level: EditLevel) -> None:
    s = session(level=level)
    reports: list[tuple[int, int]] = []
    s.generate(progress=lambda done, total: reports.append((done, total))).run()
    assert reports == [(0, 60), (16, 60), (32, 60), (48, 60), (60, 60)]
    s.truncate(50)
    reports.clear()
    s.generate(progress=lambda done, total: reports.append((done, total))).run()
    assert reports[-1] == ((50, 50) if level is EditLevel.REPLAY else (1, 1)), "recomputed tokens count"


def test_an_error_of_progress_keeps_the_decoded_tokens() -> None:
    s = session()

    def burst(done: int, total: int) -> None:
        if done == 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        s.generate(progress=burst).run()
    assert (s.n_pending, s.context.n_decoded) == (28, 32)
    assert len(s.generate().run().tokens) == 10


def test_cancelling_from_another_thread_in_prefill_takes_at_most_one_more_batch() -> None:
    s = session()
    generation = s.generate()
    in_a_batch, cancelled = threading.Event(), threading.Event()

    def hold() -> None:
        in_a_batch.set()
        assert cancelled.wait(10)

    def cancel() -> None:
        assert in_a_batch.wait(10)
        generation.cancel()
        cancelled.set()

    s.context.on_decode = hold
    other = threading.Thread(target=cancel)
    other.start()
    answer = generation.run()
    other.join()
    assert answer.finish_reason is FinishReason.CANCELLED
    assert s.context.n_decoded == 16


def test_timings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from slm_core.generation import loop

    now = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    s = session(n_prompt=32)
    s.next_logits()
    s.append("y" * 32)

    def second() -> None:
        now[0] += 1

    s.context.on_decode = second
    generation = s.generate()
    now[0] += 5
    for _ in generation:
        now[0] += 100
    answer = generation.answer
    timings = answer.timings
    assert (timings.queue_s, timings.prefill_s, timings.first_token_s) == (5, 2, 7)
    assert timings.decode_s == 9, "one batch for each of ten tokens except the first; the reader's time is not counted"
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (64, 32)
    assert answer.prefill_tokens_per_second == 16
    assert answer.tokens_per_second == 1


def test_an_answer_without_tokens_has_no_time_to_first_token() -> None:
    answer = session().generate(Sampling(max_tokens=0)).run()
    assert answer.timings.first_token_s is None
    assert answer.tokens_per_second == answer.prefill_tokens_per_second == 0


def test_the_time_of_a_step_that_raises_counts() -> None:
    class Raises(Script):
        def sample(self, logits: np.ndarray) -> int:
            raise KeyError

    loop = TokenLoop(History(), ByteVocab(), Raises([1]), Progress(3, 0, 5, ()))
    with pytest.raises(KeyError):
        loop.step(np.zeros(N_VOCAB, np.float32), 0.5)
    assert loop.progress.prefill_s >= 0.5
    assert loop.progress.decode_s == 0


class History:
    """A history that ignores its tokens."""

    def take(self, token: int) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""


def test_an_answer_shows_its_text_and_counts() -> None:
    call, broken = ToolCall("f", {"a": 1}), MalformedCall("{", "no JSON")
    numbers = {"usage": Usage(5, 2, 3), "timings": Timings(0.1, 0.2, 0.0, 0.1)}
    for options, counts in (
        ({}, ""),
        ({"tool_calls": (call,)}, ", 1 tool call"),
        ({"results": (ToolResult(call, "z"),)}, ", 1 tool result"),
    ):
        short = Answer("Sunny.", FinishReason.LENGTH, (1,), **numbers, **options)
        assert repr(short) == f"<Answer: 'Sunny.', length, 1 token{counts}>"
    long = Answer(
        "Sunny.",
        FinishReason.STOP,
        (1, 2, 3),
        **numbers,
        reasoning="Hm, look",
        tool_calls=(call,),
        malformed_calls=(broken,),
        results=(ToolResult(call, "z"),) * 3,
        timed_out=True,
    )
    counts = "3 tokens, 8 characters of reasoning, 2 tool calls, 3 tool results, timed out"
    assert repr(long) == f"<Answer: 'Sunny.', stop, {counts}>"
