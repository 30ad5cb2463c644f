"""Messages in the shape of OpenAI's chat messages: the client's types accept it, and chats read the same message."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic import TypeAdapter

import slm_core as slm
from slm_core.chat.messages import as_messages
from slm_core.types import MalformedCall

params = pytest.importorskip("openai.types.chat", reason="the client whose types are the oracle")
PARAM: TypeAdapter[Any] = TypeAdapter(params.ChatCompletionMessageParam)
ARGUMENTS = [{}, {"city": "Köln", "n": 3}, {"list": [1, 2.5, None, True], "deep": {"\n": '"'}}]
TEXTS = ["", "Hello", 'lines\nand "quotes"', "日本 \N{GRINNING FACE}"]


def random_message(rng: random.Random) -> slm.Message:
    """Any message that has no malformed calls."""

    def some(values: list[Any]) -> Any:
        return rng.choice([None, *values])

    calls = [slm.ToolCall(f"tool{i}", rng.choice(ARGUMENTS), some(["id1", "id2"])) for i in range(rng.randrange(3))]
    return slm.Message(rng.choice(list(slm.Role)), rng.choice(TEXTS), some(TEXTS), calls, some(["add"]), some(["id1"]))


def test_a_round_trip_through_json_is_the_identity() -> None:
    rng = random.Random(1)
    messages = [random_message(rng) for _ in range(200)]
    written = json.loads(json.dumps([message.to_openai() for message in messages]))
    assert as_messages(written) == tuple(messages)


MESSAGES = [
    slm.Message("system", "Be brief."),
    slm.Message("user", "Hello"),
    slm.Message("assistant", "Hi"),
    slm.Message(
        "assistant", "", "Let me see.", [slm.ToolCall("add", {"a": 1}, "call1"), slm.ToolCall("now", {}, "c2")]
    ),
    slm.Message("tool", "1", name="add", tool_call_id="call1"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.role.value)
def test_the_clients_types_accept_a_message(message: slm.Message) -> None:
    written = message.to_openai()
    read = PARAM.validate_python(written)
    assert read["role"] == message.role
    if message.tool_calls:
        assert written["content"] is None, "the shape of an answer that only calls"
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in read["tool_calls"]
        ]
        assert calls == [(call.id, call.name, call.arguments) for call in message.tool_calls]
    else:
        assert read["content"] == message.content


def test_malformed_calls_become_content() -> None:
    message = slm.Message("assistant", "So: ", malformed_calls=[MalformedCall("<tool_call>{", "not JSON")])
    assert message.to_openai() == {"role": "assistant", "content": "So: <tool_call>{"}


def test_the_conversation_of_a_chat_continues_elsewhere() -> None:
    """The demo model has called a tool; another chat continues from the mappings."""

    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: The name of the city
        """
        return f"It is sunny in {city}, 21 degrees."

    greedy = slm.Sampling(temperature=0, max_tokens=40)
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model:
        chat = model.chat(n_ctx=1024, sampling=greedy, tools=[get_weather])
        chat.send("What is the weather in Rome?")
        assert any(message.tool_calls for message in chat.messages)
        written = json.loads(json.dumps([message.to_openai() for message in chat.messages]))
        other = model.chat(n_ctx=1024, sampling=greedy, tools=[get_weather], messages=written)
        assert other.messages == chat.messages
        assert other.send("And in Paris?").text == chat.send("And in Paris?").text
