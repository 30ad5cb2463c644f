"""Messages in every form, options of one answer as keywords, and one clear line for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import slm_core as slm
from chat.tool_chats import roles_and_contents, state
from scripted import ByteVocab, ScriptedContext, TagFormatter
from slm_core.chat import Chat, Session
from slm_core.chat.messages import as_messages
from slm_core.errors import InvalidOption, SessionError, UnknownOption

CALL = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def new_chat(**options: Any) -> Chat:
    session = Session(ScriptedContext(n_ctx=4000), ByteVocab(), sampling=slm.Sampling(seed=5, max_tokens=12))
    return Chat(session, TagFormatter(), **options)


FORMS = [
    "Hello",
    slm.Message("user", "Hello"),
    {"role": "user", "content": "Hello"},
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": None}],
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_a_message_is_the_same_message(form: Any) -> None:
    chat = new_chat()
    answer = chat.send(form)
    assert roles_and_contents(chat) == [("user", "Hello"), ("assistant", answer.text)]
    assert answer.text == new_chat().send("Hello").text


def test_a_chat_begins_with_mappings() -> None:
    conversation = [{"role": "system", "content": "Be brief."}, *FORMS[3]]
    assert new_chat(messages=conversation).proceed().run().text == new_chat(system="Be brief.").send("Hello").text


def test_the_model_and_an_engine_take_the_messages_that_a_chat_takes() -> None:
    greedy = slm.Sampling(temperature=0, max_tokens=12)
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model, model.engine(n_ctx=512) as engine:
        expected = model.chat(n_ctx=512, sampling=greedy).send("What is 3 + 4?").text
        conversation = [{"role": "user", "content": [{"type": "text", "text": "What is 3 + 4?"}]}]
        assert model.generate(conversation, greedy).text == expected
        assert engine.submit(conversation, greedy).run().text == expected
        for call in (model.generate, engine.submit):
            with pytest.raises(InvalidOption, match=r"message 0: unknown role 'usr' .*did you mean 'user'\?"):
                call([{"role": "usr", "content": "x"}])


def test_calls_and_results_in_mappings() -> None:
    called, result = as_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Sum."},
            {"role": "tool", "content": "1", "tool_call_id": "call1", "name": "add"},
        ]
    )
    assert called == slm.Message("assistant", "", "Sum.", [slm.ToolCall("add", {"a": 1}, "call1")])
    assert result == slm.Message("tool", "1", name="add", tool_call_id="call1")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (slm.ToolCall("f", {"a": 1}), slm.ToolCall("f", {"a": 1})),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, slm.ToolCall("f", {"a": 1})),
        ({"function": {"name": "f", "arguments": ""}, "id": None}, slm.ToolCall("f", {})),
        ({"function": {"name": "f"}, "id": "c"}, slm.ToolCall("f", {}, "c")),
    ],
)
def test_forms_of_a_call(call: object, expected: slm.ToolCall) -> None:
    (message,) = as_messages({"role": "assistant", "tool_calls": (call,)})
    assert message == slm.Message("assistant", "", tool_calls=(expected,))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_names_of_reasoning(name: str) -> None:
    others = dict.fromkeys(("reasoning", "reasoning_content", "thinking"))
    expected = slm.Message("assistant", "Hello", "hm")
    assert as_messages([{"role": "assistant", "content": ["Hel", "lo"], **others, name: "hm"}]) == (expected,)


def changed(**values: object) -> dict[str, object]:
    return {**CALL, **values}


MISTAKES = [
    (5, r"5 is not a message \(accepted: a text, a Message, a mapping"),
    ([5], "message 0 is 5"),
    ([FORMS[2], {"role": "usr", "content": "x"}], r"message 1: unknown role 'usr' .*did you mean 'user'\?"),
    ({"content": "x"}, "the message has no 'role'"),
    ({"role": "user", "contents": "x"}, r"unknown key 'contents' .*did you mean 'content'\?"),
    ({"role": "user", "content": 5}, "content 5"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "texts, text parts and EmbeddingRows"),
    ({"role": "user", "content": "x", "name": 5}, "'name' is 5"),
    ({"role": "assistant", "content": "", "tool_calls": "add"}, "tool_calls 'add'"),
    ({"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}, "tool call 0 is"),
    (
        {"role": "assistant", "content": "", "tool_calls": [changed(function={"name": "add", "arguments": "{"})]},
        "arguments '{'",
    ),
    ({"role": "assistant", "content": "", "tool_calls": [changed(function={"arguments": "{}"})]}, "the name is None"),
    ({"role": "assistant", "content": "", "tool_calls": CALL}, "tool_calls {'id'.*a list of calls"),
    ({"role": "assistant", "content": "", "tool_calls": 5}, "tool_calls 5"),
    ({"role": "assistant", "content": "", "tool_calls": [CALL, 5]}, "tool call 1 is 5"),
    ({"role": "assistant", "content": "", "tool_calls": [CALL, changed(id=5)]}, "tool call 1: the id is 5"),
    (
        {"role": "assistant", "content": "", "tool_calls": [changed(function={"name": "add", "arguments": "[1]"})]},
        r"arguments '\[1\]'",
    ),
    (
        {"role": "assistant", "content": "", "tool_calls": [changed(function={"name": "f", "arguments": "[" * 10**5})]},
        r"arguments '\[\[",
    ),
    ({"role": "user", "content": ["x", {"type": "text"}]}, "the 'text' of a part is None"),
    ({"role": "user", "content": ["x", 5]}, "content part 5"),
    ({"role": "user", "content": "x", "tool_call_id": ["c"]}, r"'tool_call_id' is \['c'\]"),
    ({"role": "assistant", "content": "x", "thinking": 5}, "'thinking' is 5"),
]


@pytest.mark.parametrize(("form", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_malformed_message_is_one_line_that_says_where(form: Any, message: str) -> None:
    chat = new_chat()
    chat.send("Hello")
    before = state(chat)
    with pytest.raises(InvalidOption, match=message) as raised:
        chat.send(form)
    assert "\n" not in str(raised.value)
    assert state(chat) == before


def test_options_of_one_answer_replace_those_of_the_chat() -> None:
    chat = new_chat()
    assert len(chat.send("Hello", max_tokens=3).tokens) == 3
    assert len(chat.send("Hello").tokens) > 3, "the option was for one answer"
    greedy = new_chat().send("Hello", sampling=slm.Sampling(temperature=0, max_tokens=12)).text
    assert new_chat().send("Hello", temperature=0).text == greedy != new_chat().send("Hello").text
    assert new_chat().send("Hello", top_p=1e-9, temperature=2.0).text == greedy
    assert new_chat().send("Hello", seed=6).text != new_chat().send("Hello", seed=7).text


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_text_of_one_answer(as_list: bool) -> None:
    text = new_chat().send("Hello").text
    stop = text[3]
    answer = new_chat().send("Hello", stop=[stop] if as_list else stop)
    assert answer.text == text[: text.index(stop)]


def test_a_sampler_of_ones_own() -> None:
    class Largest:
        def __init__(self) -> None:
            self.n_chosen = 0

        def sample(self, logits: Any) -> int:
            self.n_chosen += 1
            return int(logits.argmax())

        def accept(self, token: int) -> None:
            pass

        def set_history(self, tokens: Any) -> None:
            pass

    sampler = Largest()
    answer = new_chat().send("Hello", sampler=sampler)  # type: ignore[arg-type]
    assert answer.text == new_chat().send("Hello", temperature=0).text
    assert sampler.n_chosen == len(answer.tokens)


@pytest.mark.parametrize("name", ["send", "stream", "asend", "proceed", "regenerate"])
def test_an_unknown_keyword_names_the_one_that_was_meant(name: str) -> None:
    chat = new_chat()
    chat.send("Hello")
    before, content = state(chat), () if name in ("proceed", "regenerate") else ("Hello",)
    with pytest.raises(UnknownOption, match=rf"{name}\(\) has no argument 'temprature' .*did you mean 'temperature'\?"):
        getattr(chat, name)(*content, temprature=0)
    assert state(chat) == before


@pytest.mark.parametrize("call", [lambda s: s.generate(samplin=None), lambda s: s.completions(2, samplin=None)])
def test_an_unknown_keyword_of_a_session_names_the_one_that_was_meant(call: Callable[[Session], object]) -> None:
    with new_chat() as chat, pytest.raises(UnknownOption, match=r"'samplin' .*did you mean 'sampling'\?"):
        call(chat.session)


@pytest.mark.parametrize("option", [{"max_tokens": -1}, {"temperature": "hot"}, {"sampling": {"temperature": 0}}])
def test_an_invalid_option_of_one_answer_is_refused(option: dict[str, Any]) -> None:
    chat = new_chat()
    with pytest.raises(InvalidOption, match=f"{next(iter(option))}="):
        chat.send("Hello", **option)
    assert chat.messages == ()


@pytest.mark.parametrize("change", ["edit", "delete", "forget"])
def test_a_message_of_an_empty_chat(change: str) -> None:
    arguments = (5, "x") if change == "edit" else (5,)
    with pytest.raises(SessionError, match=r"^there is no message 5: the chat is empty$"):
        getattr(new_chat(), change)(*arguments)


def test_an_unknown_role_of_a_message() -> None:
    with pytest.raises(InvalidOption, match=r"unknown role 'assistent' .*did you mean 'assistant'\?"):
        slm.Message("assistent", "x")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="content=5"):
        slm.Message("user", 5)  # type: ignore[arg-type]
