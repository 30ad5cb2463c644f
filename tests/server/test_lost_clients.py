"""A lost client is a cancel, streaming or not; an error after the first byte is an error event."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from io import StringIO
from typing import Any

import httpx
import pytest

import slm_core as slm
from http_server import serving
from scripted import ByteVocab, ScriptedContext, TagFormatter
from server.conftest import Client, frames
from slm_core.engine import Engine, EngineOptions
from slm_core.errors import BackendCrashed, DecodeFailed
from slm_core.server import ServedModel, ServerOptions, create_app

WAIT_S = 60
MESSAGE = {"messages": [{"role": "user", "content": "x"}]}


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
    """A server over a scripted context, in whose decodes a test may count, block or fail. Answers are endless."""

    def __init__(self, info: Any, n_ctx: int = 100_000, options: ServerOptions | None = None) -> None:
        self.context = ScriptedContext(lambda _: ord("x"), n_ctx=n_ctx, n_seq_max=8)
        self.model = StubModel(self.context, info)
        self.log = StringIO()
        served = ServedModel("stub", lambda: self.model)  # type: ignore[arg-type,return-value]
        self.app = create_app([served], options, log=self.log)
        self.client = Client(self.app, self.log)

    @property
    def engine(self) -> Engine:
        (running,) = self.app.state.registry.running
        return running.engine

    async def lose(
        self, body: dict[str, Any], when: asyncio.Event, path: str = "/v1/chat/completions"
    ) -> list[dict[str, Any]]:
        """Call with a client that closes the connection after ``when``; returns what the server sent.

        A client of a stream waits for the first byte, too: one that is lost before has no status 200.
        """
        sent: list[dict[str, Any]] = []
        answered = asyncio.Event()
        content, first = json.dumps(body).encode(), True

        async def receive() -> dict[str, Any]:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": content, "more_body": False}
            await when.wait()
            if body.get("stream"):
                await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            answered.set()

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80),
        }  # fmt: skip
        await self.app(scope, receive, send)
        return sent


@pytest.fixture
def info(demo: slm.Model) -> Any:
    return replace(demo.info, fingerprint="scripted")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGE,
    "/v1/completions": {"prompt": "x", "max_tokens": 90_000},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**MESSAGE, "max_tokens": 90_000},
    "/api/chat": {**MESSAGE, "model": "stub"},
    "/api/generate": {"prompt": "x", "model": "stub"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_client_is_a_cancel(info: Any, path: str, *, stream: bool) -> None:
    """Otherwise the engine would generate for nobody."""
    fixture = Fixture(info)

    async def main() -> int:
        loop, is_lost = asyncio.get_running_loop(), asyncio.Event()
        decodes = 0

        def count() -> None:
            nonlocal decodes
            decodes += 1
            if decodes == 20:
                loop.call_soon_threadsafe(is_lost.set)

        fixture.context.on_decode = count
        await fixture.lose({**BODIES[path], "stream": stream}, is_lost, path)
        cancelled = threading.Event()
        while fixture.engine.stats().requests:  # the running step ends
            await asyncio.to_thread(cancelled.wait, 0.001)
        return decodes

    n_decoded = asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert fixture.engine.stats().n_active == 0
    assert n_decoded < 10_000
    asyncio.run(fixture.app.state.registry.close())
    (line,) = [json.loads(line) for line in fixture.log.getvalue().splitlines()]
    assert line["status"] == (200 if stream else 499)


def test_a_client_that_stops_reading_is_lost(info: Any, capfd: pytest.CaptureFixture[str]) -> None:
    fixture = Fixture(info, options=ServerOptions(send_timeout_s=0.3))
    with serving(fixture.app, send_buffer=4096) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = url.removeprefix("http://").partition(":")
        client.connect((host, int(port)))
        body = json.dumps({**MESSAGE, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        deadline = time.monotonic() + WAIT_S
        while not fixture.log.getvalue():  # the line of the request is written at its end
            assert time.monotonic() < deadline
            time.sleep(0.05)
        line = json.loads(fixture.log.getvalue())
        assert line["error"] == "client_reads_nothing"
        assert line["completion_tokens"] < 90_000, "it was cancelled before its end"
        while fixture.engine.stats().requests:  # the engine cancels between two steps
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.settimeout(WAIT_S)
        while client.recv(1 << 16):  # read what was sent before the connection was closed
            pass
    assert capfd.readouterr().err == "", "no traceback of the web server"


def test_an_error_after_the_first_byte_is_an_error_event(info: Any) -> None:
    """Otherwise a truncated answer would look complete."""
    fixture = Fixture(info)
    decodes = 0

    def fail() -> None:
        nonlocal decodes
        decodes += 1
        if decodes > 20:
            raise DecodeFailed("the prompt was: x")

    fixture.context.on_decode = fail
    response = fixture.client.post("/v1/chat/completions", {**MESSAGE, "stream": True})
    whole = fixture.client.post("/v1/chat/completions", MESSAGE)
    fixture.client.run(fixture.app.state.registry.close())
    assert response.status_code == 200
    *chunks, last = frames(response.text)
    assert "[DONE]" not in response.text
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in json.loads(chunk)["choices"])
    assert json.loads(last)["error"]["type"] == "server_error"
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
    assert "the prompt was" not in response.text + whole.text + fixture.log.getvalue()
    assert "DecodeFailed" in fixture.log.getvalue()


def test_health_is_not_ok_while_the_engine_hangs(info: Any) -> None:
    fixture = Fixture(info, options=ServerOptions(hang_s=0.05))
    hangs, may_continue = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert may_continue.wait(WAIT_S)

    async def main() -> None:
        transport = httpx.ASGITransport(fixture.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=WAIT_S) as http:

            async def answer() -> int:
                body = {**MESSAGE, "max_tokens": 3}
                return (await http.post("/v1/chat/completions", json=body)).status_code

            async def health() -> tuple[int, dict[str, str]]:
                response = await http.get("/health")
                return response.status_code, response.json()["models"]

            assert await answer() == 200
            assert await health() == (200, {"stub": "ok"})
            fixture.context.on_decode = hang
            request = asyncio.create_task(answer())
            await asyncio.to_thread(hangs.wait, WAIT_S)
            while (await health())[0] == 200:
                await asyncio.sleep(0.01)
            assert await health() == (503, {"stub": "hangs"})
            may_continue.set()
            assert await request == 200
            assert await health() == (200, {"stub": "ok"})
        await fixture.app.state.registry.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
