"""The engine beside a bare decode loop and llama-cpp-python: many prompts, shared prompts, a long prompt among answers.

    python benchmarks/engine.py MODEL.gguf [--backend native] [--rounds 3] [--prompts 64] [--out benchmarks/results]

All run in one process with as many threads as there are cores, and take turns. Prompts are random tokens of fixed
length, answers are greedy and of fixed length. llama-cpp-python answers one prompt after another, as its users do.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cpu import machine

import slm_core as slm
from slm_core.cpu import usable_cores
from slm_core.types import Pos

N_PROMPT, N_ANSWER, N_STREAMS = 128, 128, 16


def random_prompts(n: int, length: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(10, 1000, length).tolist() for _ in range(n)]


def fixed(model: slm.LoadedModel, n: int) -> slm.Sampling:
    """Greedy answers of ``n`` tokens: whatever ends an answer is excluded."""
    return slm.Sampling(temperature=0, max_tokens=n, logit_bias=dict.fromkeys(model.vocab.eog_ids, -100.0))


class Ours:
    """What is measured of slm-core."""

    def __init__(self, model: slm.LoadedModel, n_prompts: int) -> None:
        self._model = model
        self._n_prompts = n_prompts

    def bare_loop(self, seed: int) -> float:
        """Tokens per second of 16 sequences in a loop over ``Context.decode``, each its likeliest tokens."""
        prompts = random_prompts(N_STREAMS, N_PROMPT, seed)
        n_ctx = N_STREAMS * (N_PROMPT + N_ANSWER)
        with self._model.new_context(n_ctx=n_ctx, n_seq_max=N_STREAMS, n_batch=512) as context:
            batch, rows = context.new_batch(), []
            started = time.perf_counter()
            for first in range(0, N_STREAMS, 4):
                batch.clear()
                for seq_id in range(first, first + 4):
                    batch.extend(prompts[seq_id], Pos(seq_id, 0), logits="last")
                rows.append(context.decode(batch).copy())
            tokens = np.concatenate(rows).argmax(axis=1)
            for step in range(N_ANSWER - 1):
                batch.clear()
                for seq_id, token in enumerate(tokens.tolist()):
                    batch.add(token, Pos(seq_id, N_PROMPT + step), logits=True)
                tokens = context.decode(batch).argmax(axis=1)
            return N_STREAMS * N_ANSWER / (time.perf_counter() - started)

    def streams(self, seed: int) -> float:
        """The same by ``generate``."""
        return self._generated(random_prompts(N_STREAMS, N_PROMPT, seed))

    def many(self, seed: int) -> float:
        """Tokens per second of many prompts by ``generate``."""
        return self._generated(random_prompts(self._n_prompts, N_PROMPT, seed))

    def _generated(self, prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        answers = self._model.generate(prompts, fixed(self._model, N_ANSWER), n_parallel=N_STREAMS, progress=False)
        return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - started)

    def shared_prompt(self, seed: int) -> tuple[float, float]:
        """16 prompts with 2,048 tokens in common come at once: 95th percentile of seconds to the first token, and that
        of the same prompts without anything in common."""
        (shared,), tails = random_prompts(1, 2048, seed), random_prompts(16, 16, seed + 1)
        together = self._first_tokens([[*shared, *tail] for tail in tails])
        apart = self._first_tokens(random_prompts(16, 2064, seed + 2))
        return together, apart

    def _first_tokens(self, prompts: list[list[int]]) -> float:
        with self._model.engine(n_ctx=40_000) as engine:
            streams = [engine.submit(prompt, fixed(self._model, 2)) for prompt in prompts]
            seconds = [stream.run().timings.first_token_s or 0.0 for stream in streams]
        return float(np.percentile(seconds, 95))

    def long_prompt(self, seed: int) -> tuple[float, float]:
        """A prompt of 4,096 tokens comes while 8 streams decode: the 99th percentile of their gaps, and its first token
        over that of the same prompt alone."""
        (prompt,) = random_prompts(1, 4096, seed)
        with self._model.engine(n_ctx=16_000) as engine:
            alone = engine.submit(prompt, fixed(self._model, 1), salt="alone").run().timings.first_token_s or 0.0
            times: list[list[float]] = []
            streams = []
            for other in random_prompts(8, 32, seed + 1):
                mine: list[float] = []
                times.append(mine)

                def note(event: slm.Event, draft: slm.Draft, mine: list[float] = mine) -> slm.StoppingAction:
                    mine.append(time.perf_counter())
                    return slm.StoppingAction.NEXT

                streams.append(engine.submit(other, fixed(self._model, 1000), stopping_criteria=[note]))
            while not all(times):
                time.sleep(0.01)
            begun = time.perf_counter()
            among = engine.submit(prompt, fixed(self._model, 1), salt="among").run().timings.first_token_s or 0.0
            ended = time.perf_counter()
            for stream in streams:
                stream.cancel()
        gaps = [b - a for mine in times for a, b in itertools.pairwise(mine) if a >= begun and b <= ended]
        return float(np.percentile(gaps, 99)), among / alone


def one_by_one(path: Path, n_prompts: int) -> Callable[[int], float]:
    """Tokens per second of llama-cpp-python, one prompt after another."""
    import llama_cpp

    llama = llama_cpp.Llama(str(path), n_ctx=512, n_threads=usable_cores(), verbose=False)

    def measure(seed: int) -> float:
        started, n = time.perf_counter(), 0
        for prompt in random_prompts(n_prompts, N_PROMPT, seed):
            for i, _ in enumerate(llama.generate(prompt, temp=0.0), 1):
                n += 1
                if i == N_ANSWER:
                    break
        return n / (time.perf_counter() - started)

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--out", type=Path, help="a folder for the table")
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    with slm.load(options.model, backend=options.backend, n_threads=usable_cores()) as model:
        ours = Ours(model, options.prompts)
        llama = one_by_one(options.model, max(1, options.prompts // 8))
        for turn in range(options.rounds):
            seed = 1000 * turn
            bare, streams = ours.bare_loop(seed), ours.streams(seed)
            many, single = ours.many(seed + 1), llama(seed + 1)
            together, apart = ours.shared_prompt(seed + 2)
            gap, share = ours.long_prompt(seed + 3)
            measured = {
                "16 streams of 128 + 128, tokens/s": streams,
                "the same in a bare decode loop, tokens/s": bare,
                "16 streams over the bare loop": streams / bare,
                f"generate of {options.prompts} prompts, tokens/s": many,
                "llama-cpp-python one by one, tokens/s": single,
                f"generate of {options.prompts} prompts over llama-cpp-python": many / single,
                "16 prompts share 2,048 tokens: first token p95, s": together,
                "16 prompts share nothing: first token p95, s": apart,
                "shared over not shared": together / apart,
                "8 streams, a 4,096-token prompt comes: gap p99, ms": gap * 1e3,
                "that prompt's first token over alone": share,
            }
            for name, value in measured.items():
                rows.setdefault(name, []).append(value)
                print(f"{turn}  {name}: {value:.4g}", flush=True)
    page = f"{machine()}; {datetime.date.today()}; {options.model.name}; medians of {options.rounds} turns\n\n"
    page += "| | median | from | to |\n|---|---|---|---|\n"
    for name, values in rows.items():
        page += f"| {name} | {statistics.median(values):.4g} | {min(values):.4g} | {max(values):.4g} |\n"
    print(page)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"engine-{datetime.date.today()}.md").write_text(page)


if __name__ == "__main__":
    main()
