"""The engine's thread: requests from many threads and tasks, cancellation, closing, and idling."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from scripted import ByteVocab, ScriptedContext, TagFormatter
from slm_core.chat import Session
from slm_core.engine import Conversation, Engine, EngineOptions, EngineStats, RequestStream
from slm_core.errors import ContextFull, EngineClosed, InvalidOption, SessionError, TemplateError, UnknownOption
from slm_core.generation import FinishReason
from slm_core.protocols import Formatter
from slm_core.sampling import Sampling
from slm_core.types import Message, Role

VOCAB = ByteVocab()
GREEDY = Sampling(temperature=0, max_tokens=16)
ENDLESS = Sampling(temperature=0, max_tokens=None, logit_bias={257: -1e9})
WAIT_S = 60


class SlowContext(ScriptedContext):
    """Signals when a decode begins, and blocks until the test releases it."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.on_decode = self._hold

    def _hold(self) -> None:
        self.begun.release()
        assert self.may_go_on.acquire(timeout=WAIT_S)


def engine_over(context: ScriptedContext, **options: object) -> Engine:
    def formatter() -> Formatter:
        return TagFormatter()  # type: ignore[return-value]

    return Engine(context, VOCAB, formatter, EngineOptions(**options))  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_over(ScriptedContext(n_ctx=2000, n_seq_max=16)) as engine:
        yield engine


def tokens_alone(text: str, sampling: Sampling = GREEDY) -> tuple[int, ...]:
    with Session(ScriptedContext(n_ctx=1000), VOCAB) as session:
        session.append(text)
        return session.generate(sampling).run().tokens


def test_requests_from_many_threads(engine: Engine) -> None:
    tokens: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        tokens[i] = engine.submit(f"thread {i}", GREEDY).run().tokens

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert tokens == {i: tokens_alone(f"thread {i}") for i in range(12)}


def test_completions_of_a_prompt(engine: Engine) -> None:
    """The same completions as a session's with the same seed; the prompt is computed once, except its last token."""
    sampling = Sampling(temperature=1.2, seed=5, max_tokens=12)
    prompt = "a prompt that is long enough to be shared"
    with Session(ScriptedContext(n_ctx=1000, n_seq_max=8), VOCAB) as session:
        session.append(prompt)
        expected = session.completions(4, sampling).run()
        best = session.completions(2, sampling, best_of=4).run()
    completions = engine.completions(prompt, 4, sampling)
    events = list(completions)
    assert [c.answer.tokens for c in completions.answers] == [c.answer.tokens for c in expected]
    for i in range(4):
        tokens = tuple(event.event.token for event in events if event.index == i and event.event.token is not None)
        assert tokens == completions.answers[i].answer.tokens
    assert len({c.answer.tokens for c in completions.answers}) > 1
    stats = engine.stats()
    n_answers = sum(len(c.answer.tokens) - 1 for c in completions.answers)
    assert stats.computed_tokens == len(prompt) + 3 + n_answers
    best_two = engine.completions(prompt, 2, sampling, best_of=4).run()
    assert [(c.index, c.answer.tokens) for c in best_two] == [(c.index, c.answer.tokens) for c in best]
    assert [c.mean_logprob for c in best_two] == pytest.approx([c.mean_logprob for c in best])


def test_completions_without_a_seed_differ(engine: Engine) -> None:
    completions = engine.completions(
        "a prompt", 4, Sampling(temperature=3, max_tokens=16, logit_bias={257: -1e9})
    ).run()
    assert len({c.answer.tokens for c in completions}) == 4


def test_completions_in_tasks_and_their_cancellation(engine: Engine) -> None:
    async def main() -> tuple[int, ...]:
        with engine.completions("never ends", 3, ENDLESS) as completions:
            async for event in completions:
                if event.index == 1:
                    break
        with pytest.raises(SessionError):
            _ = engine.completions("never ends", 2, ENDLESS, timeout=5).answers
        return tuple(c.index for c in await engine.completions("a", 3, GREEDY).arun())

    assert asyncio.run(main()) == (0, 1, 2)


@pytest.mark.parametrize(("n", "best_of"), [(0, None), (3, 2), (True, None), (2, 2.5)])
def test_completions_are_checked(engine: Engine, n: int, best_of: int | None) -> None:
    with pytest.raises(InvalidOption, match="accepted: an integer from"):
        engine.completions("x", n, best_of=best_of)


def test_requests_from_many_tasks(engine: Engine) -> None:
    async def ask(i: int) -> list[int]:
        return [event.token async for event in engine.generate(f"task {i}", GREEDY) if event.token is not None]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(ask(i) for i in range(40)))

    assert asyncio.run(main()) == [list(tokens_alone(f"task {i}")) for i in range(40)]


def test_events_add_up_to_the_answer(engine: Engine) -> None:
    stream = engine.submit("what is said", GREEDY)
    events = list(stream)
    assert "".join(event.text for event in events) == stream.answer.text
    assert tuple(event.token for event in events if event.token is not None) == stream.answer.tokens


def test_messages_are_answered_in_the_chat_format(engine: Engine) -> None:
    stream = engine.submit([Message(Role.USER, "hello")], GREEDY, thinking=True)
    stream.run()
    tokens = VOCAB.encode("<|start|>user:hello<|end|><|start|>assistant:<think>", add_special=False, parse_special=True)
    with Session(ScriptedContext(n_ctx=1000), VOCAB) as session:
        session.append_tokens(tokens)
        expected = session.generate(GREEDY, special=True).run()
    assert stream.answer.tokens == expected.tokens
    assert stream.answer.usage.prompt_tokens == len(tokens)
    assert (stream.answer.reasoning or "") + stream.answer.text in expected.text


def test_thinking_requires_messages(engine: Engine) -> None:
    with pytest.raises(InvalidOption, match="thinking"):
        engine.submit("text", thinking=True)


@pytest.mark.parametrize("prompt", [3, "", [], [[1], "a"], ["text", 3], None, b"text", memoryview(b"text")])
def test_invalid_prompts_are_refused(engine: Engine, prompt: object) -> None:
    with pytest.raises(InvalidOption, match="prompt"):
        engine.submit(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template_kwargs",
    [
        *({name: 1} for name in ("messages", "tools", "thinking", "add_generation_prompt", "self")),
        {"continue_final_message": True},
        {1: 2},
        5,
    ],
    ids=str,
)
def test_invalid_variables_of_the_template_are_refused(template_kwargs: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^template_kwargs.*\(accepted: "):
        Conversation([Message(Role.USER, "x")], template_kwargs=template_kwargs)


def test_an_error_of_the_template_is_raised(engine: Engine) -> None:
    with pytest.raises(TemplateError):
        engine.submit([Message(Role.USER, "REFUSE")])


def test_a_prompt_that_is_too_long_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(ContextFull):
        engine.submit("x" * 2000)
    assert engine.submit("and goes on", GREEDY).run().tokens == tokens_alone("and goes on")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("key", ["team", "a"]),
        ("key", None),
        ("key", b"a"),
        ("salt", np.arange(3)),
        ("salt", 1),
        ("priority", 10**400),
        ("priority", 10**5000),
        ("priority", math.inf),
        ("priority", math.nan),
        ("priority", True),
        ("priority", "1"),
        ("timeout", 10**400),
        ("timeout", math.nan),
        ("timeout", math.inf),
        ("timeout", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_invalid_option_is_raised_to_its_caller_only(engine: Engine, option: str, value: object) -> None:
    other = engine.submit("Another request", GREEDY)
    for call in (engine.submit, lambda prompt, *rest, **options: engine.completions(prompt, 2, *rest, **options)):
        with pytest.raises(InvalidOption, match=option) as refused:
            call("text", GREEDY, **{option: value})
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 200
    assert other.run().tokens == tokens_alone("Another request")
    assert engine.submit("and goes on", GREEDY).run().tokens == tokens_alone("and goes on")


@pytest.mark.parametrize(("n", "best_of"), [(4097, None), (2**31, None), (1, 2**31), (10**5000, None)], ids=type)
def test_too_many_completions_are_refused_before_they_are_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int, best_of: int | None
) -> None:
    monkeypatch.setattr("slm_core.engine.engine.Request", None)
    with pytest.raises(InvalidOption, match=r"accepted: an integer from 1 to 4096\)"):
        engine.completions("text", n, GREEDY, best_of=best_of)


class Unhashable(str):
    """A text that the engine cannot count by."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def test_a_request_that_cannot_be_added_fails_alone() -> None:
    """The requests that arrived with it are answered, and the engine keeps running."""
    context = SlowContext(n_ctx=2000, n_seq_max=4)
    with engine_over(context) as engine:
        running = engine.submit("running", GREEDY)
        assert context.begun.acquire(timeout=WAIT_S)
        streams = [engine.submit(f"request {i}", GREEDY, key=Unhashable("b") if i == 1 else "a") for i in range(3)]
        context.may_go_on.release(1000)
        with pytest.raises(TypeError, match="hash"):
            streams[1].run()
        assert running.run().tokens == tokens_alone("running")
        assert [streams[i].run().tokens for i in (0, 2)] == [tokens_alone(f"request {i}") for i in (0, 2)]
        assert engine.submit("later", GREEDY).run().tokens == tokens_alone("later")
        stats = engine.stats()
        assert (stats.n_finished, stats.n_failed, len(stats.requests)) == (4, 1, 0)


def test_a_request_that_cannot_be_added_while_the_engine_closes_fails_too() -> None:
    context = SlowContext(n_ctx=2000, n_seq_max=4)
    engine = engine_over(context)
    running = engine.submit("running", ENDLESS)
    assert context.begun.acquire(timeout=WAIT_S)
    bad, good = (engine.submit("text", GREEDY, key=key) for key in (Unhashable("b"), "a"))
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closing:
        time.sleep(0.001)
    context.may_go_on.release(1000)
    closing.join(WAIT_S)
    for stream, error in ((bad, TypeError), (good, EngineClosed), (running, EngineClosed)):
        with pytest.raises(error):
            stream.run()


def test_leaving_a_stream_cancels_its_request() -> None:
    """A reader that goes away costs at most the running step."""
    context = SlowContext(n_ctx=2000, n_seq_max=4)
    with engine_over(context) as engine:
        with engine.submit("never ends", ENDLESS) as stream:
            for _ in range(3):
                context.may_go_on.release()
                next(stream)
        _release_until_over(context, stream)
        assert stream.answer.finish_reason is FinishReason.CANCELLED
        assert len(stream.answer.tokens) <= 5
        assert engine.stats().n_free == 2000


def _release_until_over(context: SlowContext, stream: RequestStream) -> None:
    for _ in range(3):  # the step that may be running
        context.may_go_on.release()
    changed = stream._queue._changed
    with changed:
        assert changed.wait_for(lambda: stream.finished, WAIT_S)


def test_a_cancelled_task_cancels_its_request() -> None:
    with engine_over(ScriptedContext(n_ctx=5000, n_seq_max=4)) as engine:

        async def main() -> None:
            got_token = asyncio.Event()

            async def read() -> None:
                async for _ in engine.generate("never ends", ENDLESS):
                    got_token.set()

            task = asyncio.create_task(read())
            await got_token.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        stats = _wait_until_idle(engine)
        assert (stats.n_cancelled, stats.n_free) == (1, 5000)


def _wait_until_idle(engine: Engine) -> EngineStats:
    deadline = time.monotonic() + WAIT_S
    while (stats := engine.stats()).n_active + stats.n_waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    return engine.stats()


@pytest.mark.parametrize("is_task", [False, True])
def test_readers_have_an_event_before_the_next_step_is_computed(*, is_task: bool) -> None:
    """Notifications are held back, but only until the backend computes."""
    context = ScriptedContext(n_ctx=5000, n_seq_max=4)
    n_read, n_steps, changed = 0, 0, threading.Condition()

    def step() -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps > 2:  # the first two steps decode the prompt, which is longer than a batch
            with changed:
                assert changed.wait_for(lambda: n_read >= n_steps - 2, WAIT_S), "the reader was not told"

    def note() -> None:
        nonlocal n_read
        with changed:
            n_read += 1
            changed.notify_all()

    context.on_decode = step
    with engine_over(context) as engine:
        stream = engine.submit("a prompt of 20 bytes", Sampling(temperature=0, max_tokens=8, logit_bias={257: -100.0}))
        if is_task:

            async def main() -> None:
                async for _ in stream:
                    note()

            asyncio.run(main())
        else:
            for _ in stream:
                note()
        assert len(stream.answer.tokens) == 8
    assert n_steps == 2 + 7


def test_closing_ends_running_and_waiting_requests() -> None:
    engine = engine_over(ScriptedContext(n_ctx=100_000, n_seq_max=2), n_parallel=1)
    streams = [engine.submit("never ends", ENDLESS) for _ in range(3)]
    next(streams[0])
    engine.close()
    for stream in streams:
        with pytest.raises(EngineClosed):
            stream.run()
    with pytest.raises(EngineClosed):
        engine.submit("too late")
    engine.close()


def test_an_idle_thread_sleeps(engine: Engine) -> None:
    engine.submit("something", GREEDY).run()
    _wait_until_idle(engine)
    clock = time.pthread_getcpuclockid(engine._thread.ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(0.3)  # a polling thread would use CPU time meanwhile
    assert time.clock_gettime(clock) - before < 0.003


def test_memory_of_a_request_is_free_as_soon_as_nobody_holds_its_stream(engine: Engine) -> None:
    """There is no reference cycle, which Python would free only much later if the program has many objects."""
    gc.disable()
    try:
        streams = [engine.submit("a request", GREEDY), engine.completions("completions", 3, GREEDY)]
        for stream in streams:
            stream.run()
        _wait_until_idle(engine)
        requests = [weakref.ref(streams[0]._request), *(weakref.ref(each) for each in streams[1]._requests)]
        del streams, stream
        assert [request() for request in requests] == [None] * 4
    finally:
        gc.enable()


def test_stats_add_up(engine: Engine) -> None:
    answers = [engine.submit(f"prompt {i}", GREEDY).run() for i in range(5)]
    stats = engine.stats()
    assert stats.n_requests == stats.n_finished == 5
    assert stats.prompt_tokens == sum(answer.usage.prompt_tokens for answer in answers)
    assert stats.cached_tokens == sum(answer.usage.cached_tokens for answer in answers)
    assert stats.completion_tokens == sum(answer.usage.completion_tokens for answer in answers)
    # The last token of each answer is sampled, but never decoded.
    assert stats.computed_tokens == stats.prompt_tokens - stats.cached_tokens + stats.completion_tokens - 5


def test_no_request_is_missing_while_it_moves() -> None:
    """From the call to the queue, from the queue to a sequence, and back: it counts as waiting or active.

    Programs that wait until nothing is active or waiting would stop too early.
    """
    n_missing: set[int] = set()
    context = ScriptedContext(n_ctx=120, n_seq_max=4)
    with engine_over(context, n_parallel=2, prefix_cache=False) as engine:

        class Watched(list[Any]):
            """Counts before and after each change."""

            def append(self, item: Any) -> None:
                count()
                super().append(item)
                count()

            def remove(self, item: Any) -> None:
                super().remove(item)
                count()

        def count() -> None:
            stats = engine.stats()
            n_missing.add(len(stats.requests) - stats.n_active - stats.n_waiting)

        engine._core._waiting = Watched()
        endless = Sampling(temperature=0, max_tokens=60, logit_bias={257: -1e9})
        streams = [engine.submit(f"{i} {'x' * 30}", endless) for i in range(3)]
        for stream in streams:
            stream.run()
        assert engine.stats().n_preempted > 0
        assert _wait_until_idle(engine).requests == ()
    assert max(n_missing) <= 0, "requests that are neither active nor waiting"


def test_a_slow_reader_delays_no_other_request(engine: Engine) -> None:
    unread = engine.submit("nobody reads this", GREEDY)
    assert engine.submit("but somebody this", GREEDY).run().tokens == tokens_alone("but somebody this")
    assert unread.run().tokens == tokens_alone("nobody reads this")


def test_the_seconds_of_the_running_step() -> None:
    context = SlowContext(n_ctx=200, n_seq_max=4)
    now = 0.0
    with Engine(context, VOCAB, lambda: TagFormatter(), EngineOptions(), clock=lambda: now) as engine:  # type: ignore[arg-type,return-value]
        assert engine.step_s == 0.0
        stream = engine.submit("abc", Sampling(temperature=0, max_tokens=1))
        assert context.begun.acquire(timeout=WAIT_S)
        now = 7.5
        assert engine.step_s == 7.5
        context.may_go_on.release()
        stream.run()
    assert engine.step_s == 0.0


def test_the_error_that_ended_it() -> None:
    with engine_over(ScriptedContext(n_ctx=200, n_seq_max=4)) as engine:
        assert not engine.ended.done()
    assert isinstance(engine.ended.result(timeout=WAIT_S), EngineClosed)


async def generated(engine: Engine, prompt: str, **options: Any) -> tuple[int, ...]:
    return tuple([event.token async for event in engine.generate(prompt, GREEDY, **options) if event.token is not None])


def test_options_of_one_answer_are_keywords(engine: Engine) -> None:
    short = tokens_alone("Once upon a time", Sampling(temperature=0, max_tokens=3))
    assert engine.submit("Once upon a time", GREEDY, max_tokens=3).run().tokens == short
    (completion,) = engine.completions("Once upon a time", 1, GREEDY, max_tokens=3).run()
    assert completion.answer.tokens == short
    assert asyncio.run(generated(engine, "Once upon a time", max_tokens=3)) == short
    hot = Sampling(temperature=2, seed=4, max_tokens=16)
    named = engine.submit("Once", temperature=2, seed=4, max_tokens=16).run()
    assert named.tokens == engine.submit("Once", hot).run().tokens
    with pytest.raises(InvalidOption, match="max_tokens=-1"):
        engine.submit("Once", max_tokens=-1)


def test_an_unknown_keyword_is_an_error_that_names_the_one_that_was_meant(engine: Engine) -> None:
    wrong: dict[str, Any] = {"max_token": 3}
    calls = (
        lambda: engine.submit("a", GREEDY, **wrong),
        lambda: engine.completions("a", 2, GREEDY, **wrong),
        lambda: asyncio.run(generated(engine, "a", **wrong)),
    )
    for call in calls:
        with pytest.raises(UnknownOption, match=r"\(\) has no argument 'max_token' .*did you mean 'max_tokens'\?"):
            call()
