"""Other programs as engines of `cpu.py`: ik_llama.cpp, OpenVINO GenAI and transformers.

`cpu.py` starts it: python cpu_peers.py NAME MODEL.gguf N_THREADS OPTIONS. Like `workers`, it imports no slm-core.
Inputs are random tokens, so no tokenizer runs. A peer's load ends with its first token.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from workers import resident_megabytes, serve

N_DECODED = 16


class NotInstalled(Exception):
    """A peer is not there; the text says how to get it."""


class Peer:
    """Loads a model and runs tasks with it, as ``cpu.Engine`` does.

    ``accepted`` are its options with their defaults. A task that it cannot measure answers None.
    """

    name: ClassVar[str]
    accepted: ClassVar[Mapping[str, str]]

    def __init__(self, model: Path, n_threads: int, options: Mapping[str, str]) -> None:
        unknown = sorted(options.keys() - self.accepted.keys())
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r} of {self.name} (accepted: {', '.join(self.accepted)})")
        self._model, self._n_threads = model, n_threads
        self._options = {**self.accepted, **options}
        self._random = np.random.default_rng(0)
        self.check_installed()

    def check_installed(self) -> None:
        """Raise `NotInstalled`, or do nothing."""

    def load(self, _: int) -> float:
        """Seconds from nothing to the first token."""
        raise NotImplementedError

    def prefill(self, n: int) -> float:
        """Tokens per second of a prompt of n tokens."""
        raise NotImplementedError

    def decode(self, depth: int) -> float:
        """Tokens per second of one sequence after ``depth`` tokens."""
        raise NotImplementedError

    def crowd(self, n: int) -> float | None:
        """Tokens per second of n sequences together."""
        raise NotImplementedError

    def memory(self, _: int) -> float | None:
        """Resident megabytes."""
        return resident_megabytes()

    def _tokens(self, n_sequences: int, n: int) -> Any:  # [n_sequences, n], int64
        return self._random.integers(0, 1000, (n_sequences, n))


def require(engine: str, **packages: str) -> None:
    """Raise `NotInstalled` if this interpreter lacks one of the modules, which are named with their packages."""
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        advice = f"pip install {' '.join(missing)}, or name an interpreter that has it: --python {engine}=PYTHON"
        raise NotInstalled(f"{sys.executable} has no {', '.join(missing)}: {advice}")


class IkLlama(Peer):
    """ik_llama.cpp through its llama-bench: a process for each task. Its clock starts after the load.

    Its own warm-up is one token, so a process runs short tests twice, and the second time counts. llama-bench knows
    neither several sequences nor the memory that is in use.
    """

    name = "ik_llama"
    accepted: ClassVar[Mapping[str, str]] = {"kv": "f16", "repack": "1", "program": "llama-bench"}

    def check_installed(self) -> None:
        program = self._options["program"]
        advice = "build it with benchmarks/build_ik_llama.sh FOLDER: --llama-bench FOLDER/build/bin/llama-bench"
        if shutil.which(program) is None:
            raise NotInstalled(f"there is no program {program!r}; {advice}")
        usage = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
        if "--run-time-repack" not in usage:
            raise NotInstalled(f"{program!r} is not ik_llama.cpp's: it has no --run-time-repack; {advice}")

    def load(self, _: int) -> float:
        """The time of a whole process that decodes one token: also its start, and the packing of weights."""
        started = time.perf_counter()
        self._run("-p", "1", "-n", "0", "-w", "0", "-r", "1")
        return time.perf_counter() - started

    def prefill(self, n: int) -> float:
        return self._run("-p", str(n), "-n", "0", "-r", "2")

    def decode(self, depth: int) -> float:
        if depth:
            return self._run("-p", "0", "-n", "0", "-gp", f"{depth},{N_DECODED}", "-r", "1")
        return self._run("-p", "0", "-n", str(N_DECODED), "-r", "2")

    def crowd(self, _: int) -> None:
        return None

    def memory(self, _: int) -> None:
        return None

    def close(self) -> None:
        """No process outlives its task."""

    def _run(self, *arguments: str) -> float:
        """Tokens per second of the last run of a process. Raises RuntimeError with its last line if it fails."""
        kv, repack, program = (self._options[name] for name in ("kv", "repack", "program"))
        command = [program, "-m", str(self._model), "-t", str(self._n_threads), "-o", "json", "-fa", "1"]
        command += ["-rtr", repack, "-ctk", kv, "-ctv", kv, *arguments]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            lines = process.stderr.strip().splitlines()
            raise RuntimeError(f"llama-bench ended with {process.returncode}: {lines[-1] if lines else 'no message'}")
        (test,) = json.loads(process.stdout)
        return float(test["samples_ts"][-1])


class OpenVino(Peer):
    """OpenVINO GenAI, which reads GGUF files of some types and architectures. Times are those of its steps."""

    name = "openvino"
    accepted: ClassVar[Mapping[str, str]] = {"kv": "f16"}
    _pipeline: Any = None

    def check_installed(self) -> None:
        require(self.name, openvino_genai="openvino-genai")

    def load(self, _: int) -> float:
        import openvino_genai

        self.close()
        started = time.perf_counter()
        properties = {"INFERENCE_NUM_THREADS": self._n_threads, "KV_CACHE_PRECISION": self._options["kv"]}
        self._pipeline = openvino_genai.LLMPipeline(str(self._model), "CPU", **properties)
        self._generate(1, 1, 1)
        return time.perf_counter() - started

    def prefill(self, n: int) -> float:
        return n / self._generate(1, n, 1)[0]

    def decode(self, depth: int) -> float:
        return 1 / statistics.median(self._generate(1, max(depth, 1), N_DECODED + 1)[1:])

    def crowd(self, n: int) -> float:
        return n / statistics.median(self._generate(n, 1, N_DECODED + 1)[1:])

    def close(self) -> None:
        self._pipeline = None

    def _generate(self, n_sequences: int, n_prompt: int, n_new: int) -> list[float]:
        """Seconds of each step: of the prompt, and then of each token. Prompts share no prefix."""
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n_new, True, False
        prompts = openvino.Tensor(self._tokens(n_sequences, n_prompt))
        result = self._pipeline.generate(prompts, config)
        steps = [microseconds / 1e6 for microseconds in result.perf_metrics.raw_metrics.token_infer_durations]
        if len(steps) != n_new:
            raise RuntimeError(f"{n_new} tokens took {len(steps)} steps")
        return steps


class Transformers(Peer):
    """Transformers with PyTorch. It dequantizes the file's weights to ``dtype`` when it loads them."""

    name = "transformers"
    accepted: ClassVar[Mapping[str, str]] = {"dtype": "bfloat16"}
    _network: Any = None

    def check_installed(self) -> None:
        require(self.name, torch="torch", transformers="transformers", gguf="gguf", accelerate="accelerate")

    def load(self, _: int) -> float:
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        self.close()
        torch.set_num_threads(self._n_threads)
        torch.set_grad_enabled(False)
        started = time.perf_counter()
        self._network = AutoModelForCausalLM.from_pretrained(
            str(self._model.parent),
            gguf_file=self._model.name,
            dtype=getattr(torch, self._options["dtype"]),
            quantization_config=GgufConfig(dequantize=True),
        ).eval()
        self._step(None, 1, 1)
        return time.perf_counter() - started

    def prefill(self, n: int) -> float:
        return n / self._step(None, 1, n)[0]

    def decode(self, depth: int) -> float:
        return 1 / self._median_step(1, depth)

    def crowd(self, n: int) -> float:
        return n / self._median_step(n, 0)

    def close(self) -> None:
        self._network = None

    def _median_step(self, n_sequences: int, depth: int) -> float:
        """Seconds of one token for each sequence, each after ``depth`` tokens."""
        cache = self._step(None, n_sequences, depth)[1] if depth else None
        times = []
        for _ in range(N_DECODED):
            seconds, cache = self._step(cache, n_sequences, 1)
            times.append(seconds)
        return statistics.median(times)

    def _step(self, cache: Any, n_sequences: int, n: int) -> tuple[float, Any]:
        """Run n tokens of each sequence after those in the cache. Returns the seconds and the new cache."""
        import torch

        tokens = torch.from_numpy(self._tokens(n_sequences, n))
        started = time.perf_counter()
        result = self._network(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started, result.past_key_values


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (IkLlama, OpenVino, Transformers)}
OTHER_WEIGHTS = ("transformers",)  # peers whose weights in memory do not have the size of the file's


if __name__ == "__main__":
    peer_name, file, threads, options_json = sys.argv[1:]
    serve(lambda: PEERS[peer_name](Path(file), int(threads), json.loads(options_json)))
