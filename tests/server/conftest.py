"""Fixtures for the server: it is called without a socket, in the thread of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from io import StringIO
from typing import Any

import httpx
import pytest

import slm_core as slm
from slm_core.server import EngineSettings, ServedModel, ServerOptions, create_app

Body = dict[str, Any]
QUESTION: Body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}


class Client:
    """Calls an application; each call runs an event loop of its own.

    Args:
        app: the application.
        log: its log.
    """

    def __init__(self, app: Any, log: StringIO) -> None:
        self.app = app
        self.log = log

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                return await client.request(method, path, **options)

        return self.run(send())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return self.call("POST", path, json=body, headers=headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.call("GET", path, headers=headers)

    def chat(self, **fields: Any) -> Body:
        """The body of a successful answer to ``QUESTION``, changed by ``fields``."""
        response = self.post("/v1/chat/completions", {**QUESTION, **fields})
        assert response.status_code == 200, response.text
        body: Body = response.json()
        return body

    def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Body]:
        """The chunks of a complete stream."""
        response = self.post(path, {**QUESTION, **fields, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = frames(response.text)
        assert chunks[-1] == "[DONE]"
        return [json.loads(chunk) for chunk in chunks[:-1]]


def frames(text: str) -> list[str]:
    """The data of the frames of an event stream, without pings."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


@pytest.fixture(scope="session")
def demo() -> Iterator[slm.Model]:
    """The demo model."""
    with slm.load(slm.demo_model_path()) as model:
        yield model


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """A client of a server with the demo model, called "demo" and "gpt-test"."""
    log = StringIO()
    served = ServedModel(
        "demo", lambda: slm.load(slm.demo_model_path()), aliases=("gpt-test",), settings=EngineSettings(n_ctx=2048)
    )
    client = Client(create_app([served], log=log), log)
    yield client
    client.run(client.app.state.registry.close())


@pytest.fixture(scope="session")
def client_with() -> Callable[..., Client]:
    """A function that makes a client of a server with options; its model is never loaded."""

    def never() -> slm.Model:
        raise AssertionError("no request of this test may reach the model")

    def make(**options: Any) -> Client:
        log = StringIO()
        return Client(create_app([ServedModel("none", never)], ServerOptions(**options), log=log), log)

    return make
