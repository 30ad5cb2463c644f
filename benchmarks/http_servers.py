"""Servers as subprocesses, called over HTTP with tokens, for greedy answers of fixed length.

``benchmarks/build_llama_server.sh FOLDER`` builds llama-server from the source in llama-cpp-python's sdist.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, NamedTuple, Self

from slm_core.cpu import usable_cores

_START_S = 120


class Arrivals(NamedTuple):
    """The answer to a call: when the call began, when its tokens came, in seconds, and the tokens."""

    started: float
    times: list[float]
    tokens: list[int]

    @property
    def first_token_s(self) -> float:
        """Seconds from the call to the first token."""
        return self.times[0] - self.started


class HttpServer(ABC):
    """Starts a server, and stops it at the end.

    Args:
        command: starts it; the port follows.
        path: where tokens are generated.

    Raises:
        RuntimeError: it exits, or is not ready within two minutes.
    """

    def __init__(self, command: Sequence[object], path: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._path = path
        self._name = Path(str(command[0])).name
        self._process = subprocess.Popen(
            [*map(str, command), "--port", str(self._port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    @property
    def port(self) -> int:
        """The port on which it listens."""
        port: int = self._port
        return port

    def _wait(self) -> None:
        for _ in range(10 * _START_S):
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._name} ended with {self._process.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self._process.kill()
        raise RuntimeError(f"{self._name} was not ready within {_START_S} s")

    @abstractmethod
    def body(self, prompt: Sequence[int], n_tokens: int) -> Mapping[str, Any]:
        """The request for a stream of ``n_tokens`` greedy tokens."""

    @abstractmethod
    def tokens(self, event: Mapping[str, Any]) -> Sequence[int]:
        """The tokens of an event of the stream."""

    def stream(
        self, prompt: Sequence[int], n_tokens: int, times: list[float] | None = None, leave: Event | None = None
    ) -> Arrivals:
        """The arrivals of an answer's tokens.

        Args:
            prompt: the prompt.
            n_tokens: the length of the answer.
            times: the list for the times; other threads may watch it.
            leave: closes the connection when it is set.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        arrivals = Arrivals(time.perf_counter(), [] if times is None else times, [])
        body = json.dumps(self.body(prompt, n_tokens))
        connection.request("POST", self._path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{self._name}: {response.status} {response.read()[:200]!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{self._name}: {event['error']}")
            tokens = self.tokens(event)
            arrivals.times.extend([time.perf_counter()] * len(tokens))
            arrivals.tokens.extend(tokens)
            if len(arrivals.tokens) >= n_tokens or (leave is not None and leave.is_set()):
                break
        connection.close()
        return arrivals

    def together(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Arrivals]:
        """``stream`` for prompts that are sent at once, one thread each."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.stream(prompt, n_tokens), prompts))


class LlamaServer(HttpServer):
    """llama-server with one KV cache for all slots.

    Args:
        program: llama-server.
        model: a GGUF file.
        n_ctx: positions, shared by all slots.
        n_parallel: slots.
        n_batch: ``-b``; None for its default.
    """

    def __init__(self, program: Path, model: Path, n_ctx: int, n_parallel: int, n_batch: int | None = None) -> None:
        command: list[object] = [program, "-m", model, "-c", n_ctx, "-np", n_parallel, "--kv-unified"]
        command += ["-t", usable_cores(), "--host", "127.0.0.1"]
        command += [] if n_batch is None else ["-b", n_batch, "-ub", n_batch]
        super().__init__(command, "/completion")

    def body(self, prompt: Sequence[int], n_tokens: int) -> Mapping[str, Any]:
        """The request."""
        options = {"stream": True, "temperature": 0, "ignore_eos": True, "cache_prompt": True, "return_tokens": True}
        return {"prompt": list(prompt), "n_predict": n_tokens, **options}

    def tokens(self, event: Mapping[str, Any]) -> Sequence[int]:
        """The tokens of an event."""
        return event.get("tokens") or ()


class SlmServer(HttpServer):
    """``slm serve``.

    Args:
        model: a GGUF file.
        n_ctx: positions, shared by all requests.
        n_parallel: requests that are computed together.
        eog_ids: tokens that would end an answer early.
        options: further options of ``slm serve``.
    """

    def __init__(
        self, model: Path, n_ctx: int, n_parallel: int, eog_ids: Sequence[int], options: Sequence[object] = ()
    ) -> None:
        program = Path(sys.executable).with_name("slm")
        limits = ["--ctx", n_ctx, "--parallel", n_parallel, "--threads", usable_cores()]
        super().__init__([program, "serve", f"model={model}", *limits, *options], "/v1/completions")
        self._bias = {str(token): -100 for token in eog_ids}

    def body(self, prompt: Sequence[int], n_tokens: int) -> Mapping[str, Any]:
        """The request."""
        options = {"stream": True, "temperature": 0, "logit_bias": self._bias, "return_token_ids": True}
        return {"prompt": list(prompt), "max_tokens": n_tokens, **options}

    def tokens(self, event: Mapping[str, Any]) -> Sequence[int]:
        """The tokens of an event."""
        tokens: Sequence[int] = event["choices"][0]["token_ids"]
        return tokens
