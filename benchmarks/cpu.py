"""Speed of several engines on one machine: load, prefill, decode at depth, many sequences, memory.

    python benchmarks/cpu.py MODEL.gguf ... [--engines native,llamacpp,onnx] [--rounds 5] [--out benchmarks/results]

Each engine runs in a subprocess, with one thread per available core. Engines alternate task by task, so that other load
of the machine affects all of them; waiting processes sleep. The table has medians, and ratios to the engine that
``--against`` names. In each round the memory read rate is measured, too; ``share`` is the share of that rate that
decoding reaches if each token reads all weights once.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slm_core.cpu import usable_cores
from slm_core.gguf import GgufFile

PREFILLS, DEPTHS, CROWDS = (128, 512, 2048), (0, 4096, 8192), (4, 16)
N_DECODED = 16


@dataclass(frozen=True)
class Task:
    """A measurement: name, action and size; higher is better unless ``lower``."""

    name: str
    kind: str
    n: int = 0
    unit: str = "tok/s"
    lower: bool = False


def all_tasks(largest: int) -> list[Task]:
    tasks = [Task("load to first token", "load", unit="s", lower=True)]
    tasks += [Task(f"prefill {n}", "prefill", n) for n in PREFILLS if n <= largest]
    tasks += [Task(f"decode at {n}", "decode", n) for n in DEPTHS if n <= largest]
    tasks += [Task(f"{n} sequences together", "crowd", n) for n in CROWDS]
    return [*tasks, Task("resident memory", "memory", unit="MB", lower=True)]


# The subprocess of one engine.


class Engine:
    """Loads a model and runs tasks with it."""

    def __init__(self, backend: str, model: Path, n_threads: int, n_ctx: int, options: dict[str, Any]) -> None:
        kv_type = options.pop("kv", None)
        self._kv_types = {} if kv_type is None else {"kv_type_k": kv_type, "kv_type_v": kv_type}
        self._arguments = (backend, model, n_threads, options)
        self._n_ctx = n_ctx
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
            n_ctx=self._n_ctx, n_seq_max=max(CROWDS), n_batch=512, **self._kv_types
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
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1e3

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


def serve(engine: Engine) -> None:
    """Run the tasks on standard input; prints one number, or one error, per line."""
    for line in sys.stdin:
        kind, n = json.loads(line)
        try:
            answer: Any = getattr(engine, kind)(n)
        except Exception as error:  # shown in the table
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


# The main process.


class Worker:
    """An engine in a subprocess."""

    def __init__(self, name: str, model: Path, n_threads: int, n_ctx: int) -> None:
        self.name = name
        backend, _, option_text = name.partition("+")
        options = json.dumps(dict(pair.split("=") for pair in option_text.split("+"))) if option_text else "{}"
        command = [sys.executable, __file__, "--serve", backend, str(model), str(n_threads), str(n_ctx), options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, task: Task) -> float | str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([task.kind, task.n]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else f"the process ended with {self._process.wait()}"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


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


@contextlib.contextmanager
def workers(engines: list[str], model: Path, n_threads: int, n_ctx: int) -> Iterator[list[Worker]]:
    of_numpy = [name for name in engines if "tier=reference" in name]  # the environment sets NumPy's threads
    started = [Worker(name, model, 0 if name in of_numpy else n_threads, n_ctx) for name in engines]
    try:
        yield started
    finally:
        for worker in started:
            worker.close()


def measure(model: Path, engines: list[str], rounds: int, largest: int) -> dict[str, Any]:
    """Every task on every engine, alternating; medians, and the spread of the rounds."""
    n_threads = usable_cores()
    tasks = all_tasks(largest)
    n_ctx = max(largest + 64, max(CROWDS) * (N_DECODED + 1), 1024)
    samples: dict[str, dict[str, list[float]]] = {task.name: {name: [] for name in engines} for task in tasks}
    errors: dict[str, str] = {}
    rates = []
    with workers(engines, model, n_threads, n_ctx) as running:
        for i in range(rounds):
            for task in tasks:
                rates.append(read_rate(n_threads))
                for worker in running if i % 2 == 0 else running[::-1]:
                    answer = worker.do(task)
                    print(f"{model.name}  {task.name:22} {worker.name:12} {answer}", file=sys.stderr)
                    if isinstance(answer, str):
                        errors[f"{task.name} / {worker.name}"] = answer
                    else:
                        samples[task.name][worker.name].append(answer)
    with GgufFile.open(model) as file:
        n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
    return {
        "model": model.name,
        "bytes": n_bytes,
        "threads": n_threads,
        "read_rate": statistics.median(rates),
        "tasks": [asdict(task) for task in tasks],
        "found": samples,
        "errors": errors,
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
    values = result["found"]["decode at 0"][name]
    return f"{statistics.median(values) * result['bytes'] / result['read_rate']:.0%}" if values else "-"


def machine() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {usable_cores()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument(
        "--engines", default="native,llamacpp,onnx", help="native, native+kv=f16, onnx+accuracy_level=0, ..."
    )
    parser.add_argument("--against", default="llamacpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=8192, help="longest prompt and deepest decode")
    parser.add_argument("--out", type=Path, help="a folder for the table and the raw numbers")
    options = parser.parse_args()
    engines = options.engines.split(",")
    results = [measure(model, engines, options.rounds, options.largest) for model in options.models]
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
        name, file, threads, cells, options_json = sys.argv[2:]
        serve(Engine(name, Path(file), int(threads), int(cells), json.loads(options_json)))
    else:
        main()
