"""``slm serve`` in a process of its own, called over a socket by the ``openai`` client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from server.test_openai_chat import ASKED, QUESTION
from slm_core.cli.app import app
from slm_core.cli.serve import _named
from slm_core.server import ServerOptions


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str


@contextmanager
def started(*options: str) -> Iterator[Server]:
    """``slm serve`` with a key, "secret"."""
    command = [sys.executable, "-c", "from slm_core.cli import main; main()", "serve", "--port", "0", *options]
    environment = {**os.environ, "SLM_API_KEY": "secret"}
    process = subprocess.Popen(
        [*command, "--ctx", "2048"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert address is not None, first
        assert "curl" in process.stderr.readline()
        yield Server(process, address[0])
    finally:
        process.kill()
        process.communicate()


_LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "logit_bias": {"2": -100},
    "max_tokens": 500,
    "stream": True,
}
"""A request during whose answer the server is killed: the answer is never acknowledged."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started() as server:
        yield server


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models/small.gguf", ("small", None, Path("models/small.gguf"))),
        ("a=models/small.gguf", ("a", None, Path("models/small.gguf"))),
        ("onnx:models/small.gguf", ("small", "onnx", Path("models/small.gguf"))),
        ("a=onnx:small.gguf", ("a", "onnx", Path("small.gguf"))),
        ("native:", ("native", "native", None)),
        ("demo=", ("demo", None, None)),
        ("hf://org/name/small.gguf", ("small", None, Path("hf://org/name/small.gguf"))),
        ("a=hf://org/name", ("a", None, Path("hf://org/name"))),
        ("other:small.gguf", ("other:small", None, Path("other:small.gguf"))),
        ("folder/a=b.gguf", ("a=b", None, Path("folder/a=b.gguf"))),
        ("x" * 300, ("x" * 300, None, Path("x" * 300))),
    ],
)
def test_names_and_engines_of_models(text: str, expected: object) -> None:
    assert _named(text) == expected


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="secret", max_retries=0, _strict_response_validation=True
    ) as api:
        yield api


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.gguf"], r"error: the model 'missing' cannot be loaded: missing\.gguf: no such file"),
        (["--ray", "--replicas", "3:2"], r"error: --replicas '3:2' \(accepted: a number, such as 4, or two"),
        (["--ray", "--sessions-dir", "here"], r"error: --sessions-dir does not go with --ray: replicas come and go"),
    ],
)
def test_a_process_that_cannot_serve_says_so_in_one_line(options: list[str], message: str) -> None:
    command = [sys.executable, "-c", "from slm_core.cli import main; main()", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(message, line), line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-budget", "1M"], r"error: the model 'demo' needs about 0\.\d+ GiB with its KV cache"),
        (["--memory-budget", "much"], r"error: --memory-budget 'much' \(accepted: a size, such as 6G or 500M\)"),
        (["--memory-budget", "0"], r"error: --memory-budget '0' \(accepted: a size, such as 6G or 500M\)"),
        (["--max-body", "0"], r"error: --max-body '0' \(accepted: a size, such as 6G or 500M\)"),
        (["--max-body", "9" * 400], r"error: --max-body '9+ \(accepted: a size, such as 6G or 500M\)"),
        (["--kv-type", "q9_0"], r"error: --kv-type 'q9_0' \(accepted: one type, or two with a comma, of f32, f16,"),
        (["--kv-type", "f8_e4m3", "--in-process"], r"error: the model 'demo' cannot be loaded: .*f8_e4m3"),
        (["--alias", "a=none"], r"error: --alias 'a=none'"),
        (["--replicas", "2"], r"error: --replicas, --replica-cpus, --replica-gpus and --ray-address are for --ray"),
        (["--ray-address", "auto"], r"error: --replicas, --replica-cpus, --replica-gpus and --ray-address are for"),
        (["--host", "0.0.0.0"], r"error: host='0\.0\.0\.0' can be reached by other machines"),
    ],
)
def test_a_failed_start_is_one_line(options: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLM_API_KEY", raising=False)
    done = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert done.exit_code != 0
    (line,) = done.stderr.splitlines()
    assert re.match(message, line), line


@pytest.mark.parametrize(
    ("value", "options", "keys"),
    [
        ("horse", [], ("horse",)),
        ("horse", ["--key", "battery", "--key", "staple"], ("battery", "staple")),
        ("", ["--key", "battery"], ("battery",)),
        ("correct horse battery", [], "error: a key is empty, has spaces, or is not printable ASCII"),
        ("", [], "error: SLM_API_KEY is empty"),
    ],
)
def test_the_variable_is_one_key(
    value: str, options: list[str], keys: tuple[str, ...] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each word of a passphrase would be a key, and an empty variable would let anybody call."""
    served: list[ServerOptions] = []
    monkeypatch.setenv("SLM_API_KEY", value)
    monkeypatch.setattr("slm_core.server.run.run", lambda _app, options, *_: served.append(options))
    done = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    if isinstance(keys, str):
        (line,) = done.stderr.splitlines()
        assert not served and done.exit_code != 0 and line.startswith(keys)
    else:
        assert [options.keys for options in served] == [keys]


def test_the_openai_client_gets_answers(api: openai.OpenAI) -> None:
    options: Any = {**QUESTION, "model": "demo"}
    whole = api.chat.completions.create(**options)
    assert "42" in (whole.choices[0].message.content or "")
    with api.chat.completions.create(**options, stream=True) as chunks:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert api.completions.create(model="demo", prompt="My dog", max_tokens=4).choices[0].finish_reason == "length"
    assert [model.id for model in api.models.list()] == ["demo"]
    assert api.models.retrieve("demo").owned_by == "slm-core"


def test_the_openai_client_joins_streams(api: openai.OpenAI) -> None:
    options: Any = {**ASKED, "model": "demo", "temperature": 0}
    with api.chat.completions.stream(**options) as stream:
        stream.until_done()
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')


def test_the_openai_client_parses_schemas(api: openai.OpenAI) -> None:
    class Sum(BaseModel):
        a: int
        b: int

    options: Any = {**QUESTION, "model": "demo"}
    parsed = api.chat.completions.parse(**options, response_format=Sum, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Sum)


def test_the_openai_client_raises_its_errors(server: Server, api: openai.OpenAI) -> None:
    options: Any = {**QUESTION, "model": "demo"}
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("unknown")
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(**options, extra_body={"unknown": 1})
    assert (refused.value.param, refused.value.code) == ("unknown", "unknown_parameter")


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time of a process is read in /proc, which this system lacks")
def test_an_idle_server_takes_no_cpu(server: Server, api: openai.OpenAI) -> None:
    api.models.list()

    def ticks() -> int:
        """CPU time of the server and its engine, in ticks of 10 ms."""
        pids, total = [server.process.pid], 0
        while pids:
            folder = Path("/proc") / str(pids.pop())
            pids += map(int, " ".join(path.read_text() for path in folder.glob("task/*/children")).split())
            user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            total += int(user) + int(system)
        return total

    time.sleep(0.5)  # what follows a request
    before = ticks()
    time.sleep(2)
    assert ticks() - before <= 6, "3 % of a core: uvicorn looks after itself ten times a second"


def test_a_running_answer_survives_sigterm(server: Server, api: openai.OpenAI) -> None:
    """The last test of this server."""
    options: Any = {**QUESTION, "model": "demo", "logit_bias": {"2": -100}}
    with api.chat.completions.create(**options, stream=True, max_tokens=400) as chunks:
        iterator = iter(chunks)
        next(iterator)
        server.process.send_signal(signal.SIGTERM)
        rest = list(iterator)
    assert rest[-1].choices[0].finish_reason in ("stop", "length")
    assert server.process.wait(timeout=60) == -signal.SIGTERM


def test_saved_sessions_survive_kill_9(tmp_path: Path) -> None:
    """The next server continues each acknowledged session, token for token as a server that was never killed."""
    questions = ("My dog is called Rex.", "What is my dog called?", "Is Rex a cat?")

    def ask(api: httpx.Client, session: str, question: str) -> str:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
        answer = api.post(f"/v1/sessions/{session}/messages", json=body).raise_for_status().json()
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def client(server: Server) -> httpx.Client:
        headers = {"authorization": "Bearer secret"}
        return httpx.Client(base_url=server.url, headers=headers, timeout=60)

    options = ("--sessions-dir", str(tmp_path))
    with started(*options) as server, client(server) as api:
        never_killed, killed = (api.post("/v1/sessions", json={}).json()["id"] for _ in range(2))
        expected = [ask(api, never_killed, question) for question in questions]
        answers = [ask(api, killed, question) for question in questions[:2]]
        with api.stream("POST", f"/v1/sessions/{killed}/messages", json=_LONG) as response:
            next(response.iter_lines())
            server.process.kill()
            server.process.wait()
    with started(*options) as server, client(server) as api:
        assert [*answers, ask(api, killed, questions[2])] == expected
