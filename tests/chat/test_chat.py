"""Chats and oracles over a scripted context: the messages define the content of the KV cache."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import BaseModel, field_validator

from scripted import ALL, END, ByteVocab, Script, ScriptedContext, TagFormatter, says
from slm_core.chat import Chat, ChatOptions, Session, encode_segments
from slm_core.constraints import Choice
from slm_core.container import pack, unpack
from slm_core.errors import (
    ConstraintError,
    ContextFull,
    InvalidOption,
    InvalidSnapshot,
    OracleError,
    SessionError,
    TemplateError,
)
from slm_core.generation import FinishReason, StoppingAction
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel, Message, Role

GREEDY = Sampling(temperature=0)
NO_FORK = frozenset({Capability.KV_PAYLOAD})


class Model:
    """The attributes of a model that ``Chat.restore`` needs."""

    info = SimpleNamespace(n_ctx_train=5000)
    vocab, formatter = ByteVocab(), TagFormatter()

    def __init__(self, script: Script = lambda data: None, **options: object) -> None:
        self.script, self.options = script, options

    def new_context(self, **sizes: int) -> ScriptedContext:
        return ScriptedContext(self.script, **sizes, **self.options)


def new_chat(*answers: str, system: str | None = "sys", n_ctx: int = 600, **options: object) -> Chat:
    context = ScriptedContext(says(*answers) if answers else (lambda data: None), n_ctx=n_ctx, **options)
    session = Session(context, ByteVocab(), sampling=GREEDY, owns_context=True)
    return Chat(session, TagFormatter(), system=system)


def roles_and_contents(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role.value, message.content) for message in chat.messages]


def fresh_logits(chat: Chat) -> np.ndarray:
    """The next logits of a new session that receives all the chat's messages at once."""
    session = Session(ScriptedContext(chat.session.context.script, n_ctx=4000), ByteVocab())
    session.append(TagFormatter().render(chat.messages, add_generation_prompt=True))
    return session.next_logits()


def next_logits(chat: Chat) -> np.ndarray:
    ids = encode_segments(ByteVocab(), TagFormatter().render(chat.messages, add_generation_prompt=True))
    chat.session.follow(ids)
    return chat.session.next_logits()


def test_events_of_a_chat_contain_the_likeliest_tokens() -> None:
    plain, chat = new_chat("one"), new_chat("one")
    chat.options = replace(chat.options, sampling=replace(GREEDY, logprobs=2))
    bare, events = list(plain.stream("hello")), list(chat.stream("hello"))
    assert [event.token for event in events] == [event.token for event in bare]
    for event in events:
        if event.token is not None:
            assert event.logprobs.model[0] == (event.token, pytest.approx(event.logprob, abs=1e-5))
            assert (event.logprobs.chosen, len(event.logprobs.sampled)) == (0.0, 1), "greedy sampling leaves one token"


def test_a_conversation_streams_and_stores_its_messages() -> None:
    chat = new_chat("one", "two")
    stream = chat.stream("first")
    assert "".join(event.text for event in stream) == "one" == stream.answer.text
    assert chat.send("second").text == "two"
    assert roles_and_contents(chat) == [
        ("system", "sys"), ("user", "first"), ("assistant", "one"), ("user", "second"), ("assistant", "two"),
    ]  # fmt: skip


def test_the_second_turn_decodes_only_new_tokens() -> None:
    chat = new_chat("one", "two")
    chat.send("first")
    answer = chat.send("second")
    new = "<|start|>user:second<|end|><|start|>assistant:"
    n_new = len(ByteVocab().encode(new, add_special=False, parse_special=True))
    # The last token of the first answer was sampled, but not decoded.
    assert answer.usage.prompt_tokens - answer.usage.cached_tokens == n_new + 1


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("change", ["edit", "delete"])
def test_after_a_change_the_cache_agrees_with_the_messages(level: EditLevel, change: str) -> None:
    chat = new_chat("one", "two", level=level)
    chat.send("first")
    chat.send("second")
    chat.edit(1, "FIRST") if change == "edit" else chat.delete(2)
    np.testing.assert_array_equal(next_logits(chat), fresh_logits(chat))


def test_forget_cuts_if_the_context_can_and_reports_it() -> None:
    for level in EditLevel:
        chat = new_chat("one", "two", level=level)
        chat.send("first")
        chat.send("second")
        before = chat.session.context.n_decoded
        assert chat.forget(1) is level
        assert [text for _, text in roles_and_contents(chat)] == ["sys", "one", "second", "two"]
        same = np.array_equal(next_logits(chat), fresh_logits(chat))
        assert same == (level is not EditLevel.CUT), "a cut keeps the values of later tokens; recomputation does not"
        if level is EditLevel.CUT:
            n_prompt = len(ByteVocab().encode("<|start|>assistant:", add_special=False, parse_special=True))
            assert chat.session.context.n_decoded - before <= n_prompt + 1, "no tokens are recomputed"


def test_a_forgotten_message_stays_forgotten_in_later_turns() -> None:
    chat = new_chat("one", "two", "three")
    chat.send("first")
    chat.send("second")
    chat.forget(1)
    answer = chat.send("third")
    assert answer.text == "three"
    assert b"first" not in bytes(token for token in chat.session.tokens if token < 256)


def test_regenerate_replaces_the_answer_by_another() -> None:
    chat = new_chat()
    chat.options = ChatOptions(Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=6))
    first = chat.send("hello")
    second = chat.regenerate().run()
    assert first.tokens != second.tokens
    assert [role for role, _ in roles_and_contents(chat)] == ["system", "user", "assistant"]
    with pytest.raises(SessionError, match="nothing to answer"):
        new_chat().regenerate()


def test_a_chat_without_questions_has_nothing_to_regenerate() -> None:
    chat = new_chat()
    chat._become((Message(Role.ASSISTANT, "welcome"), Message(Role.ASSISTANT, "ask me")))
    with pytest.raises(SessionError, match="nothing to answer"):
        chat.regenerate()
    assert len(chat.messages) == 2


def test_a_fork_is_independent() -> None:
    chat = new_chat("one", "two")
    chat.send("first")
    with chat.fork() as twin:
        twin.send("other")
        assert len(twin.messages) == 5
        np.testing.assert_array_equal(next_logits(twin), fresh_logits(twin))
    assert len(chat.messages) == 3
    np.testing.assert_array_equal(next_logits(chat), fresh_logits(chat))


@pytest.mark.parametrize("payload_format", ["1", "2"], ids=["payload", "replay"])
def test_a_restored_dump_continues_like_the_chat(payload_format: str) -> None:
    chat = new_chat()
    chat.options = ChatOptions(Sampling(temperature=1.5, seed=3, max_tokens=6))
    chat.send("first")
    chat.forget(1)
    twin = Chat.restore(Model(chat.session.context.script, payload_format=payload_format), chat.dump())
    assert (twin.messages, twin.options) == (chat.messages, chat.options)
    assert twin.send("second").tokens == chat.send("second").tokens
    assert twin.session.context.n_seq_max == chat.session.context.n_seq_max


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.update(messages=[{"role": "user"}]),
        lambda meta: meta["messages"][0].update(role="king"),
        lambda meta: meta["messages"][0].update(tool_calls=[{"name": 1}]),
        lambda meta: meta["messages"][0].update(tool_calls={}),
        lambda meta: meta["messages"][0].update(malformed_calls={}),
        lambda meta: meta["messages"][0].update(malformed_calls=[{"text": "x"}]),
        lambda meta: meta["messages"][0].update(malformed_calls=[{"text": "x", "reason": 1}]),
        lambda meta: meta.update(context=[5001, 1, 1]),
        lambda meta: meta.update(context=[0, 1, 1]),
        lambda meta: meta.update(context=[1, 1, 2**17]),
        lambda meta: meta.update(thinking="yes"),
        lambda meta: meta.update(overflow="roll"),
        lambda meta: meta.update(overflow=[]),
        lambda meta: meta.update(tools=["x"]),
        lambda meta: meta.update(n_answers=-1),
        lambda meta: meta.pop("sampling"),
    ],
)
def test_forged_chat_dumps_are_refused(change: object) -> None:
    chat = new_chat("one")
    chat.send("first")
    meta, sections = unpack("chat", chat.dump())
    change(meta)
    with pytest.raises(InvalidSnapshot):
        Chat.restore(Model(), pack("chat", meta, sections))


def test_a_dump_of_a_larger_context_is_restored_with_the_callers_n_ctx() -> None:
    chat = new_chat("one", n_ctx=5001)
    chat.send("first")
    with pytest.raises(InvalidSnapshot, match="5001"):
        Chat.restore(Model(), chat.dump())
    with Chat.restore(Model(), chat.dump(), n_ctx=700) as twin:
        assert (twin.session.context.n_ctx, twin.messages) == (700, chat.messages)


def test_a_cancelled_answer_stays_in_the_messages() -> None:
    chat = new_chat("abcdef")
    stream = chat.stream("x")
    next(stream), next(stream)
    stream.cancel()
    list(stream)
    assert stream.answer.finish_reason is FinishReason.CANCELLED
    assert roles_and_contents(chat)[-1] == ("assistant", "ab")


def test_a_cancelled_answer_can_be_forgotten() -> None:
    chat = new_chat("abcdef")
    stream = chat.stream("x")
    next(stream)
    stream.cancel()
    list(stream)
    chat.forget(-1)
    assert roles_and_contents(chat) == [("system", "sys"), ("user", "x")]
    np.testing.assert_array_equal(next_logits(chat), fresh_logits(chat))


def test_cancelling_an_answer_emits_the_text_held_by_the_parser() -> None:
    chat = new_chat("<think>hmm, and on")
    stream = chat.stream("x")
    for _ in range(3 + len("<think>")):
        next(stream)
    stream.cancel()
    assert "".join(event.reasoning for event in stream) == "hmm" == stream.answer.reasoning


def test_an_abandoned_answer_ends_where_it_is() -> None:
    chat = new_chat("abcdef", "two")
    for event in chat.stream("x"):
        if event.text == "c":
            break
    assert roles_and_contents(chat)[-1] == ("assistant", "abc")
    assert chat.send("y").text == "two"


def test_reading_the_messages_does_not_end_an_answer() -> None:
    chat = new_chat("abc")
    last_messages = [roles_and_contents(chat)[-1] for _ in chat.stream("x")]
    assert last_messages == [("assistant", text) for text in ("a", "ab", "abc", "abc")]
    assert roles_and_contents(chat) == [("system", "sys"), ("user", "x"), ("assistant", "abc")]


def test_an_answer_that_raises_leaves_the_chat_unchanged() -> None:
    def burst(event: object, draft: object) -> StoppingAction:
        raise RuntimeError("criterion")

    chat = new_chat("abc", "two")
    chat.send("first")
    before = roles_and_contents(chat)
    with pytest.raises(RuntimeError, match="criterion"):
        chat.send("x", stopping_criteria=[burst])
    assert roles_and_contents(chat) == before
    np.testing.assert_array_equal(next_logits(chat), fresh_logits(chat))


@pytest.mark.parametrize("failing", ["stopping_criteria", "on_event"])
def test_an_answer_that_raises_uses_no_random_stream(failing: str) -> None:
    def burst(*args: object) -> StoppingAction:
        raise RuntimeError("callback")

    warm = ChatOptions(Sampling(temperature=1.0, seed=3, max_tokens=8, top_k=0, min_p=0))
    calm, burnt = (Chat(Session(ScriptedContext(), ByteVocab()), TagFormatter(), options=warm) for _ in range(2))
    with pytest.raises(RuntimeError, match="callback"):
        burnt.send("x", **{failing: [burst] if failing == "stopping_criteria" else burst})
    assert unpack("chat", burnt.dump())[0] == unpack("chat", calm.dump())[0]
    assert burnt.send("x").tokens == calm.send("x").tokens


def test_a_fork_without_room_takes_no_sequence() -> None:
    messages = (Message(Role.USER, "hi"), Message(Role.ASSISTANT, "hello"))
    chat = Chat(Session(ScriptedContext(n_ctx=64, n_seq_max=3), ByteVocab()), TagFormatter(), messages=messages)
    chat.session.truncate(
        chat.session.n_tokens - 3
    )  # a fork shares the remaining tokens and needs three positions more
    chat.session.next_logits()
    other = Session(chat.session.context, ByteVocab())
    other.append("x" * (chat.session.context.n_free - 2))
    other.next_logits()
    with pytest.raises(ContextFull):
        chat.fork()
    assert [chat.session.context.length(i) > 0 for i in range(3)] == [True, True, False]


def test_an_unfit_or_refused_message_changes_nothing() -> None:
    chat = new_chat("one", n_ctx=80)
    chat.send("first")
    before, tokens = roles_and_contents(chat), chat.session.tokens
    with pytest.raises(ContextFull):
        chat.send("x" * 100)
    with pytest.raises(TemplateError, match="refused"):
        chat.send("REFUSE")
    with pytest.raises(TemplateError, match="refused"):
        chat.edit(1, "REFUSE")
    with pytest.raises(SessionError, match=r"no message 3 \(accepted: 0 to 2\)"):
        chat.edit(3, "x")
    assert (roles_and_contents(chat), chat.session.tokens) == (before, tokens)


def test_a_stopping_criterion_can_pause_a_chat() -> None:
    chat = new_chat("abcdef")
    stream = chat.stream(
        "x", stopping_criteria=[lambda e, d: StoppingAction.PAUSE if d.text == "abc" else StoppingAction.NEXT]
    )
    assert "".join(event.text for event in stream) == "abc"
    assert stream.paused
    assert stream.resume().run().text == "abcdef"
    assert roles_and_contents(chat)[-1] == ("assistant", "abcdef")


def test_reasoning_is_separated_and_kept_in_the_message() -> None:
    chat = new_chat("<think>hmm</think>yes")
    chat.options = replace(chat.options, thinking=True)
    stream = chat.stream("x")
    events = list(stream)
    assert stream.answer.text == "yes"
    assert "".join(event.text for event in events) == "yes"
    assert "".join(event.reasoning for event in events) == "hmm" == stream.answer.reasoning
    assert chat.messages[-1] == Message(Role.ASSISTANT, "yes", reasoning="hmm")


# Oracles.

PATHS = pytest.mark.parametrize(
    "options",
    [{"capabilities": ALL}, {"capabilities": NO_FORK}, {"n_seq_max": 1}, {"n_seq_max": 1, "level": EditLevel.REPLAY}],
    ids=["fork", "no shared forks", "no sequence left", "replay"],
)


def trace(chat: Chat) -> tuple[object, ...]:
    context = chat.session.context
    lengths = [context.length(s) for s in range(context.n_seq_max)]
    return chat.messages, chat.session.tokens, lengths, context.n_free, chat.session.dump()[:-40]


@PATHS
def test_an_oracle_leaves_no_trace(options: dict[str, object]) -> None:
    class Colour(Enum):
        RED, BLUE = "red", "blue"

    def burst(event: object, draft: object) -> StoppingAction:
        raise RuntimeError("criterion")

    chat = new_chat("one", '{"name": "Rex", "age": 3}', **options)
    chat.send("first")
    mark = chat.session.mark()
    before, logits = trace(chat), fresh_logits(chat)
    oracle = chat.oracle()
    first = oracle.ask("question").text
    assert first == oracle.ask("question").text
    assert oracle.choose("which?", Colour).value in Colour
    assert oracle.extract({"type": "object", "required": ["name", "age"]}).value == {"name": "Rex", "age": 3}
    with pytest.raises(RuntimeError, match="criterion"):
        oracle.ask("question", stopping_criteria=[burst])
    with pytest.raises(ContextFull):
        oracle.ask("x" * 2000)
    with pytest.raises(TemplateError):
        oracle.ask("REFUSE")
    with pytest.raises(OracleError):
        oracle.extract({"type": "string", "minLength": 2000})
    stopped = oracle.ask("question", stopping_criteria=[lambda event, draft: StoppingAction.STOP])
    assert stopped.finish_reason is FinishReason.CANCELLED
    assert trace(chat) == before
    chat.session.rollback(mark)
    np.testing.assert_array_equal(next_logits(chat), logits)


def test_options_of_a_question_replace_those_of_the_sampling() -> None:
    chat = new_chat("one", "an answer of some length")
    chat.send("first")
    for ask in (chat.oracle().ask, chat.oracle().think):
        assert len(ask("question", max_tokens=3).tokens) == 3
        assert ask("question", stop="some").stop == "some"
        drawn = Sampling(temperature=2.0, top_p=0.9, seed=1, max_tokens=9)
        given = ask("question", temperature=2.0, top_p=0.9, seed=1, max_tokens=9)
        assert given.tokens == ask("question", sampling=drawn).tokens


@pytest.mark.parametrize("options", [{}, {"n_seq_max": 1}], ids=["fork", "no sequence left"])
def test_an_oracle_leaves_a_paused_answer_and_its_draws_unchanged(options: dict[str, object]) -> None:
    def paused(scratch_branch: bool) -> str:
        sampling = Sampling(temperature=1.5, seed=2, max_tokens=12)
        session = Session(ScriptedContext(n_ctx=600, **options), ByteVocab(), sampling=sampling)
        session.append("a prompt")
        list(
            session.generate(
                stopping_criteria=[lambda e, d: StoppingAction.PAUSE if len(d.tokens) == 4 else StoppingAction.NEXT]
            )
        )
        mark = session.mark()
        if scratch_branch:
            with session.scratch_branch() as elsewhere:
                elsewhere.truncate(3)
                elsewhere.append("somewhere else")
                elsewhere.generate().run()
        answer = session.generate().run()
        session.rollback(mark)
        return answer.text

    assert paused(scratch_branch=True) == paused(scratch_branch=False)


def test_choose_scores_whole_answers() -> None:
    chat = new_chat("yes")
    chosen = chat.oracle().choose("well?", ["no", "yes", "yesterday", "ye"])
    assert chosen.value == "yes"
    assert sum(chosen.probabilities) == pytest.approx(1)
    values = chat.oracle().choose("well?", [1, 2]).value
    assert values in (1, 2)


@pytest.mark.parametrize("options", [[], ["one"], ["a", "a"], ["a", ""]], ids=str)
def test_choose_refuses_invalid_options(options: list[str]) -> None:
    with pytest.raises(InvalidOption, match="at least two"):
        new_chat("yes").oracle().choose("well?", options)


def test_choose_gives_the_probability_of_each_option_and_its_end() -> None:
    chat = new_chat()
    chat._become((Message(Role.USER, "hello"),))
    options = ["a", "bc"]
    prompt = TagFormatter().render([*chat.messages, Message(Role.USER, "q")])
    scores = []
    for option in options:
        session = Session(ScriptedContext(n_ctx=600), ByteVocab())
        session.append(prompt)
        score = 0.0
        for token in (*option.encode(), END):
            row = session.next_logits().astype(np.float64)
            score += row[token] - np.log(np.exp(row).sum())
            session.append_tokens([token])
        scores.append(score)
    expected = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(chat.oracle().choose("q", options).probabilities, expected, rtol=1e-5)


class EndlessVocab(ByteVocab):
    """No token ends an answer."""

    eos, eog_ids = None, frozenset()


def test_choose_scores_options_alone_if_no_token_ends_an_answer() -> None:
    chat = Chat(Session(ScriptedContext(n_ctx=600), EndlessVocab(), sampling=GREEDY), TagFormatter())
    session = Session(ScriptedContext(n_ctx=600), EndlessVocab())
    session.append(TagFormatter().render([Message(Role.USER, "q")]))
    row = session.next_logits().astype(np.float64)
    expected = np.exp(row[[ord("a"), ord("b")]])
    probabilities = chat.oracle().choose("q", ["a", "b"]).probabilities
    np.testing.assert_allclose(probabilities, expected / expected.sum(), rtol=1e-5)


def test_choose_distinguishes_very_unlikely_options() -> None:
    """The probability of 200 random tokens underflows float64; the probability of one option among two does not."""
    probabilities = new_chat().oracle().choose("well?", ["a" * 200, "b" * 200]).probabilities
    assert sum(probabilities) == pytest.approx(1)


class Dog(BaseModel):
    name: str
    age: int


def test_extract_returns_pydantic_objects() -> None:
    extracted = new_chat('{"name": "Rex", "age": 3}').oracle().extract(Dog)
    assert extracted.answer.text == extracted.text == '{"name": "Rex", "age": 3}'
    assert extracted.answer.usage.completion_tokens == len(extracted.answer.tokens) > 0
    assert extracted.value == Dog(name="Rex", age=3)


@pytest.mark.parametrize("thinking", [None, True])
def test_extract_returns_a_valid_value_for_any_model(thinking: bool | None) -> None:
    """The model generates noise, after reasoning if thinking is on."""
    session = Session(ScriptedContext(n_ctx=600), ByteVocab(), sampling=GREEDY)
    options = ChatOptions(GREEDY, thinking=thinking)
    schema = {"type": "array", "items": {"enum": ["a", 17]}, "minItems": 2, "maxItems": 3}
    if thinking:
        session.context.script = lambda data: 259 if data.endswith(b"<think>") else None  # "</think>"
    extracted = Chat(session, TagFormatter(), options=options).oracle().extract(schema)
    assert 2 <= len(extracted.value) <= 3
    assert set(extracted.value) <= {"a", 17}


def test_extract_refuses_incomplete_and_invalid_values() -> None:
    class Old(Dog):
        @field_validator("age")
        @classmethod
        def is_old(cls, age: int) -> int:
            if age < 9:
                raise ValueError("too young")
            return age

    chat = new_chat('{"name": "Rex", "age": 3}')
    with pytest.raises(OracleError, match="too young"):
        chat.oracle().extract(Old)
    with pytest.raises(OracleError, match="not complete after 5 tokens"):
        chat.oracle().extract(Dog, sampling=Sampling(temperature=0, max_tokens=5))


@pytest.mark.parametrize("schema", [7, int, {"not": {}}, {"type": "int"}, {"properties": {"a": 3}}, {"minimum": "2"}])
def test_a_schema_without_effect_is_refused(schema: object) -> None:
    with pytest.raises(ConstraintError):
        new_chat("{}").oracle().extract(schema)


def test_an_oracle_answers_under_a_constraint() -> None:
    chat = new_chat("whatever it likes")
    assert chat.oracle().ask("q", constraint=Choice(["yes", "no"])).text in ("yes", "no")


def test_extract_asks_for_the_keys() -> None:
    prompts = []

    def script(data: bytes) -> int | None:
        prompts.append(data)
        return says("{}")(data)

    session = Session(ScriptedContext(script, n_ctx=600), ByteVocab(), sampling=GREEDY)
    Chat(session, TagFormatter()).oracle().extract({"properties": {"name": {}, "pet": {}}})
    assert b"Give me JSON with the keys name, pet." in prompts[0]
