"""Speed of several engines on one machine: load, prefill, decode at depth, many sequences, memory.

    python benchmarks/cpu.py MODEL.gguf ... [--engines native,llamacpp,onnx] [--rounds 5] [--out benchmarks/results]
    python benchmarks/cpu.py MODEL.gguf --engines native,ik_llama,openvino,transformers \\
        --llama-bench FOLDER/build/bin/llama-bench --python openvino=PYTHON

The engines ik_llama, openvino and transformers are other programs (`cpu_peers.py`); the rest are backends of slm-core.
Each engine runs in a subprocess, with one thread per available core. Engines alternate task by task, so that other load
of the machine affects all of them; waiting processes sleep. The table has medians, and ratios to the engine that
``--against`` names. In each round the memory read rate is measured, too; ``share`` is the share of that rate that
decoding reaches if each token reads all weights once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cpu_peers
import numpy as np
from cpu_peers import N_DECODED, OTHER_WEIGHTS, PEERS
from workers import Task, Worker, in_turn, resident_megabytes, running, serve

from slm_core.cpu import usable_cores
from slm_core.gguf import GgufFile


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts, depths of decoding, and numbers of sequences that decode together."""

    prefills: tuple[int, ...] = (128, 512, 2048)
    depths: tuple[int, ...] = (0, 4096, 8192)
    crowds: tuple[int, ...] = (4, 16)

    def tasks(self) -> list[Task]:
        tasks = [Task("load to first token", "load", unit="s", lower=True)]
        tasks += [Task(f"prefill {n}", "prefill", n) for n in self.prefills]
        tasks += [Task(f"decode at {n}", "decode", n) for n in self.depths]
        tasks += [Task(f"{n} sequences together", "crowd", n) for n in self.crowds]
        return [*tasks, Task("resident memory", "memory", unit="MB", lower=True)]

    def context(self) -> tuple[int, int]:
        """The positions and the sequences that the tasks need."""
        n_seq_max = max(self.crowds, default=1)
        longest = max((*self.prefills, *self.depths), default=0)
        return max(longest + 64, n_seq_max * (N_DECODED + 1), 1024), n_seq_max


# The subprocess of one engine.


class Engine:
    """Loads a model and runs tasks with it."""

    def __init__(
        self, backend: str, model: Path, n_threads: int, context: tuple[int, int], options: dict[str, Any]
    ) -> None:
        kv_type = options.pop("kv", None)
        self._kv_types = {} if kv_type is None else {"kv_type_k": kv_type, "kv_type_v": kv_type}
        self._arguments = (backend, model, n_threads, options)
        self._n_ctx, self._n_seq_max = context
        self._loaded: Any = None
        self._random = np.random.default_rng(0)

    def load(self, _: int) -> float:
        import slm_core as slm

        self.close()
        backend, model, n_threads, options = self._arguments
        threads = {} if n_threads == 0 else {"n_threads": n_threads}
        started = time.perf_counter()
        self._loaded = slm.load(model, backend=backend, device="cpu", **threads, **options)
        self._context = self._loaded.new_context(
            n_ctx=self._n_ctx, n_seq_max=self._n_seq_max, n_batch=512, **self._kv_types
        )
        self._feed(0, 1)
        elapsed = time.perf_counter() - started
        self._context.clear()
        return elapsed

    def prefill(self, n: int) -> float:
        self._context.clear()
        return n / self._feed(0, n)

    def decode(self, depth: int) -> float:
        self._context.clear()
        if depth:
            self._feed(0, depth)
        return 1 / statistics.median(self._feed(0, 1) for _ in range(N_DECODED))

    def crowd(self, n: int) -> float:
        from slm_core.types import Pos

        self._context.clear()
        batch, times = self._context.new_batch(), []
        for step in range(N_DECODED):
            batch.clear()
            for seq_id in range(n):
                batch.add(int(self._random.integers(0, 1000)), Pos(seq_id, step), logits=True)
            started = time.perf_counter()
            self._context.decode(batch)
            times.append(time.perf_counter() - started)
        return n / statistics.median(times)

    def memory(self, _: int) -> float:
        return resident_megabytes()

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()

    def _feed(self, seq_id: int, n: int) -> float:
        from slm_core.types import Pos

        batch, elapsed = self._context.new_batch(), 0.0
        for first in range(0, n, batch.capacity):
            batch.clear()
            tokens = self._random.integers(0, 1000, min(batch.capacity, n - first)).tolist()
            batch.extend(tokens, Pos(seq_id, self._context.length(seq_id)), logits="last")
            started = time.perf_counter()
            self._context.decode(batch)
            elapsed += time.perf_counter() - started
        return elapsed


def engine_of(kind: type[Engine], arguments: list[str]) -> Engine:
    """An engine, of the arguments that `Launcher.command` gives its subprocess."""
    backend, model, n_threads, n_ctx, n_seq_max, options = arguments
    return kind(backend, Path(model), int(n_threads), (int(n_ctx), int(n_seq_max)), json.loads(options))


# The main process.


@dataclass(frozen=True)
class Launcher:
    """How engines start.

    ``interpreters`` are those of engines that do not run in this one, ``llama_bench`` is the program of ik_llama.cpp,
    and ``script`` is the program that serves backends of slm-core.
    """

    interpreters: dict[str, str] = field(default_factory=dict)
    llama_bench: str = "llama-bench"
    script: str = __file__

    def command(self, name: str, model: Path, n_threads: int, context: tuple[int, int]) -> list[str]:
        """The command of the engine ``NAME`` or ``NAME+OPTION=VALUE+...``."""
        base, _, option_text = name.partition("+")
        options = dict(pair.split("=", 1) for pair in option_text.split("+")) if option_text else {}
        python = self.interpreters.get(base, sys.executable)
        if base in PEERS:
            if base == "ik_llama":
                options.setdefault("program", self.llama_bench)
            return [python, cpu_peers.__file__, base, str(model), str(n_threads), json.dumps(options)]
        is_numpy = options.get("tier") == "reference"  # the environment sets NumPy's threads
        sizes = [str(0 if is_numpy else n_threads), *map(str, context)]
        return [python, self.script, "--serve", base, str(model), *sizes, json.dumps(options)]


def read_rate(n_threads: int, n_bytes: int = 1 << 29) -> float:
    """Bytes per second that ``n_threads`` can read from memory, without caches."""
    parts = np.array_split(np.ones(n_bytes // 8), n_threads)
    threads = [threading.Thread(target=np.max, args=(part,)) for part in parts]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return n_bytes / (time.perf_counter() - started)


class Samples:
    """The numbers of each task on each engine, and the errors."""

    def __init__(self, tasks: list[Task], engines: list[str]) -> None:
        self.found: dict[str, dict[str, list[float]]] = {task.name: {name: [] for name in engines} for task in tasks}
        self.errors: dict[str, str] = {}
        self._without_model: set[str] = set()

    def take(self, task: Task, workers: Iterable[Worker], about: str) -> None:
        """Run a task on one engine after another. An engine that could not load the model does nothing else."""
        for worker in workers:
            if task.kind == "load":
                self._without_model.discard(worker.name)
            if worker.name in self._without_model:
                continue
            answer = worker.do(task)
            print(f"{about}  {task.name:22} {worker.name:12} {answer}", file=sys.stderr)
            if isinstance(answer, str):
                self.errors[f"{task.name} / {worker.name}"] = answer
                if task.kind == "load":
                    self._without_model.add(worker.name)
            elif answer is not None:
                self.found[task.name][worker.name].append(answer)


def measure(model: Path, engines: list[str], launcher: Launcher, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """Every task on every engine, alternating; the numbers of all rounds."""
    n_threads, tasks, rates = usable_cores(), sizes.tasks(), []
    samples = Samples(tasks, engines)
    commands = {name: launcher.command(name, model, n_threads, sizes.context()) for name in engines}
    with running(commands) as workers:
        for i in range(rounds):
            for task in tasks:
                rates.append(read_rate(n_threads))
                samples.take(task, in_turn(workers, i), model.name)
    with GgufFile.open(model) as file:
        n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
    return {
        "model": model.name,
        "bytes": n_bytes,
        "threads": n_threads,
        "read_rate": statistics.median(rates),
        "tasks": [asdict(task) for task in tasks],
        "found": samples.found,
        "errors": samples.errors,
    }


def table(result: dict[str, Any], engines: list[str], against: str) -> str:
    """Medians and ratios, in Markdown."""
    competitors = [name for name in engines if name != against]
    head = ["", *engines, *(f"{name} / {against}" for name in competitors)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for task in result["tasks"]:
        medians = {name: statistics.median(values) for name, values in result["found"][task["name"]].items() if values}
        cells = [f"{medians[name]:.4g} {task['unit']}" if name in medians else "-" for name in engines]
        ratios = [_ratio(medians, name, against) for name in competitors]
        lines.append(f"| {' | '.join([task['name'], *cells, *ratios])} |")
    shares = [_share(result, name) for name in engines]
    lines.append(f"| {' | '.join(['share of the read rate', *shares, *('' for _ in competitors)])} |")
    about = f"**{result['model']}**, {result['bytes'] / 1e6:.0f} MB of weights, {result['threads']} threads, memory"
    return f"{about} read at {result['read_rate'] / 1e9:.1f} GB/s\n\n" + "\n".join(lines)


def _ratio(medians: dict[str, float], name: str, against: str) -> str:
    return f"{medians[name] / medians[against]:.2f}" if name in medians and against in medians else "-"


def _share(result: dict[str, Any], name: str) -> str:
    values = result["found"].get("decode at 0", {}).get(name)
    if name.partition("+")[0] in OTHER_WEIGHTS:
        return "-"
    return f"{statistics.median(values) * result['bytes'] / result['read_rate']:.0%}" if values else "-"


def machine() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {usable_cores()} cores"


def numbers(text: str) -> tuple[int, ...]:
    """A list of sizes on the command line; an empty text is an empty list."""
    return tuple(int(number) for number in text.split(",") if number)


def add_engine_options(parser: argparse.ArgumentParser, engines: str) -> None:
    parser.add_argument("--engines", default=engines, help="native, native+kv=q8_0, openvino+kv=u8, ... (%(default)s)")
    parser.add_argument("--llama-bench", default="llama-bench", help="the program of ik_llama.cpp (%(default)s)")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PYTHON",
        help="the interpreter of an engine, if it is not this one",
    )


def launcher_of(options: argparse.Namespace) -> Launcher:
    interpreters = {}
    for text in options.python:
        engine, _, python = text.partition("=")
        if engine not in {name.partition("+")[0] for name in options.engines.split(",")} or not shutil.which(python):
            raise SystemExit(f"--python {text}: it needs one of the engines {options.engines}, and an interpreter")
        interpreters[engine] = python
    return Launcher(interpreters, options.llama_bench)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    add_engine_options(parser, "native,llamacpp,onnx")
    parser.add_argument("--against", default="llamacpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefills", type=numbers, default=Sizes.prefills, help="tokens of prompts, as 128,512,2048")
    parser.add_argument("--depths", type=numbers, default=Sizes.depths, help="depths of decoding, as 0,4096,8192")
    parser.add_argument("--crowds", type=numbers, default=Sizes.crowds, help="sequences that decode together, as 4,16")
    parser.add_argument("--out", type=Path, help="a folder for the table and the raw numbers")
    options = parser.parse_args()
    engines, launcher = options.engines.split(","), launcher_of(options)
    sizes = Sizes(options.prefills, options.depths, options.crowds)
    results = [measure(model, engines, launcher, options.rounds, sizes) for model in options.models]
    page = f"{machine()}; {datetime.date.today()}; medians of {options.rounds} turns\n\n"
    page += "\n\n".join(table(result, engines, options.against) for result in results) + "\n"
    print(page)
    for result in results:
        for task_and_engine, error in result["errors"].items():
            print(f"{result['model']}: {task_and_engine}: {error}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"cpu-{datetime.date.today()}"
        stem.with_suffix(".md").write_text(page)
        stem.with_suffix(".json").write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(usable_cores()))
        serve(lambda: engine_of(Engine, sys.argv[2:]))
    else:
        main()
