"""What a user prints is one short line that says what the object is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slm_core as slm
from slm_core.types import Message, ToolCall

LONG = "word " * 2000


@pytest.fixture(scope="module")
def model() -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as loaded:
        yield loaded


def printed(model: slm.Model) -> Iterator[object]:
    """One object of every class that a user holds."""
    greedy = slm.Sampling(temperature=0, max_tokens=8)
    yield from (model, model.model, model.info, model.vocab, model.formatter, greedy, slm.Beams(width=2))
    yield from (slm.SamplerChain(greedy), slm.PromptLookup(), slm.SuffixIndex(), slm.DraftFunction(max))
    yield from (Message("user", LONG), ToolCall("f", {"x": LONG}), slm.MalformedCall(LONG, "bad"))
    with model.new_context(n_ctx=64) as context:
        yield from (context, context.new_batch())
    with model.chat(system=LONG, n_ctx=4096, sampling=greedy) as chat:
        answer = chat.send("My dog is called Rex.")
        yield from (chat, chat.options, chat.session, answer, *answer.rounds, chat.oracle(), chat.stream("Hello"))
        yield chat.oracle().choose("Which?", ["Rex", LONG])
        yield chat.oracle().extract(
            {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
        )
    with model.session(n_ctx=512) as session:
        session.append(LONG[:300])
        yield from (session.generate(greedy), session.mark(), session.score("Hello"))
        event = next(session.generate(slm.Sampling(temperature=0, logprobs=20)))
        completions = session.completions(2, greedy)
        yield from (
            event,
            event.logprobs,
            completions,
            *completions.run(),
            session.beam_search(slm.Beams(max_tokens=4)),
        )
    with model.engine(n_ctx=512) as engine:
        yield from (engine, engine.submit("Hello", greedy), engine.completions("Hello", 2, greedy))
    yield from (model.embed(["Hello", "Hi"]), slm.ColouredText.of_score(model.score(LONG), model.vocab))


def test_every_repr_is_one_short_line(model: slm.Model) -> None:
    for thing in printed(model):
        line = repr(thing)
        assert len(line) < 300 and "\n" not in line, (type(thing), line)
        assert " object at 0x" not in line, line


def test_the_words_of_a_repr(model: slm.Model) -> None:
    assert repr(model) == "<Model: 'Pip', qwen3, 2.83M parameters, Q8_0, 2.9 MiB, native (cpu)>"
    with model.chat(system="Be brief.", n_ctx=256, sampling=slm.Sampling(temperature=0)) as chat:
        answer = chat.send("My dog is called Rex.")
        assert repr(answer) == f"<Answer: 'What a nice name!', stop, {len(answer.tokens)} tokens>"
        n_tokens = chat.session.n_tokens
        assert repr(chat) == f"<Chat: 3 messages, {n_tokens} tokens, assistant: 'What a nice name!'>"
        assert repr(chat.session.context) == f"<NativeContext: {n_tokens - 1} of 256 positions used, 1 of 8 sequences>"
    vectors = slm.Embeddings(np.ones((1, 3), np.float32), slm.Pooling.MEAN, (2,))
    assert repr(vectors) == "<Embeddings: 1 vector of 3 dimensions, pooling mean>"
    assert repr(Message("user", "Hi")) == "Message('user', 'Hi')"
    assert repr(slm.Sampling()) == "Sampling()"
    assert repr(slm.Choice("a", (0.75, 0.25))) == "Choice(value='a', probabilities=(0.75, 0.25))"


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "top_k": st.integers(0, 100),
        "stop": st.lists(st.text(min_size=1, max_size=20), max_size=3).map(tuple),
        "seed": st.none() | st.integers(0, 2**31),
        "logit_bias": st.dictionaries(st.integers(0, 99), st.sampled_from([-1.5, 2.0]), max_size=3),
    },
)


@given(VALUES)
def test_short_options_can_be_pasted_back(options: dict[str, object]) -> None:
    sampling = slm.Sampling(**options)  # type: ignore[arg-type]
    assert eval(repr(sampling), {"Sampling": slm.Sampling}) == sampling


@given(st.text(max_size=60), st.sampled_from(["user", "assistant", "system"]))
def test_short_messages_can_be_pasted_back(content: str, role: str) -> None:
    message = Message(role, content)  # type: ignore[arg-type]
    assert eval(repr(message), {"Message": Message}) == message


@given(st.text())
def test_no_text_makes_a_repr_long(text: str) -> None:
    assert len(repr(Message("user", text * 50))) < 1000
