"""A lost client is a cancel, streaming or not; an error after the first byte is an error event."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

import slm_core as slm
from scripted import ByteVocab, ScriptedContext, TagFormatter
from server.conftest import Client, frames
from slm_core.engine import Engine, EngineOptions
from slm_core.errors import BackendCrashed, DecodeFailed
from slm_core.server import ServedModel, create_app

WAIT_S = 60
ENDLESS = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "logit_bias": {"257": -1e9}}


class StubModel:
    """A model whose engine runs over a scripted context."""

    def __init__(self, context: ScriptedContext, info: Any) -> None:
        self.info = info
        self.vocab = ByteVocab()
        self.formatter = TagFormatter()
        self.context = context
        self.crashed: Future[BackendCrashed] | None = None

    def engine(self, **_: object) -> Engine:
        return Engine(self.context, self.vocab, lambda: self.formatter, EngineOptions())  # type: ignore[arg-type,return-value]

    def close(self) -> None: ...


class Fixture:
    """A server over a context that says after how many decodes what happens."""

    def __init__(self, info: Any, n_ctx: int = 100_000) -> None:
        self.context = ScriptedContext(n_ctx=n_ctx, n_seq_max=8)
        self.model = StubModel(self.context, info)
        self.log = StringIO()
        self.app = create_app([ServedModel("stub", lambda: self.model)], log=self.log)  # type: ignore[arg-type,return-value]
        self.client = Client(self.app, self.log)

    @property
    def engine(self) -> Engine:
        (running,) = self.app.state.registry.running
        return running.engine

    async def lose(self, body: dict[str, Any], when: asyncio.Event) -> list[dict[str, Any]]:
        """Call with a client that closes the connection after ``when``; returns what the server sent."""
        sent: list[dict[str, Any]] = []
        content, first = json.dumps(body).encode(), True

        async def receive() -> dict[str, Any]:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": content, "more_body": False}
            await when.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80),
        }  # fmt: skip
        await self.app(scope, receive, send)
        return sent


@pytest.fixture
def info(demo: slm.Model) -> Any:
    return replace(demo.info, fingerprint="scripted")


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_client_is_a_cancel(info: Any, stream: bool) -> None:
    """[generates for nobody]"""
    fixture = Fixture(info)

    async def main() -> int:
        loop, lost = asyncio.get_running_loop(), asyncio.Event()
        decodes = 0

        def count() -> None:
            nonlocal decodes
            decodes += 1
            if decodes == 20:
                loop.call_soon_threadsafe(lost.set)

        fixture.context.on_decode = count
        await fixture.lose({**ENDLESS, "stream": stream}, lost)
        cancelled = threading.Event()
        while fixture.engine.stats().n_active:  # the running step ends
            await asyncio.to_thread(cancelled.wait, 0.001)
        return decodes

    n_decoded = asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert fixture.engine.stats().requests == ()
    assert n_decoded < 10_000
    asyncio.run(fixture.app.state.registry.close())
    (line,) = [json.loads(line) for line in fixture.log.getvalue().splitlines()]
    assert line["status"] == (200 if stream else 499)


def test_an_error_after_the_first_byte_is_an_error_event(info: Any) -> None:
    """[truncated looks complete]"""
    fixture = Fixture(info)
    decodes = 0

    def fail() -> None:
        nonlocal decodes
        decodes += 1
        if decodes > 20:
            raise DecodeFailed("the prompt was: x")

    fixture.context.on_decode = fail
    response = fixture.client.post("/v1/chat/completions", {**ENDLESS, "stream": True})
    whole = fixture.client.post("/v1/chat/completions", ENDLESS)
    fixture.client.run(fixture.app.state.registry.close())
    assert response.status_code == 200
    *chunks, last = frames(response.text)
    assert "[DONE]" not in response.text
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in json.loads(chunk)["choices"])
    assert json.loads(last)["error"]["type"] == "server_error"
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
    assert "the prompt was" not in response.text + whole.text + fixture.log.getvalue()
    assert "DecodeFailed" in fixture.log.getvalue()
