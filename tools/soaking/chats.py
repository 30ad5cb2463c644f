"""Workloads on chats: a conversation as long as the run, edits, forks, oracles, tools, dumps."""

from __future__ import annotations

import random
from typing import cast

from slm_core.chat import Chat, Oracle
from slm_core.errors import ContextFull, OracleError
from slm_core.generation import Answer
from slm_core.sampling import Sampling
from soaking.checks import require, same_greedy
from soaking.site import N_BATCH, N_CTX, N_SEQ_MAX, QUESTIONS, Site

_GREEDY = Sampling(temperature=0, max_tokens=16)
_ROOM = 4 * N_BATCH
_NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


def get_weather(city: str) -> dict[str, object]:
    """Get the weather of a city.

    Args:
        city: The name of the city
    """
    return {"city": city, "condition": "sunny", "degrees": 21}


def long_chat(site: Site, rng: random.Random) -> None:
    """The next answer of an endless conversation equals that of a fresh chat with the same messages."""
    chat = _long_lived_chat(site)
    for _ in range(rng.randint(1, 3)):
        _edit(chat, rng)
    question = rng.choice(QUESTIONS)
    with _twin(site, chat) as twin:
        answer = twin.send(question)
        tokens = twin.session.tokens
    fresh = site.model("demo").chat(
        messages=chat.messages, n_ctx=N_CTX, n_seq_max=2, n_batch=N_BATCH, sampling=_GREEDY, overflow="truncate_middle"
    )
    with fresh:
        expected = fresh.send(question)
    _same_answer(site, tokens, answer, expected, "a chat that is as old as the run")


def restored_chat(site: Site, rng: random.Random) -> None:
    """A restored chat answers as the dumped chat does, also if a message was forgotten before the dump."""
    chat = _long_lived_chat(site)
    with _twin(site, chat) as twin:
        if len(twin.messages) > 2 and rng.random() < 0.5:
            before = twin.messages, twin.session.tokens
            try:
                twin.forget(rng.randrange(1, len(twin.messages)))
            except ContextFull:  # a fork shares the cells that it cuts, and there is no room for copies
                require((twin.messages, twin.session.tokens) == before, "forget() was refused, but the chat changed")
        data, question = twin.dump(), rng.choice(QUESTIONS)
        expected = twin.send(question)
    with Chat.restore(site.model("demo"), data) as restored:
        answer = restored.send(question)
        require(answer.tokens == expected.tokens, f"a restored chat says {answer.text!r}, not {expected.text!r}")


def oracles(site: Site, rng: random.Random) -> None:
    """Questions of an oracle leave no trace in the chat, even if there is no room for one."""
    chat = _long_lived_chat(site)
    chat.session.prefill()
    before = chat.session.tokens, chat.messages, chat.session.context.n_free
    try:
        _ask(chat.oracle(), rng)
    except (ContextFull, OracleError) as error:  # no room for the question, or for the whole answer
        require(before[2] < _ROOM, f"with {before[2]} free positions an oracle raised {error}")
    after = chat.session.tokens, chat.messages, chat.session.context.n_free
    require(after == before, "an oracle left a trace in the chat")


def _ask(oracle: Oracle, rng: random.Random) -> None:
    kind = rng.randrange(3)
    if kind == 0:
        oracle.ask(rng.choice(QUESTIONS))
    elif kind == 1:
        oracle.choose("What is my dog called?", ["Rex", "Luna", "Bello"])
    else:
        oracle.extract(_NUMBER)


def tools(site: Site, rng: random.Random) -> None:
    """A tool is called, and its result is used."""
    city = rng.choice(["Rome", "Paris", "Oslo"])
    chat = site.model("demo").chat(
        n_ctx=N_CTX, n_seq_max=2, n_batch=N_BATCH, sampling=Sampling(temperature=0, max_tokens=80)
    )
    with chat:
        answer = chat.send(f"What is the weather in {city}?", tools=[get_weather])
        calls = [result.call.arguments for result in answer.results]
    require(
        calls == [{"city": city}], f"asked for the weather in {city}, the model called with {calls}: {answer.text!r}"
    )


def _long_lived_chat(site: Site) -> Chat:
    if "chat" not in site.kept:
        site.kept["chat"] = site.model("demo").chat(
            system="You are Pip.",
            n_ctx=N_CTX,
            n_seq_max=N_SEQ_MAX,
            n_batch=N_BATCH,
            sampling=_GREEDY,
            overflow="truncate_middle",
        )
    return cast("Chat", site.kept["chat"])


def _twin(site: Site, chat: Chat) -> Chat:
    """A copy of the chat: a fork, if the context has room for the next answer, which both share."""
    if chat.session.context.n_free >= _ROOM:
        return chat.fork()
    return Chat.restore(site.model("demo"), chat.dump())


def _edit(chat: Chat, rng: random.Random) -> None:
    """One call that changes the conversation; it still alternates between questions and answers."""
    kind, n = rng.choice(["send", "send", "send", "regenerate", "edit", "delete", "stream"]), len(chat.messages)
    question = rng.choice(QUESTIONS)
    if kind == "edit" and n > 2:
        chat.edit(rng.randrange(1, n, 2), question)
    elif kind == "delete" and n > 4:
        first = rng.randrange(1, n - 1, 2)
        chat.delete(first)
        chat.delete(first)
    elif kind == "regenerate" and n > 2:
        chat.regenerate().run()
    elif kind == "stream":
        for _, _event in zip(range(rng.randint(1, 5)), chat.stream(question), strict=False):
            pass
    else:
        chat.send(question)


def _same_answer(site: Site, tokens: tuple[int, ...], answer: Answer, expected: Answer, what: str) -> None:
    """Require equal answers. ``tokens`` is the session with the answer; the part before the answer is its prompt."""
    if answer.tokens != expected.tokens:
        same_greedy(site, "demo", tokens[: answer.usage.prompt_tokens], answer, expected, what)
