"""A server stops while answers run: answers that take longer than the grace period end with an error."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import slm_core as slm
from http_server import serving
from server.conftest import frames
from server.test_lost_clients import BODIES, MESSAGE, WAIT_S, Fixture
from server.test_models import Models
from slm_core.errors import EngineClosed
from slm_core.server import ServerOptions
from slm_core.server.session_store import SessionStore


@pytest.fixture(scope="module")
def info(demo: slm.Model) -> Any:
    return replace(demo.info, fingerprint="scripted")


def _all_begun(fixture: Fixture, n: int) -> bool:
    running = fixture.app.state.registry.running
    return bool(running) and running[0].engine.stats().n_requests >= n


def test_answers_that_take_longer_than_the_grace_period_end_with_an_error(info: Any) -> None:
    """In the form of each API: no stream is cut off, and no answer is a status 500."""
    fixture = Fixture(info, options=ServerOptions(grace_s=0.1))
    answers: dict[tuple[str, bool], Future[httpx.Response]] = {}
    with ThreadPoolExecutor(2 * len(BODIES)) as pool, serving(fixture.app) as url:
        for path, body in BODIES.items():
            for stream in (False, True):
                sent = {**body, "stream": stream}
                answers[path, stream] = pool.submit(httpx.post, url + path, json=sent, timeout=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while not _all_begun(fixture, len(answers)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for (path, stream), future in answers.items():
        answer = future.result()
        assert answer.status_code == (200 if stream else 503), path
        lines = answer.text.splitlines() if path.startswith("/api") else frames(answer.text)
        last = json.loads(lines[-1] if stream else answer.text)
        assert "the server stops" in json.dumps(last), (path, stream)
    assert fixture.app.state.registry.running == ()


@pytest.mark.parametrize("keep_partial", [False, True])
def test_a_turn_that_is_cut_keeps_what_was_said(info: Any, tmp_path: Path, *, keep_partial: bool) -> None:
    """The session on the disk ends with the text that the client has read, if it asked for that."""
    fixture = Fixture(info, options=ServerOptions(grace_s=0.1, sessions_dir=tmp_path))
    with ThreadPoolExecutor(1) as pool, serving(fixture.app) as url:
        session = httpx.post(f"{url}/v1/sessions", json={}).json()["id"]
        body = {**MESSAGE, "stream": True, "keep_partial": keep_partial}
        turn = pool.submit(httpx.post, f"{url}/v1/sessions/{session}/messages", json=body, timeout=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while not _all_begun(fixture, 1) or fixture.engine.stats().completion_tokens < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    *chunks, last = map(json.loads, frames(turn.result().text))
    assert last["error"]["code"] == "unavailable"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    (stored,) = SessionStore(tmp_path).all
    answered = [("user", "x"), ("assistant", text)]
    assert [(each.role, each.content) for each in stored.messages] == (answered if keep_partial else [])


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_server_that_stops_loads_no_model(info: Any, *, is_loading: bool) -> None:
    """A request that waits for its model does not load it after all models were closed."""
    models = Models("a", info=info)
    load, load_began, is_closed = models.load, threading.Event(), threading.Event()

    def slowly(name: str) -> Any:
        load_began.set()
        assert is_closed.wait(WAIT_S)
        return load(name)

    models.load = slowly  # type: ignore[method-assign]

    async def ask() -> None:
        async with models.registry.lease("a"):
            pass

    async def work() -> None:
        if not is_loading:
            await models.registry.close()
        asking = asyncio.create_task(ask())
        if is_loading:
            await asyncio.to_thread(load_began.wait, WAIT_S)
            await models.registry.close()
        is_closed.set()
        with pytest.raises(EngineClosed, match="the server stops"):
            await asking

    assert models.run(work) == (["load a", "close a"] if is_loading else [])
    assert models.registry.running == ()
