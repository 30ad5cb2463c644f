"""Two replicas in a Ray cluster on this machine: spread requests, drains, and replicas that are killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import slm_core as slm
from http_server import serving
from server.conftest import QUESTION
from slm_core.server import EngineSettings, ServedModel, ServerOptions
from slm_core.server.cluster.front import create_front

deployment = pytest.importorskip(
    "slm_core.server.cluster.deployment", reason='Ray is missing: pip install "slm-core[ray]"'
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="it finds processes in /proc")]
WAIT_S = 60
ENDLESS = {**QUESTION, "logit_bias": {"2": -100}, "max_tokens": 1500, "stream": True}


class Cluster:
    """A served front; see ``RayReplicas`` for ``replicas``."""

    def __init__(self, url: str, replicas: Any) -> None:
        self.http = httpx.Client(base_url=url, timeout=WAIT_S)
        self.replicas = replicas

    def post(self, path: str, body: object) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def scale(self, n: int) -> None:
        if len(self.names()) != n:
            asyncio.run(self.replicas.scale(n))
        self.wait(lambda: len(self.names()) == n)

    def names(self) -> dict[str, str]:
        """The replicas that answer, and their states."""
        states: dict[str, str] = self.http.get("/health").json()["replicas"]
        return states

    def metric(self, name: str) -> Counter[str]:
        """The value of a metric of each replica."""
        values: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    values[sample.labels["replica"]] += sample.value  # type: ignore[assignment]
        return values

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ServerOptions(grace_s=2)
    load = partial(slm.load, slm.demo_model_path(), n_threads=1)  # a function of this module would not be found
    served = ServedModel("demo", load, settings=EngineSettings(n_ctx=2048))
    replicas = deployment.RayReplicas([served], options, deployment.ClusterOptions(app="slm-core-test", n_parallel=2))
    with serving(create_front(replicas, options, log=None)) as url:
        cluster = Cluster(url, replicas)
        yield cluster
        cluster.http.close()


def replica_processes() -> set[int]:
    """The processes of the replicas."""
    processes = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::ServeReplica:slm-core-test"):
                processes.add(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return processes


def test_requests_at_the_same_time_are_spread(cluster: Cluster) -> None:
    """Load counts from when a request is routed: eight equal prompts that come together do not go to one replica."""
    cluster.scale(2)
    before = cluster.metric("slm:request_success_total")
    body = {"messages": [{"role": "user", "content": "What is 12 + 30? " * 10}], "max_tokens": 200}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cluster.post("/v1/chat/completions", body), range(8)))
    after = cluster.metric("slm:request_success_total")
    counts = sorted(after[name] - before[name] for name in after)
    assert sum(counts) == 8 and counts[0] >= 2, counts


def test_a_lost_client_is_a_cancel(cluster: Cluster) -> None:
    """Otherwise the replica would generate for nobody."""
    before = cluster.metric("slm:generation_tokens_total").total()
    with cluster.http.stream("POST", "/v1/chat/completions", json=ENDLESS) as response:
        next(response.iter_lines())

    cluster.wait(lambda: cluster.metric("slm:num_requests_running").total() == 0)
    assert cluster.metric("slm:generation_tokens_total").total() - before < ENDLESS["max_tokens"] / 2


def test_a_killed_replica(cluster: Cluster) -> None:
    """Its streams are cut, so that no client takes them for complete; other requests are answered; it is replaced."""
    cluster.scale(2)
    before = set(cluster.names())
    with ThreadPoolExecutor(4) as pool:
        has_begun = [0] * 4

        def stream(number: int) -> str:
            lines = []
            try:
                body = {**ENDLESS, "messages": [{"role": "user", "content": f"Count from {number}."}]}
                with cluster.http.stream("POST", "/v1/chat/completions", json=body) as response:
                    for line in response.iter_lines():
                        has_begun[number] += bool(line)
                        lines += [line] if line else []
            except httpx.RemoteProtocolError:
                return "cut"
            return lines[-1]

        streams = [pool.submit(stream, number) for number in range(4)]
        cluster.wait(lambda: all(has_begun))
        os.kill(min(replica_processes()), signal.SIGKILL)
        ends = [each.result() for each in streams]
        assert "cut" in ends
        assert all(end in ("cut", "data: [DONE]") for end in ends)
    answers = [cluster.post("/v1/chat/completions", QUESTION) for _ in range(4)]
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {"12 + 30 = 42"}
    cluster.wait(lambda: len(cluster.names()) == 2 and set(cluster.names()) != before)


def test_sessions_move_when_a_replica_drains(cluster: Cluster) -> None:
    """They are dumped, restored, and answer under the same id; a stream that runs meanwhile is complete."""
    cluster.scale(2)
    sessions = [cluster.post("/v1/sessions", {"name": str(i)})["id"] for i in range(4)]
    assert len({each[5:13] for each in sessions}) == 2, "both replicas have some"
    for each in sessions:
        cluster.post(f"/v1/sessions/{each}/messages", QUESTION)
    responses = [cluster.post("/v1/responses", {"input": f"What is {i} + 30?"})["id"] for i in range(2)]
    before = {each: cluster.http.get(f"/v1/sessions/{each}").json()["messages"] for each in sessions}

    def stream() -> str:
        with cluster.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "max_tokens": 300}) as response:
            return list(response.iter_lines())[-2]

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream) for _ in range(2)]
        cluster.scale(1)
        assert [each.result() for each in streams] == ["data: [DONE]"] * 2
    for each in sessions:
        assert cluster.http.get(f"/v1/sessions/{each}").json()["messages"] == before[each]
        turn = cluster.post(f"/v1/sessions/{each}/messages", QUESTION)
        assert turn["choices"][0]["message"]["content"]
    assert {each["id"] for each in cluster.http.get("/v1/sessions").json()["data"]} >= set(sessions)
    for each in responses:
        assert cluster.post("/v1/responses", {"input": "And 2 + 2?", "previous_response_id": each})["output"]


def test_a_model_that_cannot_be_loaded_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    cluster.scale(1)  # there is one core for the other one
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"broken")
    options = deployment.ClusterOptions(app="slm-core-broken", n_min=1, n_max=1)
    served = ServedModel("broken", partial(slm.load, path))
    broken = deployment.RayReplicas([served], ServerOptions(), options)
    with pytest.raises(slm.SlmError, match=r"^no replica starts: .*broken.gguf: not a GGUF file") as raised:
        asyncio.run(broken.scale(1))
    assert "\n" not in str(raised.value)
    assert json.loads(cluster.http.get("/health").text)["status"] == "ok"


def test_the_command_serves_and_ends(tmp_path: Path) -> None:
    """``slm serve --ray`` in a process of its own, with a model by a relative path. SIGTERM ends it and its replicas.

    An answer that takes longer than the grace period ends with an error event; its connection is not cut.
    """
    (tmp_path / "small.gguf").symlink_to(slm.demo_model_path())
    command = [sys.executable, "-c", "from slm_core.cli import main; main()", "serve", "small.gguf", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "SLM_API_KEY")}
    process = subprocess.Popen(
        [*command, "--ray", "--replicas", "1", "--replica-cpus", "1", "--ctx", "2048", "--grace", "0.1"],
        cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "Starting 1 replica ...\n"
        lines = itertools.dropwhile(lambda line: line.startswith("still waiting"), process.stderr)  # a busy machine
        line = next(lines, "")
        url = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert url is not None, line
        answer = httpx.post(f"{url[0]}/v1/chat/completions", json=QUESTION, timeout=WAIT_S).json()
        assert answer["choices"][0]["message"]["content"] == "12 + 30 = 42"
        assert answer["model"] == "small"
        with httpx.stream("POST", f"{url[0]}/v1/chat/completions", json=ENDLESS, timeout=WAIT_S) as stream:
            lines_sent = stream.iter_lines()
            assert next(lines_sent).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            assert "the server stops" in [line for line in lines_sent if line][-1]
        log = "".join(lines)
        assert process.wait(WAIT_S) == -signal.SIGTERM, log
        assert "SIGTERM" not in log, "no stack trace of Ray"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
