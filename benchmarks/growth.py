"""How speed, memory and load time grow: with the number of sequences, the length of the context, and the model.

    python benchmarks/growth.py MODEL.gguf [--models MODEL.gguf ...] [--sequences 1,2,4] [--contexts 512,1024] \\
        [--engines native,llamacpp] [--rounds 2] [--out benchmarks/results]

Sequences and contexts are measured with the first model, and each of ``--models`` with one prompt. An empty list leaves
its part out. Engines take turns task by task, as in `cpu.py`, which has the other comparisons. A context grows in one
go: its tokens are fed up to the first length, some are decoded there, more are fed up to the next length, and so on.
`growth_pictures.py` draws the JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from cpu import Engine, Launcher, Samples, engine_of, machine, numbers
from cpu_peers import N_DECODED, PEERS
from workers import Task, Worker, in_turn, running, serve

from slm_core.cpu import usable_cores
from slm_core.gguf import GgufFile


class GrowingEngine(Engine):
    """An engine whose only sequence keeps growing."""

    _n_fed, _seconds = 0, 0.0

    def extend(self, n: int) -> float:
        """Feed the sequence up to n tokens. Returns tokens per second of all tokens that were fed so far."""
        n_new = n - self._context.length(0)
        self._seconds += self._feed(0, n_new)
        self._n_fed += n_new
        return self._n_fed / self._seconds

    def decode_here(self, _: int) -> float:
        """Tokens per second of decoding at the end of the sequence."""
        return 1 / statistics.median(self._feed(0, 1) for _ in range(N_DECODED))


@dataclass(frozen=True)
class Curve:
    """What is measured at each point of a part."""

    name: str
    kind: str
    unit: str = "tok/s"
    lower: bool = False

    def task(self, point: str, n: int) -> Task:
        return Task(f"{self.name}, {point}", self.kind, n, self.unit, self.lower)


MEMORY = Curve("resident memory", "memory", "MB", lower=True)
OF_SEQUENCES = (Curve("together", "crowd"),)
OF_CONTEXTS = (Curve("prefill", "extend"), Curve("decode", "decode_here"), MEMORY)
OF_MODELS = (
    Curve("load to first token", "load", "s", lower=True),
    Curve("prefill", "prefill"),
    Curve("decode", "decode"),
    MEMORY,
)
LOAD = Task("load", "load", unit="s", lower=True)


@dataclass(frozen=True)
class Program:
    """The engines, and how often they take turns."""

    engines: list[str]
    rounds: int

    @contextlib.contextmanager
    def loaded(self, model: Path, context: tuple[int, int], samples: Samples) -> Iterator[list[Worker]]:
        """Workers of all engines, with the model in memory."""
        launcher = Launcher(script=__file__)
        commands = {name: launcher.command(name, model, usable_cores(), context) for name in self.engines}
        with running(commands) as workers:
            samples.take(LOAD, workers, model.name)
            yield workers

    def sequences(self, model: Path, counts: tuple[int, ...]) -> dict[str, Any]:
        points = {str(n): float(n) for n in counts}
        samples = self._samples(OF_SEQUENCES, points)
        with self.loaded(model, (max(1024, max(counts) * (N_DECODED + 1)), max(counts)), samples) as workers:
            for i in range(self.rounds):
                for n in counts:
                    for curve in OF_SEQUENCES:
                        samples.take(curve.task(str(n), n), in_turn(workers, i), model.name)
        return part("sequences", model.name, points, OF_SEQUENCES, samples)

    def contexts(self, model: Path, lengths: tuple[int, ...]) -> dict[str, Any]:
        points = {str(n): float(n) for n in lengths}
        samples = self._samples(OF_CONTEXTS, points)
        for i in range(self.rounds):  # new processes, so that no memory is left of an earlier round
            with self.loaded(model, (max(lengths) + 64, 1), samples) as workers:
                for n in lengths:
                    for curve in OF_CONTEXTS:
                        samples.take(curve.task(str(n), n), in_turn(workers, i), model.name)
        return part("contexts", model.name, points, OF_CONTEXTS, samples)

    def models(self, models: list[Path], n_prompt: int) -> dict[str, Any]:
        points = {model.stem: n_parameters(model) for model in models}
        samples = self._samples(OF_MODELS, points)
        sizes = {"prefill": n_prompt}  # the other tasks start with an empty context
        for model in models:
            with self.loaded(model, (max(1024, n_prompt + 64), 1), samples) as workers:
                for i in range(self.rounds):
                    for curve in OF_MODELS:
                        task = curve.task(model.stem, sizes.get(curve.kind, 0))
                        samples.take(task, in_turn(workers, i), model.name)
        return part("models", f"prompts of {n_prompt} tokens", points, OF_MODELS, samples)

    def _samples(self, curves: tuple[Curve, ...], points: dict[str, float]) -> Samples:
        return Samples([LOAD, *(curve.task(point, 0) for curve in curves for point in points)], self.engines)


def part(
    name: str, about: str, points: dict[str, float], curves: tuple[Curve, ...], samples: Samples
) -> dict[str, Any]:
    """One part of the JSON file: the points, and for each curve and engine the numbers of all rounds at each point."""

    def found(curve: Curve) -> dict[str, list[list[float]]]:
        by_engine = [samples.found[curve.task(point, 0).name] for point in points]
        return {engine: [numbers_of[engine] for numbers_of in by_engine] for engine in by_engine[0]}

    in_json = [asdict(curve) | {"found": found(curve)} for curve in curves]
    return {"part": name, "about": about, "points": points, "curves": in_json, "errors": samples.errors}


def n_parameters(model: Path) -> float:
    with GgufFile.open(model) as file:
        return float(sum(prod(tensor.shape) for tensor in file.tensors.values()))


def table(result: dict[str, Any], engines: list[str]) -> str:
    """Medians of a part in Markdown, and ratios to the last engine."""
    *others, last = engines
    head = [result["part"]]
    for curve in result["curves"]:
        head += [f"{curve['name']} ({curve['unit']}): {engines[0]}", *engines[1:]]
        head += [f"{name} / {last}" for name in others]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for i, point in enumerate(result["points"]):
        cells = [point]
        for curve in result["curves"]:
            medians = {name: statistics.median(found[i]) for name, found in curve["found"].items() if found[i]}
            cells += [f"{medians[name]:.4g}" if name in medians else "-" for name in engines]
            cells += [
                f"{medians[name] / medians[last]:.2f}" if {name, last} <= medians.keys() else "-" for name in others
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return f"**{result['part']}**, {result['about']}\n\n" + "\n".join(lines)


def lengths(text: str) -> tuple[int, ...]:
    stated = tuple(sorted(numbers(text)))
    if any(b - a <= N_DECODED for a, b in zip((0, *stated), stated, strict=False)):
        raise argparse.ArgumentTypeError(f"lengths have to be more than {N_DECODED} tokens apart: {text}")
    return stated


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="for sequences and contexts")
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="models to compare by size")
    parser.add_argument("--engines", default="native,llamacpp", help="backends of slm-core; ratios are to the last one")
    parser.add_argument("--sequences", type=numbers, default=(1, 2, 4, 8, 16, 32, 64), help="as 1,4,16")
    parser.add_argument(
        "--contexts", type=lengths, default=(512, 1024, 2048, 4096, 8192, 16384, 32768), help="in tokens"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt for --models (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a folder for the tables and the raw numbers")
    options = parser.parse_args()
    peers = PEERS.keys() & {name.partition("+")[0] for name in options.engines.split(",")}
    if peers:
        parser.error(f"{', '.join(sorted(peers))}: only backends of slm-core keep a growing sequence")
    return options


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    program = Program(options.engines.split(","), options.rounds)
    parts = []
    if options.sequences:
        parts.append(program.sequences(options.model, options.sequences))
    if options.contexts:
        parts.append(program.contexts(options.model, options.contexts))
    if options.models:
        parts.append(program.models(options.models, options.prompt))
    return parts


def main() -> None:
    options = read_options()
    parts = measure(options)
    title = f"{machine()}; {datetime.date.today()}; medians of {options.rounds} turns"
    page = "\n\n".join([title, *(table(result, options.engines.split(",")) for result in parts)]) + "\n"
    print(page)
    for result in parts:
        for task_and_engine, error in result["errors"].items():
            print(f"{result['part']}: {task_and_engine}: {error}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"growth-{datetime.date.today()}"
        stem.with_suffix(".md").write_text(page)
        stem.with_suffix(".json").write_text(json.dumps({"title": title, "parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(usable_cores()))
        serve(lambda: engine_of(GrowingEngine, sys.argv[2:]))
    else:
        main()
