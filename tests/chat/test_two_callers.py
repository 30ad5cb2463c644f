"""Threads and tasks that use one context wait their turn; a session or chat that is in use refuses another caller."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import slm_core as slm
from interrupting import interrupted, n_calls_of
from scripted import ByteVocab, ScriptedContext, TagFormatter, says
from slm_core.chat import Chat, Session
from slm_core.chat.guard import Guard
from slm_core.context_queue import ContextQueue, queue_of
from slm_core.errors import ChatBusy, ContextBusy, SessionError

SAMPLING = slm.Sampling(temperature=1, seed=3, max_tokens=24)
QUESTIONS = [f"question {i}" for i in range(4)]


def new_chat(context: ScriptedContext | None = None) -> Chat:
    context = context if context is not None else ScriptedContext(n_ctx=4000, n_seq_max=8)
    return Chat(Session(context, ByteVocab(), sampling=SAMPLING), TagFormatter(), system="Be brief.")


def alone(question: str) -> str:
    return new_chat().send(question).text


def forks_of(chat: Chat) -> list[Chat]:
    return [chat.fork() for _ in QUESTIONS]


def test_threads_on_forks_of_a_chat_get_the_answers_that_each_gets_alone() -> None:
    expected = [alone(question) for question in QUESTIONS]
    forks, together = forks_of(new_chat()), threading.Barrier(len(QUESTIONS))

    def ask(chat: Chat, question: str) -> str:
        together.wait(10)
        return chat.send(question).text

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        assert list(pool.map(ask, forks, QUESTIONS)) == expected


def test_tasks_on_forks_of_a_chat_get_the_answers_that_each_gets_alone() -> None:
    expected = [alone(question) for question in QUESTIONS]
    forks = forks_of(new_chat())

    async def ask() -> list[str]:
        sends = (chat.asend(question) for chat, question in zip(forks, QUESTIONS, strict=True))
        return [answer.text for answer in await asyncio.gather(*sends)]

    assert asyncio.run(ask()) == expected


def test_the_event_loop_runs_while_a_task_waits_for_the_context() -> None:
    context = ScriptedContext(says("one", "one"), n_ctx=4000, n_seq_max=8)
    first = new_chat(context)
    second, waits = first.fork(), threading.Event()

    async def ask() -> str:
        task = asyncio.ensure_future(_text(second.stream("b")))
        while queue_of(context).n_waiting == 0:
            await asyncio.sleep(0)
        waits.set()
        return await task

    with ThreadPoolExecutor(1) as pool:
        with queue_of(context):
            text = pool.submit(asyncio.run, ask())
            assert waits.wait(10), "the event loop stood still"
            assert not text.done()
        assert text.result(10) == "one"


class SlowFormatter(TagFormatter):
    """Renders after ``go_on``, once there is one."""

    go_on: threading.Event | None = None

    def render(self, *args: object, **options: object) -> list[slm.Segment]:
        if self.go_on is not None:
            self.rendering.set()
            assert self.go_on.wait(10)
        return super().render(*args, **options)  # type: ignore[arg-type]

    def __init__(self) -> None:
        self.rendering = threading.Event()


def test_a_chat_is_busy_while_a_turn_of_another_task_begins() -> None:
    formatter = SlowFormatter()
    chat = Chat(Session(ScriptedContext(says("one"), n_ctx=4000), ByteVocab(), sampling=SAMPLING), formatter)
    stream = None

    async def read() -> str:
        nonlocal stream
        stream = chat.stream("hello")
        return await _text(stream)

    formatter.go_on = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        text = pool.submit(asyncio.run, read())
        assert formatter.rendering.wait(10)
        assert stream is not None
        with pytest.raises(ChatBusy):
            pool.submit(next, stream).result(10)
        formatter.go_on.set()
        assert text.result(10) == "one"


async def _text(stream: slm.ChatStream) -> str:
    return "".join([event.text async for event in stream])


def test_a_second_thread_is_told_that_the_chat_is_busy_and_the_answer_goes_on() -> None:
    expected, chat = alone("hello"), new_chat()
    stream = chat.stream("hello")
    text = next(stream).text
    with ThreadPoolExecutor(1) as pool:
        for call in (lambda: chat.send("me, too"), lambda: chat.edit(0, "x"), chat.fork, chat.dump, chat.regenerate):
            with pytest.raises(ChatBusy, match=r"this chat is busy: .*wait.*fork"):
                pool.submit(call).result(10)
    assert text + "".join(event.text for event in stream) == expected
    assert [message.content for message in chat.messages] == ["Be brief.", "hello", expected]


def test_a_second_thread_that_runs_the_turn_does_not_undo_it() -> None:
    expected, chat = alone("hello"), new_chat()
    inside, leave = threading.Event(), threading.Event()

    def wait(event: object) -> None:
        inside.set()
        assert leave.wait(10)

    stream = chat.stream("hello", on_event=wait)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream.run)
        assert inside.wait(10)
        with pytest.raises(ChatBusy):
            stream.run()
        leave.set()
        assert answer.result(10).text == expected
    assert [message.content for message in chat.messages] == ["Be brief.", "hello", expected]


def test_the_thread_that_read_last_holds_the_chat() -> None:
    chat = new_chat()
    stream = chat.stream("hello")
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(next, stream).result(10)
        with pytest.raises(ChatBusy):
            chat.edit(0, "x")
        pool.submit(chat.edit, 0, "y").result(10)
    assert chat.messages[0].content == "y"


def test_a_stream_that_has_not_begun_has_no_answer_yet() -> None:
    expected, chat = alone("hello"), new_chat()

    async def ask() -> str:
        stream = chat.stream("hello")
        assert (stream.text, stream.over, stream.paused, stream.overflowed) == ("", False, False, None)
        assert chat.messages == new_chat().messages, "on an event loop, a turn begins with its first event"
        with pytest.raises(SessionError, match="the turn has not begun"):
            _ = stream.answer
        text = "".join([event.text async for event in stream])
        assert (stream.text, stream.over) == (text, True)
        stream = chat.stream("more")
        stream.show_events(False)
        assert all(math.isnan(event.logprob) for event in [event async for event in stream]), "they were turned off"
        stream = chat.stream("again")
        stream.cancel()
        assert (await stream.arun()).finish_reason is slm.FinishReason.CANCELLED
        return text

    assert asyncio.run(ask()) == expected


def test_a_second_task_is_told_that_the_chat_is_busy() -> None:
    expected, chat = alone("hello"), new_chat()

    async def ask() -> list[object]:
        results = await asyncio.gather(chat.asend("hello"), chat.asend("me, too"), return_exceptions=True)
        return [result.text if isinstance(result, slm.Answer) else type(result) for result in results]

    assert asyncio.run(ask()) == [expected, ChatBusy]
    assert len(chat.messages) == 3


@pytest.mark.parametrize("release", ["dropped", "cancelled", "the reader ended"])
def test_a_stream_that_nobody_reads_any_more_does_not_hold_its_chat(release: str) -> None:
    chat = new_chat()
    streams = []
    if release == "the reader ended":
        reader = threading.Thread(target=lambda: streams.append(chat.stream("hello")))
        reader.start()
        reader.join(10)
    else:
        streams.append(chat.stream("hello"))
    next_event = next(streams[0]) if release != "the reader ended" else None
    if release == "dropped":
        streams.clear()
    elif release == "cancelled":
        streams[0].cancel()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(chat.send, "again").result(10).text
    first_answer = chat.messages[2].content
    assert first_answer == ("" if next_event is None else next_event.text)


def test_a_second_thread_is_told_that_the_session_is_busy_and_the_answer_goes_on() -> None:
    def new_session() -> Session:
        context = ScriptedContext(n_ctx=4000, n_seq_max=8, capabilities=frozenset())  # a scratch branch is no fork
        session = Session(context, ByteVocab(), sampling=SAMPLING)
        session.append("hello")
        return session

    expected, session = new_session().generate().run(), new_session()
    start, inside, leave = session.mark(), threading.Event(), threading.Event()

    def wait(event: object) -> None:
        inside.set()
        assert leave.wait(10)

    generation = session.generate(on_event=wait)
    calls = (
        lambda: session.append("me, too"),
        lambda: session.append_tokens([1]),
        lambda: session.follow([1, 2]),
        lambda: session.rollback(start),
        lambda: session.remove(start, start),
        lambda: session.set_adapters({}),
        session.generate,
        session.next_logits,
        session.prefill,
        session.beam_search,
        lambda: session.completions(2),
        lambda: session.score("text"),
        session.fork,
        session.dump,
        lambda: session.scratch_branch().__enter__(),
        lambda: next(generation),
    )
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generation.run)
        assert inside.wait(10)
        for call in calls:
            with pytest.raises(SessionError, match=r"this session is busy: .*wait.*fork"):
                call()
        generation.show_events(True)  # any thread may call this, and read
        assert session.tokens
        leave.set()
        assert answer.result(10).tokens == expected.tokens
    session.append("the next thread")


def test_a_half_read_stream_does_not_hold_the_context() -> None:
    chat = new_chat()
    twin = chat.fork()
    stream = chat.stream("hello")
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(twin.send, "hello").result(10).text == alone("hello")


def test_a_wait_ends_at_its_deadline_and_changes_nothing() -> None:
    context = ScriptedContext(n_ctx=4000)
    session = Session(context, ByteVocab(), sampling=SAMPLING, queue_timeout=0.01)
    session.append("hello")
    with ThreadPoolExecutor(1) as pool, queue_of(context):
        with pytest.raises(ContextBusy, match=r"0\.01 seconds.*queue_timeout="):
            pool.submit(session.next_logits).result(10)
        assert queue_of(context).n_waiting == 0
    assert (session.n_pending, context.n_decoded) == (5, 0)
    assert session.next_logits() is not None


def test_threads_are_served_in_the_order_in_which_they_came() -> None:
    queue, served = ContextQueue(), []

    def use(name: int) -> None:
        with queue:
            served.append(name)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(5)]
    with queue:
        for i, thread in enumerate(threads):
            thread.start()
            while queue.n_waiting <= i:
                pass
        with queue:
            pass  # leaving the inner block does not let other threads in
        assert served == []
    for thread in threads:
        thread.join(10)
    assert served == [0, 1, 2, 3, 4]


def test_ctrl_c_ends_a_wait() -> None:
    queue, is_taken, may_end = ContextQueue(), threading.Event(), threading.Event()

    def hold() -> None:
        with queue:
            is_taken.set()
            may_end.wait(10)

    def interrupt() -> None:
        while queue.n_waiting == 0:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threads = [threading.Thread(target=hold), threading.Thread(target=interrupt)]
    threads[0].start()
    assert is_taken.wait(10)
    threads[1].start()
    with pytest.raises(KeyboardInterrupt), queue:
        pytest.fail("the context was not free")
    assert queue.n_waiting == 0
    may_end.set()
    for thread in threads:
        thread.join(10)
    with queue:
        pass


def test_no_interrupt_leaves_the_turn_behind() -> None:
    def twice() -> None:
        with queue, queue:
            pass

    queue = ContextQueue()
    n_calls = n_calls_of(twice)
    for stop in range(1, n_calls + 1):
        queue = ContextQueue()
        interrupted(twice, stop)
        queue.deadline_s = 1
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_enter, queue).result(10)


def test_no_interrupt_leaves_a_guard_behind() -> None:
    def twice() -> None:
        with guard.block(), guard.block():
            pass

    def enter() -> None:
        with guard.block():
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # from here on there are two threads
        guard = Guard("session", SessionError)
        n_calls = n_calls_of(twice)
        assert n_calls > 4
        for stop in range(1, n_calls + 1):
            guard = Guard("session", SessionError)
            interrupted(twice, stop)
            pool.submit(enter).result(10)


def _enter(queue: ContextQueue) -> None:
    with queue:
        pass


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), -float("inf"), 10**400, 10**5000, "5", True], ids=type)
def test_an_invalid_deadline_is_refused(seconds: object) -> None:
    with pytest.raises(slm.SlmError, match="queue_timeout="):
        Session(ScriptedContext(), ByteVocab(), queue_timeout=seconds)  # type: ignore[arg-type]
