"""``async for`` over answers: order, backpressure, cancelled tasks, concurrent answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from scripted import ByteVocab, ScriptedContext, TagFormatter, says
from slm_core.chat import Chat, Session
from slm_core.generation import FinishReason, StoppingAction
from slm_core.sampling import Sampling
from slm_core.types import Role


def session(*, n_prompt: int = 3) -> Session:
    session = Session(ScriptedContext(n_batch=16), ByteVocab(), sampling=Sampling(seed=1, max_tokens=10))
    session.append("x" * n_prompt)
    return session


def chat(*answers: str) -> Chat:
    session = Session(ScriptedContext(says(*answers)), ByteVocab(), sampling=Sampling(temperature=0))
    return Chat(session, TagFormatter())


def test_async_iteration_gives_the_events_of_plain_iteration() -> None:
    async def gather() -> list[object]:
        generation = session().generate()
        events = [event async for event in generation]
        return [events, generation.answer.tokens]

    plain = session().generate()
    assert asyncio.run(gather()) == [list(plain), plain.answer.tokens]


def test_steps_run_in_another_thread_and_only_on_request() -> None:
    s = session()
    threads: list[int] = []
    s.context.on_decode = lambda: threads.append(threading.get_ident())

    async def read() -> None:
        n_read = 0
        async for _ in s.generate():
            n_read += 1
            await asyncio.sleep(0.001)
            assert len(threads) == n_read, "a step ran ahead of the reader"

    asyncio.run(read())
    assert threading.get_ident() not in threads


def test_the_event_loop_runs_while_a_step_blocks() -> None:
    s = session()
    ticked = threading.Event()
    s.context.on_decode = lambda: ticked.wait(10) or pytest.fail("the event loop stood still")

    async def tick() -> None:
        ticked.set()

    async def both() -> None:
        running = asyncio.ensure_future(s.generate().arun())
        await asyncio.sleep(0)
        await asyncio.gather(running, tick())

    asyncio.run(both())


def cancel_in_a_batch(s: Session, run: Callable[[], object], *, times: int = 1) -> None:
    """Cancel the task of ``run`` during the decode of its first batch; the decode ends some time later."""
    in_a_batch, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        in_a_batch.set()
        assert may_end.wait(10)

    s.context.on_decode = hold

    async def race() -> None:
        task = asyncio.ensure_future(run())
        await asyncio.to_thread(in_a_batch.wait, 10)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done(), "the task must not end while the batch still runs"
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert s.context.length(s.seq_id) == s.context.n_decoded == 16, (
            "one batch was decoded, and nothing runs in the background"
        )

    asyncio.run(race())
    s.context.on_decode = lambda: None


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_task_ends_with_its_batch_and_the_session_continues(times: int) -> None:
    s = session(n_prompt=60)
    generation = s.generate()
    cancel_in_a_batch(s, generation.arun, times=times)
    assert generation.run().finish_reason is FinishReason.CANCELLED
    assert len(s.generate().run().tokens) == 10


def test_a_chat_keeps_the_text_of_an_abandoned_answer() -> None:
    c = chat("hello there")

    async def read() -> None:
        text = ""
        async for event in c.stream("hi"):
            text += event.text
            if text == "hello":
                break

    asyncio.run(read())
    assert [(m.role, m.content) for m in c.messages] == [(Role.USER, "hi"), (Role.ASSISTANT, "hello")]
    answer = asyncio.run(c.asend("go on"))
    assert answer.text == "hello there"
    assert c.messages[1].content == "hello"


def test_an_error_of_a_step_is_raised_in_the_task() -> None:
    s = session()

    def burst() -> None:
        raise RuntimeError("decode")

    s.context.on_decode = burst
    with pytest.raises(RuntimeError, match="decode"):
        asyncio.run(s.generate().arun())


def test_answers_of_several_contexts_run_concurrently() -> None:
    sessions = [session(n_prompt=n) for n in range(1, 6)]
    expected = [session(n_prompt=n).generate().run().tokens for n in range(1, 6)]
    meeting = threading.Barrier(5)
    for s in sessions:
        s.context.on_decode = lambda: meeting.wait(10)

    async def together() -> list[object]:
        return await asyncio.gather(*(s.generate().arun() for s in sessions))

    assert [answer.tokens for answer in asyncio.run(together())] == expected


def test_a_pause_ends_the_async_iteration_until_it_is_resumed() -> None:
    async def pausing() -> tuple[int, ...]:
        s = session()
        generation = s.generate(stopping_criteria=[lambda event, draft: StoppingAction.PAUSE])
        rounds = 0
        while not generation.finished:
            async for _ in generation:
                rounds += 1
            s.generate() if generation.paused else None
        assert rounds == 10
        return generation.answer.tokens

    assert asyncio.run(pausing()) == session().generate().run().tokens
