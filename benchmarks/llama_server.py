"""llama-server as a subprocess, called over HTTP with tokens, for greedy answers of fixed length.

``benchmarks/build_llama_server.sh FOLDER`` builds it from the source in llama-cpp-python's sdist.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slm_core.cpu import usable_cores

_START_S = 120


class LlamaServer:
    """Starts llama-server with a model, and stops it at the end.

    Args:
        program: llama-server.
        model: a GGUF file.
        n_ctx: positions, shared by all slots.
        n_parallel: slots.
        n_batch: ``-b``; None for its default.

    Raises:
        RuntimeError: it exits, or prints nothing for two minutes.
    """

    def __init__(self, program: Path, model: Path, n_ctx: int, n_parallel: int, n_batch: int | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [program, "-m", model, "-c", n_ctx, "-np", n_parallel, "--kv-unified", "-t", usable_cores()]
        command += ["--host", "127.0.0.1", "--port", self._port]
        command += [] if n_batch is None else ["-b", n_batch, "-ub", n_batch]
        self._process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def _wait(self) -> None:
        for _ in range(10 * _START_S):
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self._process.kill()
        raise RuntimeError(f"llama-server was not ready within {_START_S} s")

    def stream(self, prompt: Sequence[int], n_tokens: int) -> tuple[float, list[float], list[int]]:
        """The duration of the call, the arrival times of tokens, and the tokens."""
        body: dict[str, Any] = {"prompt": list(prompt), "n_predict": n_tokens, "stream": True, "temperature": 0}
        body |= {"ignore_eos": True, "cache_prompt": True, "return_tokens": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        started, times, tokens = time.perf_counter(), [], []
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"llama-server: {response.status} {response.read()[:200]!r}")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"llama-server: {event['error']}")
            event_tokens = event.get("tokens") or []
            times += [time.perf_counter()] * len(event_tokens)
            tokens += event_tokens
            if len(tokens) >= n_tokens or event.get("stop"):
                break
        connection.close()
        return started, times, tokens

    def together(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[tuple[float, list[float], list[int]]]:
        """``stream`` for prompts that are sent at once, one thread each."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.stream(prompt, n_tokens), prompts))
