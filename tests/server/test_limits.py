"""Limits of keys: status 429, with the limit and when to try again."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest

import slm_core as slm
from server.conftest import Client
from server.test_lost_clients import MESSAGE, WAIT_S, Fixture
from slm_core.errors import InvalidOption
from slm_core.server import ApiKey, ServedModel, ServerOptions, create_app
from slm_core.server.errors import ApiError
from slm_core.server.keys import Limits, read_keys

KEYS = (
    ApiKey("r", "rate", rate=3),
    ApiKey("q", "requests", requests=2),
    ApiKey("c", "cells", cells=300),
    ApiKey("f", "free"),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time, in a list that a test changes."""
    now = [1_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    yield now


def test_the_rate_of_a_key(clock: list[float]) -> None:
    """Three requests in any minute; a refused request does not count."""
    limits = Limits(KEYS, 100)
    for seconds in (0, 10, 20):
        clock[0] = 1_000_000.0 + seconds
        limits.count("rate")
    for seconds, wait in ((20, 40), (59, 1)):
        clock[0] = 1_000_000.0 + seconds
        with pytest.raises(ApiError, match="the key may send 3 requests in a minute") as refused:
            limits.count("rate")
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, str(wait))
    for _ in range(10):
        limits.count("free")
    clock[0] = 1_000_000.0 + 61
    limits.count("rate")
    with pytest.raises(ApiError):
        limits.count("rate")


def test_requests_at_a_time() -> None:
    limits = Limits(KEYS, 4)
    with limits.place("requests"), limits.place("requests"):
        with pytest.raises(ApiError, match="the key may have 2 requests at a time"), limits.place("requests"):
            pass
        with limits.place("free"), limits.place("free"):
            with pytest.raises(ApiError, match="the server answers 4 requests at a time") as refused:
                limits.place("rate").__enter__()
            assert refused.value.status == 429
    with limits.place("requests"):
        pass


def test_cells() -> None:
    limits = Limits(KEYS, 4)
    with limits.cells("cells", 100, 2, 50):
        with pytest.raises(ApiError, match="300 cells, and 200 of them are in use") as refused:
            limits.cells("cells", 100, 1, 1).__enter__()
        assert refused.value.status == 429
        with limits.cells("cells", 50, 1, 50), limits.cells("free", 10_000, 1, None):
            pass
    with limits.cells("cells", 100, 2, 100):
        pass
    for arguments, message in (((100, 1, None), "max_tokens is missing"), ((100, 3, 100), "needs 400 cells")):
        with pytest.raises(ApiError, match=message) as error:
            limits.cells("cells", *arguments).__enter__()  # type: ignore[arg-type]
        assert error.value.status == 400


@pytest.mark.parametrize(
    ("key", "n_prompts", "message"),
    [
        ("q", 3, "the request counts as 3 requests, one for each answer, but the key may have 2 requests at a time"),
        ("f", 5, "the request counts as 5 requests, one for each answer, but the server answers 4 requests at a time"),
        ("c", 3, "the request needs 303 cells (prompt and max_tokens), but the key may use 300"),
    ],
)
def test_prompts_that_never_fit_together_are_invalid(demo: slm.Model, key: str, n_prompts: int, message: str) -> None:
    """Trying again later would not help, so the status is 400. With one prompt less, the request is answered."""
    fixture = Fixture(demo.info, options=ServerOptions(keys=KEYS, max_requests=4))

    def ask(n: int) -> httpx.Response:
        body = {"prompt": ["x"] * n, "max_tokens": 100}
        return fixture.client.post("/v1/completions", body, authorization=f"Bearer {key}")

    refused = ask(n_prompts)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
    assert ask(n_prompts - 1).status_code == 200
    fixture.client.run(fixture.app.state.registry.close())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**MESSAGE, "n": 4}),
        ("/v1/chat/completions", {**MESSAGE, "n": 4, "stream": True}),
        ("/v1/completions", {"prompt": ["x"] * 4}),
        ("/v1/completions", {"prompt": ["x"] * 2, "n": 2}),
        ("/v1/completions", {"prompt": "x", "best_of": 4}),
    ],
)
def test_each_answer_counts_as_a_request(demo: slm.Model, path: str, body: dict[str, Any]) -> None:
    """Otherwise 128 answers would count as one request."""
    fixture = Fixture(demo.info, options=ServerOptions(keys=KEYS, max_requests=4))
    short = {**body, "max_tokens": 1}

    def status(key: str, **fields: Any) -> int:
        return fixture.client.post(path, {**short, **fields}, authorization=f"Bearer {key}").status_code

    assert status("q") == 400
    assert status("f") == 200
    limits: Limits = fixture.app.state.limits
    with limits.place("rate"):
        assert status("f") == 429
    assert status("f") == 200, "a refused request gives all its places back"
    fixture.client.run(fixture.app.state.registry.close())


def test_places_are_taken_together() -> None:
    """Otherwise two lists of prompts could take half of the places each, and both be refused."""
    limits = Limits(KEYS, 4)
    with limits.place("free", 3), pytest.raises(ApiError), limits.place("rate", 2):
        pass
    with limits.place("free", 4):
        pass


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
)
def test_embeddings_and_rankings_count_as_requests(client: Client, path: str, body: dict[str, Any]) -> None:
    """Otherwise texts of any number of clients would wait."""
    limits: Limits = client.app.state.limits
    with limits.place("", 255):
        assert client.post(path, body).status_code == 200
    with limits.place("", 256):
        refused = client.post(path, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert client.post(path, body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", MESSAGE),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", MESSAGE),
    ],
)
def test_max_priority_limits_the_priority_of_requests(demo: slm.Model, path: str, body: dict[str, Any]) -> None:
    """Otherwise any client could put itself first."""
    keys = (ApiKey("v", "important", priority=5), ApiKey("l", "late", priority=-1), "k")
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fixture = Fixture(demo.info, options=ServerOptions(keys=keys, max_priority=2))

    def answer(key: str, priority: float | None) -> tuple[int, str]:
        fields = {**body, length: 1, "priority": priority}
        response = fixture.client.post(path, fields, authorization=f"Bearer {key}")
        message = "" if response.status_code == 200 else response.json()["error"]["message"]
        return response.status_code, message

    assert [answer(*each)[0] for each in (("v", 5), ("l", -1), ("l", None), ("k", 2), ("k", -9))] == [200] * 5
    for key, priority, highest in (("v", 5.5, 5), ("l", 0, -1), ("k", 3, 2)):
        message = f"priority is {priority}, but requests of the key may ask for at most {highest}"
        assert answer(key, priority) == (400, message)
    fixture.client.run(fixture.app.state.registry.close())


def test_a_request_without_a_priority_has_the_default_of_its_key() -> None:
    limits = Limits((ApiKey("v", "important", priority=5), ApiKey("l", "late", priority=-1)), 4)
    assert [limits.priority(name, None) for name in ("important", "late", "")] == [0, -1, 0]
    assert limits.priority("late", -3) == -3


def test_priorities_above_0_are_refused_by_default(client: Client) -> None:
    body = {**MESSAGE, "max_tokens": 1}
    refused = client.post("/v1/chat/completions", {**body, "priority": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert client.post("/v1/chat/completions", {**body, "priority": -1}).status_code == 200


def test_requests_are_refused_and_give_their_place_back(demo: slm.Model) -> None:
    """Complete, refused, failed and lost requests all do."""
    fixture = Fixture(demo.info)
    options = ServerOptions(keys=KEYS)
    fixture.app = create_app([ServedModel("stub", lambda: fixture.model)], options, log=StringIO())  # type: ignore[arg-type,return-value]
    client = Client(fixture.app, fixture.log)
    short = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}

    def status(key: str, **fields: Any) -> int:
        return client.post("/v1/chat/completions", {**short, **fields}, authorization=f"Bearer {key}").status_code

    async def main() -> None:
        transport = httpx.ASGITransport(fixture.app)
        headers = {"authorization": "Bearer q"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=WAIT_S, headers=headers
        ) as http:
            endless = [asyncio.create_task(http.post("/v1/chat/completions", json=MESSAGE)) for _ in range(2)]
            while not fixture.app.state.registry.running or fixture.engine.stats().n_active < 2:
                await asyncio.sleep(0.01)
            for path, error in (("/v1/chat/completions", "rate_limit_error"), ("/v1/messages", "rate_limit_error")):
                refused = await http.post(path, json=short)
                assert (refused.status_code, refused.json()["error"]["type"]) == (429, error)
                assert int(refused.headers["retry-after"]) >= 1
            for task in endless:
                task.cancel()
            await asyncio.gather(*endless, return_exceptions=True)
            assert (await http.post("/v1/chat/completions", json=short)).status_code == 200

    client.run(main())
    assert [status("r") for _ in range(4)] == [200, 200, 200, 429]
    assert [status("r", temperature=-1), status("wrong")] == [429, 401]
    assert [status("c"), status("c", max_tokens=None), status("c", max_tokens=1000), status("c")] == [
        200,
        400,
        400,
        200,
    ]
    assert [status("q", temperature=-1) for _ in range(3)] == [400] * 3
    assert status("q") == 200
    client.run(fixture.app.state.registry.close())


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    text = '\ufeff[[key]]\nkey = "a"\nname = "alice"\nrate = 60\npriority = -1\n\n[[key]]\nkey = "b"\ncells = 8192\n'
    path.write_text(text, "utf-8")  # with a byte order mark, as Windows programs write it
    first, second = read_keys(path)
    assert first == ApiKey("a", "alice", rate=60, priority=-1)
    assert (second.cells, len(second.name)) == (8192, 12) and second.name != "b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[key]", "keys.toml: "),
        ("other = 1", "'other' .accepted: tables"),
        ("key = 1", "'key' .accepted: tables"),
        ('[[key]]\nname = "a"', "a table without key"),
        ('[[key]]\nkey = "a"\nlimit = 1', "'limit' .accepted: cells, key, name, priority, rate, requests"),
        ('[[key]]\nkey = "a"\npriority = inf', "priority=inf of the key .*accepted: a finite number"),
        ('[[key]]\nkey = "a"\npriority = true', "priority=True of the key"),
        ('[[key]]\nkey = "a"\nrate = 0', "rate=0 of the key"),
        ('[[key]]\nkey = "ä"', "not printable ASCII"),
        ("[[key]]\nkey = 7", "not printable ASCII"),
        ("", "keys.toml: the file has no keys"),
        ("key = []", "keys.toml: the file has no keys"),
    ],
)
def test_an_invalid_file_of_keys(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidOption, match=message):
        read_keys(path)
    with pytest.raises(InvalidOption, match="No such file"):
        read_keys(tmp_path / "none.toml")
    if os.name != "nt":
        device = tmp_path / "device"
        device.symlink_to(os.devnull)
        with pytest.raises(InvalidOption, match="not a regular file"):
            read_keys(device)


def test_names_are_distinct() -> None:
    with pytest.raises(InvalidOption, match="two keys have the name 'a'"):
        ServerOptions(keys=(ApiKey("1", "a"), ApiKey("2", "a")))


def test_keys_are_distinct() -> None:
    """Otherwise the limits of one name would apply to another."""
    with pytest.raises(InvalidOption, match=r"^'a' and 'b' have the same key$"):
        ServerOptions(keys=(ApiKey("1", "a"), ApiKey("1", "b")))
    with pytest.raises(InvalidOption, match=r"^'a' and '[0-9a-f]{12}' have the same key$"):
        ServerOptions(keys=(ApiKey("1", "a"), "1"))


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", None])
def test_the_highest_priority_is_a_number(value: object) -> None:
    with pytest.raises(InvalidOption, match=rf"^max_priority={value!r} \(accepted: a finite number\)$"):
        ServerOptions(max_priority=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "least", "optional"),
    [
        ("max_body_bytes", 1, False),
        ("max_requests", 1, False),
        ("memory_bytes", 1, True),
        ("ping_s", 0.001, False),
        ("send_timeout_s", 0.001, False),
        ("receive_timeout_s", 0.001, False),
        ("hang_s", 0.001, False),
        ("grace_s", 0, False),
        ("keep_alive_s", 0, True),
    ],
)
def test_numbers_are_checked(name: str, least: float, *, optional: bool) -> None:
    """Otherwise a server might send pings without a pause, or refuse every request."""
    ServerOptions(**{name: least})  # type: ignore[arg-type]
    for value in (least - 1, math.nan, math.inf, True, "1", *([] if optional else [None])):
        with pytest.raises(InvalidOption, match=rf"^{name}={value!r} \(accepted: .* from {least} on\)$"):
            ServerOptions(**{name: value})  # type: ignore[arg-type]
    if optional:
        ServerOptions(**{name: None})  # type: ignore[arg-type]
    if least == 1:
        with pytest.raises(InvalidOption, match=f"^{name}=1.5 .accepted: an integer"):
            ServerOptions(**{name: 1.5})  # type: ignore[arg-type]
