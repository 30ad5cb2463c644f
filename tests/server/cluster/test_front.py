"""The front over replicas in this process: answers, lost clients and replicas, sessions, health and metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from io import StringIO
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import slm_core as slm
from http_server import serving
from server.conftest import QUESTION, Client, frames
from slm_core.server import ApiKey, EngineSettings, ServedModel, ServerOptions
from slm_core.server.calls import begin_call
from slm_core.server.cluster.forwarding import Ended, Request, Sent, Whole
from slm_core.server.cluster.front import ReplicaLost, create_front
from slm_core.server.cluster.replica import Replica
from slm_core.server.cluster.routing import Routing

WAIT_S = 60


class LocalReplicas:
    """Replicas in this process, routed as Ray routes them."""

    def __init__(self, names: Sequence[str], options: ServerOptions) -> None:
        served = ServedModel("demo", lambda: slm.load(slm.demo_model_path()), settings=EngineSettings(n_ctx=2048))
        self.replicas = {name: Replica(name, [served], options) for name in names}
        self.routing = Routing(n_parallel=2, n_chars=8192)
        self.asked: list[str] = []
        self.fails_after: int | None = None
        self.n_open = 0

    async def start(self) -> None:
        for replica in self.replicas.values():
            await replica.start()

    async def end_answers(self) -> None:
        for replica in self.replicas.values():
            await replica.end_answers()

    async def close(self) -> None:
        for replica in self.replicas.values():
            await replica.close()

    async def answer(self, request: Request) -> AsyncGenerator[Sent | Ended]:
        self.routing.keep(self.replicas)
        at_home = [name for name, replica in self.replicas.items() if request.home in replica.tags]
        name = at_home[0] if at_home else self.routing.choose(request.text)
        self.routing.begin(name, request.text)
        self.asked.append(name)
        self.n_open += 1
        n = 0
        try:
            async with aclosing(self.replicas[name].answer(request)) as answer:
                async for parts in answer:
                    for part in parts:
                        if n == self.fails_after:
                            self.fails_after = None
                            raise ReplicaLost("killed")
                        n += 1
                        yield part
        finally:
            self.routing.end(name)
            self.n_open -= 1

    async def all_answers(self, request: Request) -> Sequence[Whole]:
        return [await replica.whole(request) for replica in self.replicas.values()]


class Fixture:
    """A front over two replicas, in an event loop of its own."""

    def __init__(self, **options: Any) -> None:
        self.options = ServerOptions(**options)
        self.replicas = LocalReplicas(["a", "b"], self.options)
        self.log = StringIO()
        self.app = create_front(self.replicas, self.options, log=self.log)
        self.runner = asyncio.Runner()
        self.client = RunnerClient(self.app, self.log, self.runner)
        self.lifespan = self.app.router.lifespan_context(self.app)
        self.runner.run(self.lifespan.__aenter__())

    def close(self) -> None:
        self.runner.run(self.lifespan.__aexit__(None, None, None))
        self.runner.close()


class RunnerClient(Client):
    """A client whose calls share an event loop."""

    def __init__(self, app: Any, log: StringIO, runner: asyncio.Runner) -> None:
        super().__init__(app, log)
        self.runner = runner

    def run(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, WAIT_S))


@pytest.fixture(scope="module")
def fixture() -> Iterator[Fixture]:
    served = Fixture()
    yield served
    served.close()


@pytest.fixture
def client(fixture: Fixture) -> Client:
    fixture.replicas.asked.clear()
    fixture.log.truncate(0)
    fixture.log.seek(0)
    return fixture.client


def test_answers_are_those_of_one_server(client: Client, fixture: Fixture) -> None:
    whole = client.chat()
    chunks = client.stream()
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert whole["choices"][0]["message"]["content"] == text == "12 + 30 = 42"
    message = client.post("/v1/messages", {**QUESTION, "max_tokens": 20}).json()
    assert message["content"][0]["text"] == text
    lines = [json.loads(line) for line in fixture.log.getvalue().splitlines()]
    assert [line["path"] for line in lines] == ["/v1/chat/completions"] * 2 + ["/v1/messages"]
    assert all(line["completion_tokens"] == whole["usage"]["completion_tokens"] for line in lines)


def test_the_first_token_waits_for_no_batch(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of an answer is passed on at once, even if the application sends no other part for now."""
    more = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begin_call(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await more.wait()
        await send({"type": "http.response.body", "body": b"second", "more_body": False})

    async def main() -> None:
        async with aclosing(fixture.replicas.replicas["a"].answer(Request(method="GET", path="/"))) as answer:
            first = await anext(answer)
            assert [part.body for part in first if isinstance(part, Sent)] == [b"first"]
            more.set()
            rest = [part async for parts in answer for part in parts]
            assert [part.body for part in rest if isinstance(part, Sent)] == [b"second"]
            assert isinstance(rest[-1], Ended) and rest[-1].is_complete

    monkeypatch.setattr(fixture.replicas.replicas["a"], "_app", app)
    fixture.client.run(main())


def test_requests_and_errors_have_one_id(client: Client, fixture: Fixture) -> None:
    response = client.post("/v1/chat/completions", {"messages": 5}, **{"x-request-id": "mine-1"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    (line,) = map(json.loads, fixture.log.getvalue().splitlines())
    assert (line["request_id"], line["status"], line["error"]) == ("mine-1", 400, "invalid_value")


def test_equal_prompts_go_to_one_replica_and_idle_ones_take_turns(client: Client, fixture: Fixture) -> None:
    long = {"messages": [{"role": "user", "content": "What is 12 + 30? " * 20}], "max_tokens": 1}
    for _ in range(3):
        client.chat(**long)
    assert len(set(fixture.replicas.asked)) == 1
    other = {"messages": [{"role": "user", "content": "And what is 2 + 2? " * 20}], "max_tokens": 1}
    client.chat(**other)
    assert len(set(fixture.replicas.asked)) == 2


def test_a_session_stays_where_it_was_made(client: Client, fixture: Fixture) -> None:
    ids = [client.post("/v1/sessions", {}).json()["id"] for _ in range(2)]
    replicas = fixture.replicas.asked[:]
    assert sorted(replicas) == ["a", "b"]
    fixture.replicas.asked.clear()
    for each in ids * 2:
        turn = client.post(f"/v1/sessions/{each}/messages", QUESTION)
        assert turn.status_code == 200, turn.text
        assert client.get(f"/v1/sessions/{each}").json()["messages"][-1]["content"] == "12 + 30 = 42"
    assert fixture.replicas.asked == [replicas[0], replicas[0], replicas[1], replicas[1]] * 2
    listed = client.get("/v1/sessions").json()["data"]
    assert [each["id"] for each in listed if each["id"] in ids] == ids
    fork = client.post(f"/v1/sessions/{ids[1]}/fork", {}).json()["id"]
    assert fork[:13] == ids[1][:13], "its id leads to the same replica"
    for each in [*ids, fork]:
        assert client.call("DELETE", f"/v1/sessions/{each}").status_code == 200


def test_a_response_is_continued_where_it_was_made(client: Client, fixture: Fixture) -> None:
    for number in range(2):
        body = {"input": f"What is 12 + 3{number}?", "temperature": 0}
        first = client.post("/v1/responses", body).json()
        home = fixture.replicas.asked[-1]
        next_ = client.post("/v1/responses", {"input": "And 2 + 2?", "previous_response_id": first["id"]})
        assert next_.status_code == 200, next_.text
        assert client.get(f"/v1/responses/{first['id']}/input_items").json()["data"][0]["content"]
        assert fixture.replicas.asked[-2:] == [home, home]
    assert client.get(f"/v1/sessions/sess_{'0' * 24}").status_code == 404
    assert client.get(f"/v1/responses/resp_{'0' * 24}").status_code == 404


def test_what_a_replica_leaves_is_taken_over(client: Client, fixture: Fixture) -> None:
    """Sessions and responses, background ones with their events, under the same ids."""
    session = client.post("/v1/sessions", {"name": "kept"}).json()["id"]
    leaving = fixture.replicas.asked[-1]
    client.post(f"/v1/sessions/{session}/messages", QUESTION)
    body = {"input": "What is 12 + 30?", "temperature": 0, "background": True, "previous_response_id": None}
    while True:
        response = client.post("/v1/responses", body).json()["id"]
        if fixture.replicas.asked[-1] == leaving:
            break
    (staying,) = {"a", "b"} - {leaving}
    replica = fixture.replicas.replicas.pop(leaving)
    belongings = client.run(replica.belongings())
    fixture.replicas.replicas[staying].adopt(belongings)
    try:
        before = client.get(f"/v1/sessions/{session}").json()
        assert (before["name"], before["messages"][-1]["content"]) == ("kept", "12 + 30 = 42")
        turn = client.post(f"/v1/sessions/{session}/messages", QUESTION)
        assert turn.json()["choices"][0]["message"]["content"]
        assert client.get(f"/v1/responses/{response}").json()["status"] == "completed"
        events = frames(client.get(f"/v1/responses/{response}?stream=true").text)
        assert json.loads(events[-1])["type"] == "response.completed"
        assert client.post(f"/v1/responses/{response}/cancel", {}).json()["status"] == "completed"
        assert set(fixture.replicas.asked[-5:]) == {staying}
    finally:
        fixture.replicas.replicas[leaving] = replica


def test_health_readiness_and_metrics_are_of_all_replicas(client: Client, fixture: Fixture) -> None:
    client.chat()
    health = client.get("/health").json()
    assert (health["status"], health["models"]) == ("ok", {"demo": "ok"})
    assert list(health["replicas"].values()) == ["ok", "ok"]
    assert client.get("/ready").json() == {"status": "ready", "models": ["demo"]}
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    finished = families["slm:request_success"].samples
    by_replica = {sample.labels["replica"] for sample in finished}
    assert by_replica <= set(health["replicas"]) and by_replica
    requests = families["slm:http_requests"].samples
    assert all("replica" not in sample.labels for sample in requests)
    assert {"/health", "/ready", "/v1/chat/completions"} <= {sample.labels["path"] for sample in requests}


def test_a_hanging_replica_shows_in_health(client: Client, fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise health would be ok while an engine hangs."""

    async def hang(request: Request) -> Whole:
        return Whole("0" * 8, 503, b'{"status": "failed", "models": {"demo": "hangs"}}')

    for name, status, code in (("a", "degraded", 200), ("b", "failed", 503)):
        monkeypatch.setattr(fixture.replicas.replicas[name], "whole", hang)
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (code, status)
        assert health.json()["models"] == {"demo": "hangs"}


def test_a_replica_that_does_not_answer_is_a_503(
    client: Client, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(request: Request) -> Sequence[Whole]:
        raise ReplicaLost("a replica does not answer")

    monkeypatch.setattr(fixture.replicas, "all_answers", fail)
    for path in ("/health", "/metrics", "/v1/sessions"):
        assert client.get(path).status_code == 503


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_client_is_a_cancel(fixture: Fixture, *, stream: bool) -> None:
    """Otherwise the replica would generate for nobody."""
    body = {**QUESTION, "logit_bias": {"2": -100}, "stream": stream}

    async def main() -> None:
        has_begun, is_lost = asyncio.Event(), asyncio.Event()
        content, is_first = json.dumps(body).encode(), True

        async def receive() -> dict[str, Any]:
            nonlocal is_first
            if is_first:
                is_first = False
                return {"type": "http.request", "body": content, "more_body": False}
            await is_lost.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            has_begun.set()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1), "server": ("localhost", 80),
        }  # fmt: skip
        answered = asyncio.create_task(fixture.app(scope, receive, send))
        if stream:
            await has_begun.wait()
        else:
            while not fixture.replicas.n_open:
                await asyncio.sleep(0)
        is_lost.set()
        await answered
        assert fixture.replicas.n_open == 0
        while any(engine.stats().requests for engine in engines):  # the running step ends
            await asyncio.sleep(0.001)

    replicas = fixture.replicas.replicas.values()
    engines = [running.engine for replica in replicas for running in replica._app.state.registry.running]
    before = sum(engine.stats().completion_tokens for engine in engines)
    fixture.client.run(main())
    n_tokens = sum(engine.stats().completion_tokens for engine in engines) - before
    assert n_tokens < 1500, "of 2,000, at which the context is full"


def test_a_replica_that_ends_before_its_answer_is_replaced(client: Client, fixture: Fixture) -> None:
    fixture.replicas.fails_after = 0
    assert client.chat()["choices"][0]["message"]["content"] == "12 + 30 = 42"
    assert len(fixture.replicas.asked) == 2
    (line,) = map(json.loads, fixture.log.getvalue().splitlines())
    assert (line["status"], line.get("error")) == (200, None)


def test_a_replica_that_ends_within_its_answer_cuts_the_stream(client: Client, fixture: Fixture) -> None:
    """Otherwise a truncated answer would look complete."""
    fixture.replicas.fails_after = 1
    with pytest.raises(ReplicaLost):  # uvicorn closes the connection
        client.post("/v1/chat/completions", {**QUESTION, "stream": True})
    assert len(fixture.replicas.asked) == 1
    (line,) = [json.loads(each) for each in fixture.log.getvalue().splitlines() if '"request"' in each]
    assert line["error"] == "replica_lost"


def test_a_session_whose_replica_ends_is_not_asked_elsewhere(client: Client, fixture: Fixture) -> None:
    session = client.post("/v1/sessions", {}).json()["id"]
    fixture.replicas.fails_after = 0
    response = client.get(f"/v1/sessions/{session}")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
    assert response.headers["retry-after"] == "1"


def test_other_requests_do_not_wait_for_a_large_body(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front parses it in a thread, too."""
    threads = []

    def noted(body: Any) -> str:
        threads.append(threading.get_ident())
        return ""

    monkeypatch.setattr("slm_core.server.cluster.front.prompt_text", noted)
    client.post("/tokenize", {"content": "x" * 10_000})
    client.post("/tokenize", {"content": "x"})
    assert [thread == threading.get_ident() for thread in threads] == [False, True]


def test_answers_that_take_longer_than_the_grace_period_end_with_an_error() -> None:
    """As on a server without replicas: no connection is cut."""
    options = ServerOptions(grace_s=0.1)
    replicas = LocalReplicas(["a"], options)
    body = {**QUESTION, "logit_bias": {"2": -100}, "max_tokens": 2000}  # without an end
    with ThreadPoolExecutor(2) as pool, serving(create_front(replicas, options, log=None)) as url:
        sent = [{**body, "stream": stream} for stream in (True, False)]
        answers = [pool.submit(httpx.post, f"{url}/v1/chat/completions", json=each, timeout=WAIT_S) for each in sent]
        deadline = time.monotonic() + WAIT_S
        while len(replicas.asked) < len(sent):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    stream, whole = (answer.result() for answer in answers)
    assert stream.status_code == 200 and "the server stops" in frames(stream.text)[-1]
    assert whole.status_code == 503 and "the server stops" in whole.text


def test_the_front_checks_keys_and_passes_them_to_the_replicas() -> None:
    served = Fixture(keys=(ApiKey("one", name="first"), ApiKey("two", cells=5)), allowed_origins=("https://a.example",))
    try:
        client = served.client
        assert client.post("/v1/chat/completions", QUESTION).status_code == 401
        assert client.get("/v1/models", host="evil.example").status_code == 403
        one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        session = client.post("/v1/sessions", {}, **one).json()["id"]
        assert client.get(f"/v1/sessions/{session}", **two).status_code == 404
        assert client.get("/v1/sessions", **two).json()["data"] == []
        assert [each["id"] for each in client.get("/v1/sessions", **one).json()["data"]] == [session]
        refused = client.post("/v1/chat/completions", {**QUESTION, "max_tokens": 5}, **two)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        allowed = client.get("/v1/models", origin="https://a.example", **one)
        assert allowed.headers.get_list("access-control-allow-origin") == ["https://a.example"]
    finally:
        served.close()


def test_a_model_that_cannot_be_loaded_stops_the_front() -> None:
    replicas = LocalReplicas([], ServerOptions())

    async def fail() -> None:
        raise slm.SlmError("no replica starts")

    replicas.start = fail  # type: ignore[method-assign]
    app = create_front(replicas, ServerOptions(), log=None)

    async def main() -> None:
        async with app.router.lifespan_context(app):
            raise AssertionError("it does not start")

    with pytest.raises(slm.SlmError, match="no replica starts"):
        asyncio.run(main())
    assert str(app.state.startup_error) == "no replica starts"
