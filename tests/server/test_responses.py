"""OpenAI's Responses: its own types validate every response and every event, and its own client reads them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

import slm_core as slm
from server.conftest import Body, Client, frames
from server.test_openai_chat import PERSON, WEATHER
from slm_core.server.response_store import MOST_RESPONSES

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", **WEATHER["function"], "strict": False}
SUM: Body = {"input": "What is 12 + 30?", "temperature": 0, "max_output_tokens": 100}
ASKED: Body = {**SUM, "input": "What is the weather in Rome?", "tools": [TOOL]}
CASES: dict[str, Body] = {
    "text": SUM,
    "cut": {**SUM, "max_output_tokens": 3},
    "instructions": {**SUM, "instructions": "Be short."},
    "reasoning": {**SUM, "reasoning": {"effort": "high"}, "max_output_tokens": 300},
    "a call": ASKED,
    "a cut call": {**ASKED, "max_output_tokens": 14},
    "one call": {**ASKED, "tool_choice": "required", "parallel_tool_calls": False},
    "this call": {**ASKED, "tool_choice": {"type": "function", "name": "get_weather"}},
    "allowed": {
        **ASKED,
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    },
    "a call or a schema": {
        **ASKED,
        "text": {"format": {"type": "json_schema", "name": "person", "schema": PERSON}},
    },
    "an object": {**SUM, "text": {"format": {"type": "json_object"}}},
    "a schema": {**SUM, "text": {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}},
    "logprobs": {**SUM, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "metadata": {**SUM, "metadata": {"a": "b"}, "store": False, "user": "u"},
}


def create(client: Client, body: Body) -> Body:
    response = client.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    created: Body = response.json()
    Response.model_validate(created, strict=True)
    return created


def stream(client: Client, body: Body) -> list[Body]:
    response = client.post("/v1/responses", {**body, "stream": True})
    assert response.status_code == 200, response.text
    return validated(frames(response.text))


def validated(texts: Sequence[str]) -> list[Body]:
    events = [json.loads(text) for text in texts]
    for i, event in enumerate(events):
        EVENTS.validate_python(event)
        assert event["sequence_number"] == i
    return events


def joined(events: Sequence[Body]) -> list[Body]:
    """The output as a client joins it from deltas."""
    items: list[Body] = []
    for event in json.loads(json.dumps(events)):
        kind = event["type"]
        if kind == "response.output_item.added":
            items.append(event["item"])
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"] = [event["part"]]
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            (part,) = items[event["output_index"]]["content"]
            part["text"] += event["delta"]
            if "logprobs" in event:
                part["logprobs"] += event["logprobs"]
        elif kind == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
            assert items[event["output_index"]] == event["item"]
    return items


def plain(output: Sequence[Body]) -> list[Body]:
    """Items without ids."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


def text_of(response: Body) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


@pytest.mark.parametrize("case", CASES)
def test_a_stream_joins_to_the_whole_response(client: Client, case: str) -> None:
    whole, events = create(client, CASES[case]), stream(client, CASES[case])
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"]["output"] == joined(events)
    assert plain(joined(events)) == plain(whole["output"])
    assert whole["output"]
    for name in ("status", "incomplete_details", "metadata", "tools", "text", "store"):
        assert events[-1]["response"][name] == whole[name], name


def test_the_answer_is_the_model_s(client: Client, demo: slm.Model) -> None:
    question = [{"role": "user", "content": SUM["input"]}]
    expected = demo.generate(question, slm.Sampling(temperature=0, max_tokens=100))
    response = create(client, SUM)
    assert text_of(response) == expected.text
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert response["status"] == "completed" and response["model"] == "demo"


def test_how_a_response_ends(client: Client) -> None:
    cut = create(client, CASES["cut"])
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][-1]["status"] == "incomplete"
    reasoning = create(client, CASES["reasoning"])
    assert [item["type"] for item in reasoning["output"]] == ["reasoning", "message"]
    assert 0 < reasoning["usage"]["output_tokens_details"]["reasoning_tokens"] < reasoning["usage"]["output_tokens"]
    jsonschema.validate(json.loads(text_of(create(client, CASES["a schema"]))), PERSON)
    (message,) = create(client, CASES["logprobs"])["output"]
    (part,) = message["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"]
    assert all(len(each["top_logprobs"]) == 2 for each in part["logprobs"])


def test_a_tool_is_called_and_its_result_used(client: Client) -> None:
    """The prompt with the result has the tokens of the same conversation in chat completions."""
    first = create(client, ASKED)
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Rome"})
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny, 30 degrees."}
    answer = create(client, {**ASKED, "previous_response_id": first["id"], "input": [result]})
    function = {"name": call["name"], "arguments": call["arguments"]}
    calls = [{"id": call["call_id"], "type": "function", "function": function}]
    same = client.chat(
        messages=[
            {"role": "user", "content": ASKED["input"]},
            {"role": "assistant", "content": text_of(first), "tool_calls": calls},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "Sunny, 30 degrees."},
        ],
        tools=[WEATHER],
    )
    assert text_of(answer) == same["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize("case", ["text", "instructions", "reasoning", "a call", "this call"])
def test_input_tokens_counts_the_prompt(client: Client, case: str) -> None:
    prompt = {name: value for name, value in CASES[case].items() if name not in ("max_output_tokens", "temperature")}
    first = create(client, CASES[case])
    for body in (prompt, {"input": "Why?", "previous_response_id": first["id"]}):
        counted = client.post("/v1/responses/input_tokens", body).json()
        expected = create(client, {**body, "max_output_tokens": 1})["usage"]["input_tokens"]
        assert counted == {"object": "response.input_tokens", "input_tokens": expected}


def test_branches_share_their_beginning(client: Client) -> None:
    """Each continues the same response, whose tokens are not computed again."""
    first = create(client, {**SUM, "input": "Tell me about the number seven, which I like most."})
    branches = [{**SUM, "previous_response_id": first["id"], "input": text} for text in ("Why?", "And eight?", "Why?")]
    responses = [create(client, body) for body in branches]
    n_first = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    for response in responses:
        assert response["usage"]["input_tokens_details"]["cached_tokens"] >= n_first - 1
    assert text_of(responses[0]) == text_of(responses[2])
    third = create(client, {**SUM, "previous_response_id": responses[1]["id"], "input": "Go on."})
    assert third["usage"]["input_tokens"] > responses[1]["usage"]["input_tokens"]


def test_instructions_are_not_inherited(client: Client) -> None:
    first = create(client, CASES["instructions"])
    more = {**SUM, "previous_response_id": first["id"], "input": "Go on."}
    without, again = create(client, more), create(client, {**more, "instructions": "Be short."})
    assert without["usage"]["input_tokens"] < again["usage"]["input_tokens"]


def test_stored_responses(client: Client) -> None:
    body = {**SUM, "input": [{"role": "user", "content": text} for text in ("One.", "Two.", "Three.")]}
    response = create(client, body)
    path = f"/v1/responses/{response['id']}"
    assert client.get(path).json() == response
    items = client.get(f"{path}/input_items?order=asc&limit=2").json()
    ResponseItemList.model_validate(items, strict=True)
    assert [item["content"][0]["text"] for item in items["data"]] == ["One.", "Two."]
    assert items["has_more"]
    rest = client.get(f"{path}/input_items?order=asc&after={items['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["Three."] and not rest["has_more"]
    newest = client.get(f"{path}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in newest] == ["Three.", "Two.", "One."]
    assert client.call("DELETE", path).json() == {"id": response["id"], "object": "response", "deleted": True}
    for response_after in (
        client.get(path),
        client.post("/v1/responses", {**SUM, "previous_response_id": response["id"]}),
    ):
        assert response_after.status_code == 404
    assert client.get(f"/v1/responses/{create(client, {**SUM, 'store': False})['id']}").status_code == 404


def test_only_the_last_responses_are_kept(client: Client) -> None:
    from slm_core.server.response_store import ResponseStore, StoredResponse

    store = ResponseStore()
    for i in range(MOST_RESPONSES + 1):
        store.put(StoredResponse(f"resp_{i}", "", {"status": "completed", "output": []}, [], []))
        store.get("resp_0", "")
    with pytest.raises(slm.SlmError, match="there is no response 'resp_1'"):
        store.get("resp_1", "")
    store.get("resp_2", "")
    with pytest.raises(slm.SlmError, match="there is no response"):
        store.get("resp_2", "another client")
    for i in range(3):
        store.put(StoredResponse(f"large_{i}", "", {"text": "x" * (30 << 20)}, [], []))
    store.get("large_2", "")
    with pytest.raises(slm.SlmError, match="there is no response"):
        store.get("large_0", "")


def together(client: Client, work: Callable[[httpx.AsyncClient], Any]) -> Any:
    """Several requests in one event loop: a background response continues between them."""

    async def main() -> Any:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            return await work(http)

    return client.run(main())


async def until_over(http: httpx.AsyncClient, path: str) -> Body:
    while (response := (await http.get(path)).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    ended: Body = response
    return ended


def test_a_background_response_is_the_same(client: Client) -> None:
    async def work(http: httpx.AsyncClient) -> tuple[Body, Body]:
        begun = (await http.post("/v1/responses", json={**SUM, "background": True})).json()
        assert begun["status"] in ("queued", "in_progress")
        return begun, await until_over(http, f"/v1/responses/{begun['id']}")

    begun, over = together(client, work)
    Response.model_validate(begun, strict=True)
    Response.model_validate(over, strict=True)
    assert plain(over["output"]) == plain(create(client, SUM)["output"])


def test_the_stream_of_a_background_response_is_resumed(client: Client) -> None:
    async def work(http: httpx.AsyncClient) -> list[list[Body]]:
        begun = (await http.post("/v1/responses", json={**SUM, "background": True})).json()
        path = f"/v1/responses/{begun['id']}?stream=true"
        texts = [(await http.get(f"{path}{more}")).text for more in ("", "&starting_after=4", "&starting_after=0")]
        return [[json.loads(frame) for frame in frames(text)] for text in texts]

    whole, rest, almost = together(client, work)
    validated([json.dumps(event) for event in whole])
    assert rest == whole[5:] and almost == whole[1:]
    assert whole[-1]["type"] == "response.completed"


def test_a_background_response_is_cancelled(client: Client) -> None:
    """No token is computed for it afterwards."""
    endless = {**SUM, "background": True, "max_output_tokens": 1500, "logit_bias": {"2": -100}}

    async def work(http: httpx.AsyncClient) -> tuple[Body, Body]:
        begun = (await http.post("/v1/responses", json=endless)).json()
        cancelled = (await http.post(f"/v1/responses/{begun['id']}/cancel")).json()
        again = await http.post(f"/v1/responses/{begun['id']}/cancel")
        assert again.json() == cancelled
        return cancelled, (await http.post("/v1/responses", json={**SUM, "previous_response_id": begun["id"]})).json()

    registry = client.app.state.registry
    n_before = sum(running.engine.stats().n_cancelled for running in registry.running)
    cancelled, refused = together(client, work)
    assert cancelled["status"] == "cancelled"
    assert "cannot be continued" in refused["error"]["message"]
    (running,) = registry.running
    deadline = time.monotonic() + 60
    # The engine's thread may not have begun it yet, or its running step ends first.
    stats = running.engine.stats()
    while (stats.n_cancelled == n_before or stats.n_active) and time.monotonic() < deadline:
        time.sleep(0.01)
        stats = running.engine.stats()
    assert (stats.n_cancelled, stats.n_active) == (n_before + 1, 0)


def test_the_openai_client(client: Client) -> None:
    class Sum(BaseModel):
        a: int
        b: int

    async def work(http: httpx.AsyncClient) -> None:
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="any",
            max_retries=0,
            http_client=http,
            _strict_response_validation=True,
        ) as api:
            whole = await api.responses.create(model="demo", temperature=0, input="What is 12 + 30?")
            async with api.responses.stream(model="demo", temperature=0, input="What is 12 + 30?") as events:
                async for _ in events:
                    pass
                assert (await events.get_final_response()).output_text == whole.output_text
            parsed = await api.responses.parse(
                model="demo", temperature=0, input="What is 12 + 30?", text_format=Sum, max_output_tokens=200
            )
            assert isinstance(parsed.output_parsed, Sum)
            assert (await api.responses.retrieve(whole.id)).output_text == whole.output_text
            assert [item.type async for item in api.responses.input_items.list(whole.id)] == ["message"]
            await api.responses.delete(whole.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(whole.id)

    together(client, work)


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"unknown": 1}, 400, "unknown is not supported"),
        ({"conversation": "x"}, 400, "conversation is not supported"),
        ({"input": []}, 400, "input is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]}, 400, "JSON text"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "needs tools"),
        ({"top_logprobs": 2}, 400, "top_logprobs needs include"),
        ({"background": True, "store": False}, 400, "has to be stored"),
        ({"stream_options": {"include_obfuscation": False}}, 400, "for streams"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"previous_response_id": "resp_none"}, 404, "there is no response"),
        ({"input": "word " * 5000}, 400, r"has \d+ tokens.*room for 2048"),
        ({"input": "word " * 5000, "background": True}, 400, r"has \d+ tokens.*room for 2048"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]}, 400, "tool_choice"),
        (
            {
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
                "tools": [TOOL],
            },
            400,
            "allowed_tools has 'x' .accepted: get_weather",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_refused(client: Client, changes: Body, status: int, message: str) -> None:
    response = client.post("/v1/responses", {**SUM, **changes})
    assert response.status_code == status, response.text
    assert re.search(message, response.json()["error"]["message"]), response.text


def test_what_a_response_cannot_do(client: Client) -> None:
    path = f"/v1/responses/{create(client, SUM)['id']}"
    for method, rest in (
        ("POST", "/cancel"),
        ("GET", "?stream=true"),
        ("GET", "?starting_after=1"),
        ("GET", "/input_items?limit=0"),
        ("GET", "/input_items?after=none"),
        ("GET", "/input_items?order=up"),
    ):
        assert client.call(method, path + rest).status_code == 400, rest


def test_an_error_after_the_first_byte_is_a_failed_response(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a truncated answer would look complete."""
    from slm_core.server import responses_events

    def fail(*_: object) -> None:
        raise slm.errors.DecodeFailed("a fault")

    monkeypatch.setattr(responses_events, "_usage", fail)
    events = stream(client, SUM)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
