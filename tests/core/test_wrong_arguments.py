"""Arguments of the wrong kind: each is refused where the call begins, in one line that names the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import slm_core as slm
from slm_core.constraints import Choice, ToolCalls
from slm_core.engine.prompts import Conversation
from slm_core.errors import ConstraintError, InvalidMark, InvalidOption, SessionError
from slm_core.server.options import ServerOptions

GREEDY = slm.Sampling(temperature=0, max_tokens=3)
PATH = slm.demo_model_path()


@pytest.fixture(scope="module")
def model() -> Iterator[slm.Model]:
    with slm.load(PATH, backend="native", n_threads=1) as loaded:
        yield loaded


@pytest.fixture
def session(model: slm.Model) -> Iterator[slm.Session]:
    with model.session(n_ctx=64, sampling=GREEDY) as opened:
        opened.append("Hello")
        yield opened


@pytest.fixture
def chat(model: slm.Model) -> Iterator[slm.Chat]:
    with model.chat(n_ctx=256, sampling=GREEDY) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(model: slm.Model) -> Iterator[slm.Engine]:
    with model.engine(n_ctx=128, n_parallel=2) as opened:
        yield opened


def function(*_: object) -> bool:
    return False


def tool(city: str) -> str:
    """Get the weather.

    Args:
        city: The city.
    """
    return city


def refused(call: Callable[[], object], name: str, kind: type[slm.SlmError] = InvalidOption) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert name in message
    assert "accepted: " in message
    assert "\n" not in message


LOADING: list[tuple[str, Any]] = [
    ("backend", 5),
    ("backend", [5]),
    ("device", b"cpu"),
    ("device", None),
    ("progress", True),
    ("formatter", b"chatml"),
    ("formatter", slm.formatter),
]


@pytest.mark.parametrize(("name", "value"), LOADING)
def test_load(name: str, value: Any) -> None:
    options: dict[str, Any] = {"backend": "native", name: value}
    refused(lambda: slm.load(PATH, **options), f"{name}=")


def test_the_device_of_supports() -> None:
    wrong: Any = b"cpu"
    refused(lambda: slm.supports(PATH, device=wrong), "device=")


SESSIONS: list[tuple[str, Callable[[slm.Session, Any], object], Any]] = [
    ("content=", lambda session, value: session.append(value), b"x"),
    ("content=", lambda session, value: session.append(value), 5),
    ("content=", lambda session, value: session.append(value), ["a"]),
    ("content=", lambda session, value: session.append(value), [1, 2]),
    ("content=", lambda session, value: session.append(value), {}),
    ("content=", lambda session, value: session.append(value), slm.Segment("a", control=False)),
    ("tokens=", lambda session, value: session.append_tokens(value), "x"),
    ("tokens=", lambda session, value: session.append_tokens(value), b"x"),
    ("tokens=", lambda session, value: session.append_tokens(value), 5),
    ("tokens=", lambda session, value: session.append_tokens(value), [1.0]),
    ("content=", lambda session, value: session.score(value), b"x"),
    ("content=", lambda session, value: session.score(value), 5),
    ("content=", lambda session, value: session.score(value), ["a"]),
    ("stopping_criteria=", lambda session, value: session.generate(stopping_criteria=value), function),
    ("stopping_criteria[0]=", lambda session, value: session.generate(stopping_criteria=value), [True]),
    ("on_event=", lambda session, value: session.generate(on_event=value), True),
    ("progress=", lambda session, value: session.generate(progress=value), True),
    ("logits_processors=", lambda session, value: session.generate(logits_processors=value), 5),
    ("constraint=", lambda session, value: session.generate(constraint=value), ["yes", "no"]),
    ("constraint=", lambda session, value: session.generate(constraint=value), Choice),
    ("sampler=", lambda session, value: session.generate(sampler=value), GREEDY),
    ("sampler=", lambda session, value: slm.heal(session, value), GREEDY),
    ("stopping_criteria=", lambda session, value: session.completions(2, stopping_criteria=value), function),
    ("on_event=", lambda session, value: session.completions(2, on_event=value), True),
    ("progress=", lambda session, value: session.completions(2, progress=value), True),
    ("cancelled=", lambda session, value: session.beam_search(cancelled=value), False),
    ("progress=", lambda session, value: session.beam_search(progress=value), True),
]


@pytest.mark.parametrize(("name", "call", "value"), SESSIONS)
def test_sessions(session: slm.Session, name: str, call: Callable[[slm.Session, Any], object], value: Any) -> None:
    before = session.tokens
    refused(lambda: call(session, value), name)
    assert session.tokens == before


def test_a_mark_that_is_none(session: slm.Session) -> None:
    wrong: Any = 1
    refused(lambda: session.rollback(wrong), "1 is not a mark", InvalidMark)
    refused(lambda: session.remove(session.mark(), wrong), "1 is not a mark", InvalidMark)


def test_a_refused_callback_does_not_end_a_paused_answer(session: slm.Session) -> None:
    wrong: Any = True
    whole = session.fork().generate().run().text
    paused = session.generate(stopping_criteria=[lambda event, draft: slm.StoppingAction.PAUSE])
    first = "".join(event.text for event in paused)
    refused(lambda: session.generate(on_event=wrong), "on_event=")
    assert first + "".join(event.text for event in session.generate(stopping_criteria=[])) == whole


def test_tokens_of_an_array_are_the_same_as_of_a_list(model: slm.Model, session: slm.Session) -> None:
    ids: Any = np.array(model.vocab.encode("world", add_special=False, parse_special=False))
    twin, scored = session.fork(), session.score(ids)
    session.append_tokens(ids)
    twin.append_tokens(ids.tolist())
    assert session.tokens == twin.tokens
    assert all(type(token) is int for token in session.tokens)
    assert scored.tokens == tuple(ids.tolist())


MODELS: list[tuple[str, Callable[[slm.Model, Any], object], Any]] = [
    ("sampling=", lambda model, value: model.session(n_ctx=32, sampling=value), {"temperature": 0}),
    ("sampling=", lambda model, value: model.chat(n_ctx=32, sampling=value), {"temperature": 0}),
    ("sampling=", lambda model, value: model.drafter(model, n_ctx=32, sampling=value), {"temperature": 0}),
    ("sampling=", lambda model, value: slm.SamplerChain.for_vocab(value, model.vocab), {"temperature": 0}),
    ("sampling=", lambda model, value: model.generate("a", value), {"temperature": 0}),
    ("progress=", lambda model, value: model.generate("a", progress=value), print),
    ("thinking=", lambda model, value: model.chat(n_ctx=32, thinking=value), "off"),
    ("tools=", lambda model, value: model.chat(n_ctx=32, tools=value), b"x"),
    ("tools=", lambda model, value: model.chat(n_ctx=32, tools=value), tool),
    ("tools=", lambda model, value: model.chat(n_ctx=32, tools=value), {"name": "f", "parameters": {}}),
    ("tools=", lambda model, value: model.chat(n_ctx=32, tools=value), None),
    ("a str", lambda model, value: model.chat(n_ctx=32, tools=value), ["a"]),
    ("system=", lambda model, value: model.chat(n_ctx=32, system=value), []),
    ("system=", lambda model, value: model.chat(n_ctx=32, system=value), ["You are terse."]),
    ("cache_dir=", lambda model, value: model.engine(n_ctx=32, cache_dir=value), b"x"),
    ("cache_dir=", lambda model, value: model.engine(n_ctx=32, cache_dir=value), ""),
    ("prefix_cache=", lambda model, value: model.engine(n_ctx=32, prefix_cache=value), "off"),
    ("target=", lambda model, value: model.drafter(value, n_ctx=32), PATH),
    ("text=", lambda model, value: model.score(value), b"x"),
    ("text=", lambda model, value: model.score(value), ["a"]),
    ("n_ctx=", lambda model, value: model.score("a b", n_ctx=value), "64"),
    ("n_batch=", lambda model, value: model.score("a b", n_batch=value), None),
    ("texts=", lambda model, value: model.embed(value), 5),
    ("texts=", lambda model, value: model.embed(value), b"x"),
    ("texts=", lambda model, value: model.embed(value), {"a": 1}),
    ("text 0=", lambda model, value: model.embed(value), [1, 2]),
    ("text 1=", lambda model, value: model.embed(value), ["a", b"x"]),
    ("normalize=", lambda model, value: model.embed("a", normalize=value), "l2"),
    ("n_batch=", lambda model, value: model.embed("a", n_batch=value), "64"),
    ("text 0=", lambda model, value: model.hidden_states(value), 5),
    ("layers=", lambda model, value: model.hidden_states("a", layers=value), 5),
    ("query=", lambda model, value: model.rerank(value, ["a"]), ["q"]),
    ("texts=", lambda model, value: model.rerank("q", value), "one text"),
    ("positive=", lambda model, value: model.control_vector(value, "hate"), "love"),
    ("negative=", lambda model, value: model.control_vector(["love"], value), "h"),
    ("layers=", lambda model, value: model.control_vector(["love"], ["hate"], layers=value), 3),
    ("progress=", lambda model, value: model.control_vector(["love"], ["hate"], progress=value), True),
    ("path=", lambda model, value: model.adapters.load(value, "pirate"), 5),
    ("path=", lambda model, value: slm.Chat.load(model, value), 5),
    ("name=", lambda model, value: model.adapters.load(slm.demo_adapter_path(), value), 5),
    ("amateur=", lambda model, value: slm.ContrastiveSampler(value, slm.SamplerChain(GREEDY), model.vocab), 5),
]


@pytest.mark.parametrize(("name", "call", "value"), MODELS)
def test_models(model: slm.Model, name: str, call: Callable[[slm.Model, Any], object], value: Any) -> None:
    refused(lambda: call(model, value), name)


CHATS: list[tuple[str, Callable[[slm.Chat, Any], object], Any]] = [
    ("tools=", lambda chat, value: chat.send("a", tools=value), tool),
    ("on_event=", lambda chat, value: chat.send("a", on_event=value), True),
    ("progress=", lambda chat, value: chat.send("a", progress=value), True),
    ("stopping_criteria=", lambda chat, value: chat.send("a", stopping_criteria=value), function),
    ("sampler=", lambda chat, value: chat.send("a", sampler=value), GREEDY),
    ("path=", lambda chat, value: chat.save(value), 5),
    ("question=", lambda chat, value: chat.oracle().ask(value), ["a"]),
    ("sampling=", lambda chat, value: chat.oracle().ask("a", sampling=value), {"temperature": 0}),
    ("sampling=", lambda chat, value: chat.oracle().extract({}, sampling=value), {"temperature": 0}),
    ("options=", lambda chat, value: chat.oracle().choose("a", value), "yes"),
    ("options=", lambda chat, value: chat.oracle().choose("a", value), 5),
]


@pytest.mark.parametrize(("name", "call", "value"), CHATS)
def test_chats(chat: slm.Chat, name: str, call: Callable[[slm.Chat, Any], object], value: Any) -> None:
    refused(lambda: call(chat, value), name)
    assert chat.messages == ()


@pytest.mark.parametrize("call", [lambda chat, i: chat.edit(i, "b"), slm.Chat.delete, slm.Chat.forget])
def test_an_index_that_is_none(chat: slm.Chat, call: Callable[[slm.Chat, Any], object]) -> None:
    chat.send("a")
    refused(lambda: call(chat, slm.Message("user", "a")), "there is no message ", SessionError)
    refused(lambda: call(chat, 1.0), "there is no message 1.0", SessionError)


ENGINES: list[tuple[str, Callable[[slm.Engine, Any], object], Any]] = [
    ("sampling=", lambda engine, value: engine.submit("a", value), {"temperature": 0}),
    ("sampling=", lambda engine, value: engine.completions("a", 2, value), {"temperature": 0}),
    ("stopping_criteria=", lambda engine, value: engine.submit("a", stopping_criteria=value), function),
    ("constraint=", lambda engine, value: engine.submit("a", constraint=value), ["yes", "no"]),
    ("thinking=", lambda engine, value: engine.submit([slm.Message("user", "a")], thinking=value), "off"),
    ("tools=", lambda engine, value: engine.submit(Conversation([slm.Message("user", "a")], tools=value)), tool),
]


@pytest.mark.parametrize(("name", "call", "value"), ENGINES)
def test_engines(engine: slm.Engine, name: str, call: Callable[[slm.Engine, Any], object], value: Any) -> None:
    refused(lambda: call(engine, value), name)


OPTIONS: list[tuple[str, Callable[[Any], object], Any]] = [
    ("drafter=", slm.Speculation, slm.PromptLookup),
    ("drafter=", slm.Speculation, None),
    ("function=", slm.DraftFunction, 5),
    ("max_ngram=", slm.PromptLookup, "4"),
    ("min_match=", slm.SuffixIndex, 1.5),
    ("corpus=", lambda value: slm.SuffixIndex(corpus=value), "a text"),
    ("corpus[0]=", lambda value: slm.SuffixIndex(corpus=value), ["a text"]),
    ("stop=", lambda value: slm.Beams(stop=value), 5),
    ("force_words=", lambda value: slm.Beams(force_words=value), {"a": 1}),
    ("logit_bias=", lambda value: slm.Beams(logit_bias=value), [5]),
    ("suffix=", lambda value: slm.Infill("a", value), None),
    ("files=", lambda value: slm.Infill("a", "b", files=value), ["a.py"]),
    ("files['a.py']=", lambda value: slm.Infill("a", "b", files=value), {"a.py": b"a"}),
    ("host=", lambda value: ServerOptions(host=value), 5),
]


@pytest.mark.parametrize(("name", "call", "value"), OPTIONS)
def test_options(name: str, call: Callable[[Any], object], value: Any) -> None:
    refused(lambda: call(value), name)


def test_specs(model: slm.Model) -> None:
    wrong: Any = 5
    refused(lambda: Choice(wrong), "options ", ConstraintError)
    refused(lambda: Choice({"yes": 1}), "options ", ConstraintError)  # type: ignore[arg-type]
    refused(lambda: ToolCalls(tool, model.formatter.call_format), "tools: ", ConstraintError)  # type: ignore[arg-type]
