"""The engine compared with a bare decode loop, llama-cpp-python, llama-server and transformers.

    python benchmarks/engine.py MODEL.gguf [--backend native] [--rounds 3] [--prompts 64] [--out benchmarks/results]
        [--llama-server PROGRAM] [--transformers] [--memory]

All engines take turns and use one thread per core. Prompts are random tokens of fixed length; answers are greedy and of
fixed length. llama-cpp-python answers one prompt after another. llama-server answers over HTTP
(``benchmarks/http_servers.py``); the engine runs in this process. transformers reads the same file (this needs
accelerate) and answers all prompts as one batch.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
from cpu import machine
from http_servers import HttpServer, LlamaServer

import slm_core as slm
from slm_core.cpu import usable_cores
from slm_core.types import Pos

N_PROMPT, N_ANSWER, N_STREAMS = 128, 128, 16
N_CTX, N_SHARED, N_LONG = 32768, 2048, 4096
N_ALONE = 9
N_ASKED, N_SAID = 96, 32
CHATS_CTX = 8 * 6 * (N_ASKED + N_SAID) + 64
SMALL_BATCH = 64
MEMORY_CTX = 8000


def random_prompts(n: int, length: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(10, 1000, length).tolist() for _ in range(n)]


def fixed(model: slm.Model, n: int) -> slm.Sampling:
    """Greedy answers of ``n`` tokens: EOG tokens are excluded."""
    return slm.Sampling(temperature=0, max_tokens=n, logit_bias=dict.fromkeys(model.vocab.eog_ids, -100.0))


class Ours:
    """The measurements of slm-core."""

    def __init__(self, model: slm.Model, n_prompts: int) -> None:
        self._model = model
        self._n_prompts = n_prompts

    def bare_loop(self, seed: int) -> float:
        """Tokens per second of 16 sequences in a loop over ``Context.decode``, with the likeliest tokens."""
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
        """Tokens per second of the same sequences with ``generate``."""
        return self._generated(random_prompts(N_STREAMS, N_PROMPT, seed))

    def many(self, seed: int) -> float:
        """Tokens per second of many prompts with ``generate``."""
        return self._generated(random_prompts(self._n_prompts, N_PROMPT, seed))

    def _generated(self, prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        answers = self._model.generate(prompts, fixed(self._model, N_ANSWER), n_parallel=N_STREAMS, progress=False)
        return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - started)

    def shared_prompt(self, seed: int) -> tuple[float, float]:
        """95th percentiles of seconds to the first token, cold and warm: 16 prompts that share 2,048 tokens arrive at
        once, then 16 more."""
        cold, warm = shared_prompts(seed)
        with self._model.engine(n_ctx=40_000) as engine:
            return self._first_token(engine, cold), self._first_token(engine, warm)

    def apart(self, seed: int) -> float:
        """95th percentile of seconds to the first token of 16 prompts of the same length that share nothing."""
        with self._model.engine(n_ctx=40_000) as engine:
            return self._first_token(engine, random_prompts(16, N_SHARED + 16, seed))

    def _first_token(self, engine: slm.Engine, prompts: list[list[int]]) -> float:
        streams = [engine.submit(prompt, fixed(self._model, 2)) for prompt in prompts]
        return float(np.percentile([stream.run().timings.first_token_s or 0.0 for stream in streams], 95))

    def chats(self, seed: int) -> float:
        """Median of seconds to the first token in 32 chats of 6 turns, if the context has room for 8 chats."""
        with tempfile.TemporaryDirectory() as folder, self._model.engine(n_ctx=CHATS_CTX, cache_dir=folder) as engine:

            def ask(history: list[int]) -> tuple[float, list[int]]:
                answer = engine.submit(history, fixed(self._model, N_SAID)).run()
                return answer.timings.first_token_s or 0.0, list(answer.tokens)

            return median_of_chats(ask, seed)

    def cancelled(self, seed: int) -> int:
        """Rows that are computed for cancelled requests after the step that runs when they are cancelled."""
        n_rows = 0
        with self._model.engine(n_ctx=N_CTX, prefix_cache=False) as engine:
            for n_read, prompt in enumerate(random_prompts(16, N_PROMPT, seed), 1):
                stream = engine.submit(prompt, fixed(self._model, 1000))
                for _ in itertools.islice(stream, n_read):
                    pass
                stream.cancel()
                n_computed = engine.stats().computed_tokens
                stream.run()
                n_rows += max(0, engine.stats().computed_tokens - n_computed - 1)  # the running step has one row
        return n_rows

    def memory(self, seed: int) -> float:
        """MiB that 500 different prompts of 1,000 tokens add to the resident memory, without the KV cache.

        The KV cache of ``MEMORY_CTX`` positions is full before they come.
        """
        prompts = random_prompts(500, 1000, seed)
        with self._model.engine(n_ctx=MEMORY_CTX) as engine:
            for prompt in random_prompts(MEMORY_CTX // 1000 + 1, 1000, seed + 1):
                engine.submit(prompt, fixed(self._model, 1)).run()
            before = engine.stats().rss_bytes or 0
            for first in range(0, len(prompts), 16):
                for stream in [engine.submit(prompt, fixed(self._model, 1)) for prompt in prompts[first : first + 16]]:
                    stream.run()
            return ((engine.stats().rss_bytes or 0) - before) / 2**20

    def long_prompt(self, seed: int) -> tuple[float, float]:
        """A prompt of 4,096 tokens arrives while 8 streams decode: the 99th percentile of their gaps, and its time to
        the first token relative to the same prompt alone."""
        (prompt,) = random_prompts(1, N_LONG, seed)
        with self._model.engine(n_ctx=16_000) as engine:
            alone = engine.submit(prompt, fixed(self._model, 1), salt="alone").run().timings.first_token_s or 0.0
            times: list[list[float]] = []
            streams = []
            for other in random_prompts(8, 32, seed + 1):
                stream_times: list[float] = []
                times.append(stream_times)

                def note(
                    event: slm.Event, draft: slm.Draft, stream_times: list[float] = stream_times
                ) -> slm.StoppingAction:
                    stream_times.append(time.perf_counter())
                    return slm.StoppingAction.NEXT

                streams.append(engine.submit(other, fixed(self._model, 1000), stopping_criteria=[note]))
            while not all(times):
                time.sleep(0.01)
            begun = time.perf_counter()
            among = engine.submit(prompt, fixed(self._model, 1), salt="among").run().timings.first_token_s or 0.0
            ended = time.perf_counter()
            for stream in streams:
                stream.cancel()
        gaps = [
            b - a for stream_times in times for a, b in itertools.pairwise(stream_times) if b >= begun and a <= ended
        ]
        return float(np.percentile(gaps, 99)), among / alone


def shared_prompts(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Twice 16 prompts; all share 2,048 tokens, and have 16 tokens of their own."""
    (shared,), tails = random_prompts(1, N_SHARED, seed), random_prompts(32, 16, seed + 1)
    prompts = [[*shared, *tail] for tail in tails]
    return prompts[:16], prompts[16:]


def median_of_chats(ask: Callable[[list[int]], tuple[float, list[int]]], seed: int) -> float:
    """Median of ``ask``'s seconds over 32 chats of 6 turns on 8 threads; a thread alternates between its chats."""

    def four_chats(number: int) -> list[float]:
        histories: list[list[int]] = [[] for _ in range(4)]
        seconds = []
        for turn in range(6):
            questions = random_prompts(4, N_ASKED, seed + 100 * number + turn)
            for history, question in zip(histories, questions, strict=True):
                history += question
                took_s, tokens = ask(list(history))
                seconds.append(took_s)
                history += tokens
        return seconds

    with ThreadPoolExecutor(8) as threads:
        return statistics.median(itertools.chain.from_iterable(threads.map(four_chats, range(8))))


class OverHttp:
    """The same measurements of a server, restarted for each.

    Args:
        start: starts the server; gets the numbers of positions and of parallel requests.
    """

    def __init__(self, start: Callable[[int, int], HttpServer]) -> None:
        self._start = start

    def streams(self, seed: int) -> float:
        """Tokens per second of 16 streams."""
        with self._start(N_CTX, N_STREAMS) as server:
            started = time.perf_counter()
            server.together(random_prompts(N_STREAMS, N_PROMPT, seed), N_ANSWER)
            return N_STREAMS * N_ANSWER / (time.perf_counter() - started)

    def one_stream(self, seed: int) -> float:
        """Median of seconds to the first token of prompts that come one after another, after a warm-up prompt."""
        with self._start(N_CTX, N_STREAMS) as server:
            first, *others = random_prompts(1 + N_ALONE, N_PROMPT, seed)
            server.stream(first, 1)
            return statistics.median(server.stream(prompt, 1).first_token_s for prompt in others)

    def shared_prompt(self, seed: int) -> tuple[float, float]:
        """95th percentiles of seconds to the first token, cold and warm."""
        cold, warm = shared_prompts(seed)
        with self._start(40_000, 16) as server:
            return self._first_token(server, cold), self._first_token(server, warm)

    @staticmethod
    def _first_token(server: HttpServer, prompts: list[list[int]]) -> float:
        return float(np.percentile([each.first_token_s for each in server.together(prompts, 2)], 95))

    def long_prompt(self, seed: int) -> float:
        """The 99th percentile of the gaps of 8 streams while a prompt of 4,096 tokens is computed."""
        (prompt,), others = random_prompts(1, N_LONG, seed), random_prompts(8, 32, seed + 1)
        all_times: list[list[float]] = [[] for _ in others]
        over = Event()
        with self._start(16_000, 16) as server, ThreadPoolExecutor(8) as threads:
            streams = [
                threads.submit(server.stream, other, 1000, times, over)
                for other, times in zip(others, all_times, strict=True)
            ]
            while not all(all_times):
                time.sleep(0.01)
            begun, ended, _ = server.stream(prompt, 1)
            over.set()
            for stream in streams:
                stream.result()
        pairs = [pair for times_of_stream in all_times for pair in itertools.pairwise(times_of_stream)]
        return float(np.percentile([b - a for a, b in pairs if b >= begun and a <= ended[0]], 99))

    def chats(self, seed: int) -> float:
        """The median of seconds to the first token; llama-server stores other chats in up to 8 GiB of memory."""
        with self._start(CHATS_CTX, 8) as server:

            def ask(history: list[int]) -> tuple[float, list[int]]:
                arrivals = server.stream(history, N_SAID)
                return arrivals.first_token_s, arrivals.tokens

            return median_of_chats(ask, seed)


def llama_server(program: Path, model: Path, n_batch: int | None = None) -> OverHttp:
    """The measurements of llama-server."""
    return OverHttp(lambda n_ctx, n_parallel: LlamaServer(program, model, n_ctx, n_parallel, n_batch))


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


def as_one_batch(path: Path, n_prompts: int) -> Callable[[int], float]:
    """Tokens per second of transformers, all prompts in one batch."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(usable_cores())
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    length = {"min_new_tokens": N_ANSWER, "max_new_tokens": N_ANSWER}

    def measure(seed: int) -> float:
        prompts = torch.tensor(random_prompts(n_prompts, N_PROMPT, seed))
        started = time.perf_counter()
        tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), **length)
        return (tokens.shape[1] - N_PROMPT) * n_prompts / (time.perf_counter() - started)

    return measure


def compared(theirs: OverHttp, small_batch: OverHttp, ours: dict[str, float], seed: int) -> dict[str, float]:
    """llama-server's measurements, and the ratios of ours to them; for times, below 1 is better."""
    rate, (cold, warm) = theirs.streams(seed), theirs.shared_prompt(seed + 2)
    default, small = theirs.long_prompt(seed + 3), small_batch.long_prompt(seed + 3)
    measured = {
        "16 streams of 128 + 128, tokens/s": rate,
        "16 prompts share 2,048 tokens: first token p95 cold, s": cold,
        "16 more prompts that share them: first token p95 warm, s": warm,
        "8 streams, a 4,096-token prompt comes: gap p99, ms": default * 1e3,
        "32 chats, 8 fit: first token p50, s": theirs.chats(seed + 4),
    }
    gap = "8 streams, a 4,096-token prompt comes: gap p99, ms"
    rows = {f"llama-server: {name}": value for name, value in measured.items()}
    rows |= {f"over llama-server: {name.rpartition(',')[0]}": ours[name] / value for name, value in measured.items()}
    rows[f"llama-server -b {SMALL_BATCH}: {gap}"] = small * 1e3
    rows[f"over llama-server -b {SMALL_BATCH}: {gap.rpartition(',')[0]}"] = ours[gap] / (small * 1e3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="take turns with it, too")
    parser.add_argument("--memory", action="store_true", help="measure memory, too: 500 prompts of 1,000 tokens")
    parser.add_argument("--transformers", action="store_true", help="take turns with it, too")
    parser.add_argument("--out", type=Path, help="a folder for the table")
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    theirs = small = None
    if options.llama_server is not None:
        theirs = llama_server(options.llama_server, options.model)
        small = llama_server(options.llama_server, options.model, SMALL_BATCH)
    with slm.load(options.model, backend=options.backend, n_threads=usable_cores()) as model:
        ours = Ours(model, options.prompts)
        llama = one_by_one(options.model, max(1, options.prompts // 8))
        batch = as_one_batch(options.model, options.prompts) if options.transformers else None
        for turn in range(options.rounds):
            seed = 1000 * turn
            bare, streams = ours.bare_loop(seed), ours.streams(seed)
            many, single = ours.many(seed + 1), llama(seed + 1)
            cold, warm = ours.shared_prompt(seed + 2)
            gap, share = ours.long_prompt(seed + 3)
            chats = ours.chats(seed + 4)
            measured = {
                "16 streams of 128 + 128, tokens/s": streams,
                "the same in a bare decode loop, tokens/s": bare,
                "16 streams over the bare loop": streams / bare,
                f"generate of {options.prompts} prompts, tokens/s": many,
                "llama-cpp-python one by one, tokens/s": single,
                f"generate of {options.prompts} prompts over llama-cpp-python": many / single,
                "16 prompts share 2,048 tokens: first token p95 cold, s": cold,
                "16 more prompts that share them: first token p95 warm, s": warm,
                "8 streams, a 4,096-token prompt comes: gap p99, ms": gap * 1e3,
                "that prompt's first token over alone": share,
                "32 chats, 8 fit: first token p50, s": chats,
                "rows computed for cancelled requests after the running step": ours.cancelled(seed + 6),
            }
            if batch is not None:
                together = batch(seed + 1)
                measured["transformers, one batch, tokens/s"] = together
                measured[f"generate of {options.prompts} prompts over transformers"] = many / together
            if options.memory and turn == 0:
                measured["500 prompts of 1,000 tokens add to memory, MiB"] = ours.memory(seed + 7)
            if theirs is None or small is None:
                measured["16 prompts share nothing: first token p95, s"] = ours.apart(seed + 5)
            else:
                measured |= compared(theirs, small, measured, seed)
            for name, value in measured.items():
                rows.setdefault(name, []).append(value)
                print(f"{turn}  {name}: {value:.4g}", flush=True)
    write_table(f"engine-{options.model.stem}", rows, options)


def write_table(name: str, rows: Mapping[str, Sequence[float]], options: argparse.Namespace) -> None:
    """Print the table of the medians, and write it to ``options.out`` if it is set."""
    page = f"{machine()}; {datetime.date.today()}; {options.model.name}; medians of {options.rounds} turns\n\n"
    page += "| | median | from | to |\n|---|---|---|---|\n"
    for row, values in rows.items():
        page += f"| {row} | {statistics.median(values):.4g} | {min(values):.4g} | {max(values):.4g} |\n"
    print(page)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}-{datetime.date.today()}.md").write_text(page)


if __name__ == "__main__":
    main()
