"""Several models: loading, unloading, the memory budget, and models that crash."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import anyio
import httpx
import pytest

import slm_core as slm
from scripted import ScriptedContext
from server.conftest import QUESTION, frames
from server.test_lost_clients import WAIT_S, Fixture, StubModel
from slm_core.engine import Engine
from slm_core.errors import InvalidModelFile, InvalidOption
from slm_core.isolation.model import IsolatedModel
from slm_core.server import ModelRegistry, ServedModel, create_app
from slm_core.server.errors import ApiError


class Models:
    """A registry of models over scripted contexts, which notes loads and closes."""

    def __init__(self, *names: str, info: Any, **options: Any) -> None:
        self.info = info
        self.notes: list[str] = []
        self.loaded: dict[str, StubModel] = {}
        self.now = 0.0
        served = [ServedModel(name, lambda name=name: self.load(name), n_bytes=10) for name in names]  # type: ignore[misc]
        self.registry = ModelRegistry(served, clock=lambda: self.now, **options)

    def load(self, name: str) -> Any:
        self.notes.append(f"load {name}")
        model = StubModel(ScriptedContext(n_ctx=1000, n_seq_max=4), self.info)
        model.close = lambda: self.notes.append(f"close {name}")  # type: ignore[method-assign]
        model.crashed = Future()
        self.loaded[name] = model
        return model

    def run(self, work: Callable[[], Awaitable[None]]) -> list[str]:
        async def main() -> None:
            with anyio.fail_after(WAIT_S):
                await work()

        try:
            asyncio.run(main())
            return list(self.notes)
        finally:
            asyncio.run(self.registry.close())


@pytest.fixture(scope="module")
def info(demo: slm.Model) -> Any:
    return demo.info


async def settled() -> None:
    """Let all tasks run until they wait for something else than the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_models_stay_loaded_without_a_budget(info: Any) -> None:
    models = Models("a", "b", info=info)

    async def work() -> None:
        for name in ("a", "b", "a", None):
            async with models.registry.lease(name):
                pass

    assert models.run(work) == ["load a", "load b"]


def test_requests_wait_for_one_load(info: Any) -> None:
    models = Models("a", "b", info=info)

    async def ask(name: str) -> None:
        async with models.registry.lease(name):
            await settled()

    async def work() -> None:
        async with anyio.create_task_group() as group:
            for name in ("a", "b", "a", "b", "a"):
                group.start_soon(ask, name)

    assert sorted(models.run(work)) == ["load a", "load b"]


def test_a_swap_waits_for_running_requests(info: Any) -> None:
    """A swap ends no request. New requests for the old model wait for the swap, and load it again."""
    models = Models("a", "b", info=info, memory_bytes=15)
    steps: list[str] = []

    async def ask(name: str, number: int) -> None:
        async with models.registry.lease(name) as running:
            steps.append(f"{name}{number}")
            assert not running.engine.ended.done()

    async def work() -> None:
        async with anyio.create_task_group() as group, models.registry.lease("a") as running:
            group.start_soon(ask, "b", 1)
            await settled()
            group.start_soon(ask, "a", 2)
            await settled()
            assert steps == [] and models.notes == ["load a"]
            stream = running.engine.submit("abc", slm.Sampling(temperature=0, max_tokens=8))
            assert len(stream.run().tokens) == 8
        steps.append("over")

    assert models.run(work) == ["load a", "close a", "load b", "close b", "load a"]
    assert steps == ["b1", "a2", "over"]


def test_a_lost_client_does_not_wait_for_a_swap(info: Any) -> None:
    models = Models("a", "b", info=info, memory_bytes=15)

    async def work() -> None:
        async with models.registry.lease("a"):
            with anyio.move_on_after(0.05) as scope:
                async with models.registry.lease("b"):
                    pass
            assert scope.cancelled_caught
            async with models.registry.lease("a"):  # it is not drained any more
                pass

    assert models.run(work) == ["load a"]


def test_a_model_is_not_unloaded_between_the_prompts_of_a_request(info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the request would wait for the unload, and the unload for the request."""
    fixture = Fixture(info)
    registry, completions, unloads = fixture.app.state.registry, Engine.completions, list[Future[None]]()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def unload_first(*arguments: Any, **options: Any) -> Any:
            if not unloads:
                unloads.append(asyncio.run_coroutine_threadsafe(registry.unload(None), loop))
                asyncio.run_coroutine_threadsafe(settled(), loop).result(WAIT_S)
            return completions(*arguments, **options)

        monkeypatch.setattr(Engine, "completions", unload_first)
        transport = httpx.ASGITransport(fixture.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=WAIT_S) as http:
            with anyio.fail_after(10):
                answer = await http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3})
                await asyncio.wrap_future(unloads[0])
        assert [choice["text"] for choice in answer.json()["choices"]] == ["xxx", "xxx"]
        assert registry.running == ()

    asyncio.run(main())


def test_a_model_that_is_back_waits_for_no_other_load(info: Any) -> None:
    models = Models("a", "b", info=info)
    load, is_free = models.load, threading.Event()

    def slowly(name: str) -> Any:
        assert name == "a" or is_free.wait(WAIT_S)
        return load(name)

    models.load = slowly  # type: ignore[method-assign]

    async def ask(name: str) -> None:
        async with models.registry.lease(name):
            pass

    async def work() -> None:
        await ask("a")
        await models.registry.unload("a")
        await ask("a")
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "b")
            await settled()
            try:
                await ask("a")
                assert models.notes == ["load a", "close a", "load a"]
            finally:
                is_free.set()

    assert models.run(work)[-1] == "load b"


def test_the_least_recently_used_model_is_unloaded(info: Any) -> None:
    models = Models("a", "b", "c", info=info, memory_bytes=25)

    async def work() -> None:
        for name in ("a", "b", "a", "c"):
            models.now += 1
            async with models.registry.lease(name):
                pass

    assert models.run(work) == ["load a", "load b", "close b", "load c"]


def test_what_cannot_fit_is_refused(info: Any) -> None:
    with pytest.raises(InvalidOption, match=r"'a' needs about 0.00 GiB .* memory budget is 0.00 GiB"):
        Models("a", info=info, memory_bytes=9)


def test_idle_models_are_unloaded(info: Any) -> None:
    models = Models("a", "b", info=info, keep_alive_s=60)

    async def work() -> None:
        async with models.registry.lease("a"):
            models.now = 50
            async with models.registry.lease("b"):
                pass
            models.now = 110
            await models.registry.unload_idle()
            assert models.notes == ["load a", "load b", "close b"]
        models.now = 169
        await models.registry.unload_idle()
        assert models.notes[-1] == "close b"
        models.now = 170
        await models.registry.unload_idle()

    assert models.run(work) == ["load a", "load b", "close b", "close a"]


def test_an_unloaded_model_is_gone(info: Any) -> None:
    models = Models("a", info=info)

    async def work() -> None:
        async with models.registry.lease("a") as running:
            engine = weakref.ref(running.engine)
            model = weakref.ref(running.model)
        models.loaded.clear()
        del running
        await models.registry.unload("a")
        await settled()
        for _ in range(1000):  # the thread that closed them may hold references for a moment longer
            gc.collect()
            if engine() is None and model() is None:
                return
            await anyio.sleep(0.01)
        raise AssertionError(f"still there: {engine()}, {model()}")

    models.run(work)


def test_a_load_that_fails_is_tried_again(info: Any) -> None:
    models = Models("a", info=info)
    load = models.load

    def fail(name: str) -> Any:
        models.load = load  # type: ignore[method-assign]
        raise InvalidModelFile("the file is damaged")

    models.load = fail  # type: ignore[method-assign]

    async def work() -> None:
        with pytest.raises(ApiError, match="the model 'a' cannot be loaded: the file is damaged") as error:
            async with models.registry.lease("a"):
                pass
        assert error.value.status == 503
        async with models.registry.lease("a"):
            pass

    assert models.run(work) == ["load a"]


def test_a_model_that_crashed_is_loaded_again(info: Any) -> None:
    """At once; after several crashes without an answer, with its next request."""
    models = Models("a", info=info)

    async def crash() -> None:
        crashed = models.loaded["a"].crashed
        assert crashed is not None
        n_notes = len(models.notes)
        crashed.set_result(slm.errors.BackendCrashed("killed"))
        while len(models.notes) == n_notes or not models.registry.running:
            await asyncio.sleep(0.001)
            if models.notes.count("load a") == 4 and len(models.notes) == n_notes:
                return

    async def work() -> None:
        async with models.registry.lease("a"):
            pass
        for _ in range(4):
            await crash()
        assert models.notes == ["load a", *["close a", "load a"] * 3]
        app = create_app([ServedModel("a", lambda: models.load("a"))], log=None)
        app.state.registry = models.registry
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            health, ready = await http.get("/health"), await http.get("/ready")
        assert (health.status_code, health.json()["models"]) == (503, {"a": "failed"})
        assert (ready.status_code, ready.json()["models"]) == (503, [])
        async with models.registry.lease("a"):
            pass

    assert models.run(work) == ["load a", *["close a", "load a"] * 4]


def test_a_killed_engine_ends_its_streams_and_comes_back() -> None:
    """Its streams end with an error event, health says so, and the next request is answered."""
    served = ServedModel("demo", lambda: slm.load(slm.demo_model_path(), isolated=True, n_threads=1))
    app = create_app([served], log=None)
    body = {**QUESTION, "stream": True, "logit_bias": {"2": -100}, "max_tokens": 5000}

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=WAIT_S) as http:
            assert (await http.post("/v1/chat/completions", json=QUESTION)).status_code == 200
            (running,) = app.state.registry.running
            backend = running.model.model
            assert isinstance(backend, IsolatedModel)
            stream = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while running.engine.stats().completion_tokens < 30:
                await asyncio.sleep(0.01)
            os.kill(backend.pid, signal.SIGKILL)
            last = frames((await stream).text)[-1]
            assert json.loads(last)["error"]["code"] == "engine_failed"
            while (await http.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
            (again,) = app.state.registry.running
            assert again is not running, "health is not ok before the model is back"
            assert (await http.post("/v1/chat/completions", json=QUESTION)).status_code == 200
        await app.state.registry.close()

    asyncio.run(main())
