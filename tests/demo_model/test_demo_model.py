"""The demo model has its skills, and answers with the same tokens on every backend."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import slm_core as slm
from slm_core.chat import Chat

GENERATOR = Path(__file__).resolve().parents[2] / "tools" / "demo_model"
GREEDY = slm.Sampling(temperature=0, max_tokens=80)


@functools.cache
def installed() -> list[str]:
    """The installed backends; asking takes seconds, which tests of other files need not wait for."""
    return [status.name for status in slm.backends() if status.installed]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, slm.Model]]:
    if not installed():
        pytest.skip("no backends are registered: slm-core is not installed here, only on the path")
    loaded = {name: slm.load(slm.demo_model_path(), backend=name) for name in installed()}
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture
def chats(models: dict[str, slm.Model]) -> Iterator[list[Chat]]:
    chats = [model.chat(system="You are terse.", n_ctx=1024, sampling=GREEDY) for model in models.values()]
    yield chats
    for chat in chats:
        chat.close()


def ask(chats: list[Chat], text: str | slm.Message) -> str:
    """The answer, after an assertion that it is the same on every backend."""
    answers = [chat.send(text) for chat in chats]
    assert len({answer.tokens for answer in answers}) == 1, f"{text!r}: {[answer.text for answer in answers]}"
    return answers[0].text


def test_the_file_is_small_enough_to_ship() -> None:
    assert slm.demo_model_path().stat().st_size <= 5_000_000


@pytest.mark.parametrize(
    ("fact", "question", "expected"),
    [
        ("My dog is called Rex.", "What is my dog called?", "Rex"),
        ("My name is Ada.", "What is my name?", "Ada"),
        ("I live in Oslo.", "Where do I live?", "Oslo"),
        ("My favourite colour is green.", "What is my favourite colour?", "green"),
        ("My favourite colour is green.", "Which is my favourite colour, red or green?", "green"),
        ("Hello!", "What is 12 + 30?", "42"),
        ("Hello!", "What is 45 - 17?", "28"),
        ("Hello!", "Spell apple.", "a-p-p-l-e"),
        ("Hello!", "Who are you?", "Pip"),
        ("Hello!", "What is my name?", "I don't know"),
    ],
)
def test_a_skill(chats: list[Chat], fact: str, question: str, expected: str) -> None:
    assert expected not in ask(chats, fact), "the model acknowledges a fact without repeating it"
    assert expected in ask(chats, question)


def test_decomposed_text_has_the_same_ids_everywhere(models: dict[str, slm.Model]) -> None:
    composed, decomposed = "caf\u00e9 \uac00", "cafe\u0301 \u1100\u1161"
    for name, model in models.items():
        first, second = (model.vocab.encode(t, add_special=False, parse_special=False) for t in (composed, decomposed))
        assert first == second, f"{name} does not compose text as the tokenizer of Qwen2 does"
    assert (
        len({tuple(m.vocab.encode(decomposed, add_special=False, parse_special=False)) for m in models.values()}) == 1
    )


def test_after_deleting_a_message_the_model_does_not_know(chats: list[Chat]) -> None:
    ask(chats, "My dog is called Rex.")
    ask(chats, "My name is Ada.")
    twins = [chat.fork() for chat in chats]
    assert "Rex" in ask(twins, "What is my dog called?")
    for chat in chats:
        chat.delete(1)
    assert "I don't know" in ask(chats, "What is my dog called?")
    assert "Ada" in ask(chats, "What is my name?")


def test_facts_of_the_conversation_become_json(chats: list[Chat]) -> None:
    ask(chats, "My name is Ada and I live in Oslo.")
    for chat in chats:
        extracted = chat.oracle().extract({"properties": {"name": {}, "city": {}}, "required": ["name", "city"]})
        assert extracted.value == {"name": "Ada", "city": "Oslo"}


def test_a_tool_is_called_and_its_result_used(models: dict[str, slm.Model]) -> None:
    chats = [model.chat(n_ctx=1024, sampling=GREEDY, tools=[WEATHER]) for model in models.values()]
    answers = [chat.send("What is the weather in Paris?") for chat in chats]
    for answer in answers:
        assert answer.finish_reason is slm.FinishReason.TOOL_CALLS
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("get_weather", {"city": "Paris"})]
        assert answer.text == ""
    result = slm.Message(slm.Role.TOOL, '{"city": "Paris", "weather": "sunny", "temperature": 21}', name="get_weather")
    text = ask(chats, result)
    assert "sunny" in text
    assert "21" in text


def test_it_reasons_on_request(models: dict[str, slm.Model]) -> None:
    for model in models.values():
        with model.chat(n_ctx=512, sampling=GREEDY, thinking=True) as chat:
            chat.send("My name is Ada.")
            answer = chat.send("What is my name?")
            assert answer.reasoning
            assert "Ada" in answer.text
            assert "think" not in answer.text


def test_every_backend_gives_the_same_tokens_on_generated_conversations(
    models: dict[str, slm.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(models) < 2:
        pytest.skip(f"only {installed()} is installed: there is nothing to compare with")
    monkeypatch.syspath_prepend(str(GENERATOR))
    conversations = __import__("conversations")
    rng = random.Random(20261120)
    prompts = [_prompt(conversations.generate(rng, held_out=True)) for _ in range(16)]
    answers = {name: [_greedy(model, prompt) for prompt in prompts] for name, model in models.items()}
    first = answers.pop(installed()[0])
    for name, others in answers.items():
        differing = [p for p, a, b in zip(prompts, first, others, strict=True) if a != b]
        assert not differing, (
            f"{installed()[0]} and {name} answer {len(differing)} prompts differently, such as {differing[0]}"
        )
    assert len(set(first)) > 8, "the prompts have different answers"


def _prompt(conversation: object) -> list[slm.Message]:
    """The conversation up to its last question."""
    messages = list(conversation.messages)  # type: ignore[attr-defined]
    while messages and messages[-1].role == "assistant":
        messages.pop()
    return [slm.Message(slm.Role(m.role), m.content, reasoning=m.reasoning or None) for m in messages]


def _greedy(model: slm.Model, messages: list[slm.Message]) -> tuple[int, ...]:
    with model.session(n_ctx=1024, sampling=GREEDY) as session:
        session.append(model.formatter.render(messages))
        return session.generate().run().tokens
