"""``slm bench``: measures the speed of a model on a backend."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from slm_core.cli import options as o
from slm_core.cli.terminal import out, print_json
from slm_core.model import Model
from slm_core.protocols import Context
from slm_core.types import Pos

_SEED = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The measurements.

    Attributes:
        model: the file.
        backend: the backend that ran it.
        device: the device that ran it.
        threads: CPU threads; None for the backend's default.
        load_s: seconds to load.
        prompt_tokens: tokens of a prefill.
        new_tokens: tokens that were decoded one by one.
        prefill: tokens per second of the prefill, in each round.
        decode: tokens per second of decoding, in each round.
    """

    model: str
    backend: str
    device: str
    threads: int | None
    load_s: float
    prompt_tokens: int
    new_tokens: int
    prefill: list[float]
    decode: list[float]

    def as_json(self) -> dict[str, object]:
        """The result with the medians."""
        medians = {f"{name}_median": statistics.median(getattr(self, name)) for name in ("prefill", "decode")}
        return dataclasses.asdict(self) | medians


@o.expand_groups
def bench(
    *,
    model: o.ModelPath = None,
    engine: o.EngineOptions,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of the prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens decoded one by one.")] = 64,
    kv_type: o.KvTypeFlag = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds, after one warm-up round.")] = 3,
    as_json: o.AsJson = False,
) -> None:
    """Measure prefill and decode in tokens per second: random prompt, greedy choice, one sequence."""
    kv_types = o.read_kv_types(kv_type)
    started = time.perf_counter()
    with engine.load(model) as loaded:
        load_s = time.perf_counter() - started
        prefill, decode = _measure(loaded, prompt_tokens, new_tokens, rounds, kv_types)
        info = loaded.info
    result = Result(
        str(info.path), info.backend, info.device, engine.threads, load_s, prompt_tokens, new_tokens, prefill, decode
    )
    if as_json:
        print_json(result.as_json())
    else:
        _print(result)


def _measure(
    loaded: Model, prompt_tokens: int, new_tokens: int, rounds: int, kv_types: o.KvTypes
) -> tuple[list[float], list[float]]:
    """Tokens per second of prefill and decode in each round."""
    prompt = np.random.default_rng(_SEED).integers(0, loaded.vocab.size, prompt_tokens)
    prefill, decode = [], []
    with loaded.new_context(n_ctx=prompt_tokens + new_tokens, n_batch=min(prompt_tokens, 512), **kv_types) as context:
        for _ in range(rounds + 1):
            context.clear()
            started = time.perf_counter()
            token = _prefill(context, prompt)
            half = time.perf_counter()
            _decode(context, token, prompt_tokens, new_tokens)
            ended = time.perf_counter()
            prefill.append(prompt_tokens / (half - started))
            decode.append(new_tokens / (ended - half))
    return prefill[1:], decode[1:]


def _prefill(context: Context, prompt: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Decode the prompt in batches; returns the likeliest next token."""
    batch = context.new_batch()
    for start in range(0, len(prompt), batch.capacity):
        batch.clear()
        batch.extend(prompt[start : start + batch.capacity], Pos(0, start), logits="last")
        row = context.decode(batch)[0]
    return int(row.argmax())


def _decode(context: Context, token: int, start: int, count: int) -> None:
    batch = context.new_batch(1)
    for index in range(start, start + count):
        batch.clear()
        batch.add(token, Pos(0, index), logits=True)
        token = int(context.decode(batch)[0].argmax())


def _print(result: Result) -> None:
    console = out()
    console.print(
        f"{result.model} on {result.backend}, {result.device}; loaded in {result.load_s:.2f} s", soft_wrap=True
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("tokens", "median tokens/s", "slowest", "fastest"):
        table.add_column(column, justify="right")
    for name, count, rates in (
        ("prefill", result.prompt_tokens, result.prefill),
        ("decode", result.new_tokens, result.decode),
    ):
        table.add_row(name, str(count), *(f"{rate:.1f}" for rate in (statistics.median(rates), min(rates), max(rates))))
    console.print(table)
