"""Overhead of the generation loop over raw decoding, and gain from speculative decoding: ratios of one run.

    python benchmarks/generation.py
    python benchmarks/generation.py --model my.gguf --backend native --backend llamacpp --tokens 400

The first table needs no model: a dummy engine returns at once, so only the loop is measured, with the default chain and
32,000 or 150,000 tokens. The second decodes the same tokens raw and with ``generate``. In the third, the tokens of an
answer are fixed, so that each engine and drafter has the same work: the answer repeats the prompt, goes on with a page
of prose or of code, or has random tokens. The fourth has the same answers from an ``Engine``, one and four at a time.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Self

import numpy as np
from numpy.typing import NDArray

import slm_core as slm
from slm_core.generation import Answer, Generation
from slm_core.generation.speculation import Drafter, PromptLookup, Speculation, SuffixIndex
from slm_core.generation.token_loop import Progress
from slm_core.loading import demo_model_path
from slm_core.model import Model
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import Pos, PrefillProgress

ROUNDS = 3
N_AT_ONCE = 4
REPEATED = (
    "Dear reader, the quick brown fox jumps over the lazy dog while five wizards quietly box a jumbo vexed knight."
    " Then everybody packs the large wooden box again, and the story is told from its beginning to its end. "
)
HOME = Path(__file__).parents[1]
PROSE, CODE = HOME / "docs" / "engine.md", HOME / "slm_core" / "generation" / "speculation" / "rounds.py"


class Ready:
    """A vocabulary, and an engine whose rows of logits are precomputed."""

    bos = eos = None
    eog_ids: frozenset[int] = frozenset()
    n_tokens = n_pending = 1

    def __init__(self, n_vocab: int) -> None:
        self.size = n_vocab
        self.rows = (3 * np.random.default_rng(0).standard_normal((16, n_vocab))).astype(np.float32)
        self.n_taken = 0

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        return b" word"

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        raise NotImplementedError

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32]:
        return self.rows[self.n_taken % 16]

    def take(self, token: int) -> None:
        self.n_taken += 1

    def settle(self) -> None:
        pass


class Says:
    """A sampler that returns fixed tokens."""

    def __init__(self, tokens: Sequence[int], at: int = 0) -> None:
        self.tokens, self.at = tokens, at

    def sample(self, logits: NDArray[np.float32]) -> int:
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, token: int) -> None:
        pass

    def set_history(self, tokens: Sequence[int]) -> None:
        pass

    def reset(self) -> None:
        self.at = 0

    def clone(self) -> Self:
        return type(self)(self.tokens, self.at)

    def state(self) -> bytes:
        return b""

    def set_state(self, state: bytes) -> None:
        pass


def loop_overhead(n_tokens: int = 50, rounds: int = 60) -> None:
    """The first table. It has many short runs, so that some run without other load."""
    print(f"\nThe loop alone, default chain (microseconds a token, the best of {rounds} runs of {n_tokens} tokens)\n")
    print("| vocabulary | run() | of it the chain | iterated, with log-probabilities |\n|---|---|---|---|")
    for n_vocab in (32_000, 150_000):
        ready = Ready(n_vocab)
        run = best(lambda ready=ready: seconds(begun(ready, n_tokens).run), rounds) / n_tokens
        chain = SamplerChain.for_vocab(Sampling(seed=1), ready)
        chosen = best(lambda chain=chain, ready=ready: chain_seconds(chain, ready.rows, n_tokens), rounds) / n_tokens
        iterated = best(lambda ready=ready: iterated_seconds(begun(ready, n_tokens)), rounds) / n_tokens
        print(f"| {n_vocab:,} | {1e6 * run:.0f} | {1e6 * chosen:.0f} | {1e6 * iterated:.0f} |")


def begun(ready: Ready, n_tokens: int) -> Generation:
    return Generation(ready, ready, SamplerChain.for_vocab(Sampling(seed=1), ready), Progress(1, 0, n_tokens, ()))


def iterated_seconds(generation: Generation) -> float:
    def run() -> None:
        for _ in generation:
            pass

    return seconds(run)


def chain_seconds(chain: SamplerChain, rows: NDArray[np.float32], n_tokens: int) -> float:
    def run() -> None:
        for i in range(n_tokens):
            chain.accept(chain.sample(rows[i % 16]))

    return seconds(run)


def engine_overhead(model: Model, n_tokens: int) -> str:
    """A row of the second table: raw decoding of some tokens, and an answer of the same tokens."""
    tokens = prompt_of(model)
    sampling = Sampling(seed=1, max_tokens=n_tokens, min_tokens=n_tokens)
    generated = best(lambda: answer_of(model, tokens, n_tokens, sampling).timings.decode_s)
    raw_s = best(lambda: raw_seconds(model, tokens, n_tokens))
    loop, raw = 1e6 * generated / (n_tokens - 1), 1e6 * raw_s / (n_tokens - 1)
    return f"| {model.info.backend} | {model.info.n_vocab:,} | {raw:.0f} | {loop:.0f} | {loop - raw:.0f} |"


def raw_seconds(model: Model, tokens: Sequence[int], n_tokens: int) -> float:
    """Seconds to decode ``n_tokens`` - 1 tokens one by one after the prompt."""
    with model.new_context(n_ctx=len(tokens) + n_tokens + 1) as context:
        batch = context.new_batch()
        batch.extend(tokens, Pos(0, 0), logits="last")
        context.decode(batch)

        def run() -> None:
            for i in range(n_tokens - 1):
                batch.clear()
                batch.add(tokens[i % len(tokens)], Pos(0, len(tokens) + i), logits=True)
                context.decode(batch)

        return seconds(run)


def answer_of(
    model: Model,
    tokens: Sequence[int],
    n_tokens: int,
    sampling: Sampling,
    script: Sequence[int] | None = None,
    drafter: Drafter | None = None,
) -> Answer:
    with model.session(n_ctx=len(tokens) + n_tokens + 80, n_seq_max=1) as session:
        session.append_tokens(tokens)
        return session.generate(
            sampling,
            sampler=None if script is None else Says(script),
            speculation=None if drafter is None else Speculation(drafter),
        ).run()


def speculation_rows(model: Model, n_tokens: int, rounds: int) -> list[str]:
    """Rows of the third table: medians over runs that take turns, because the load of a machine changes."""
    rows = []
    for text, prompt, script in answers_of(model, n_tokens):
        answers: dict[str, list[Answer]] = {name: [] for name in DRAFTERS}
        for _ in range(rounds):
            for name, make in DRAFTERS.items():
                answer = answer_of(model, prompt, n_tokens, Sampling(max_tokens=len(script)), script, make())
                assert answer.tokens == tuple(script)
                answers[name].append(answer)
        plain = [answer.timings.decode_s for answer in answers["none"]]
        for name, answers_of_drafter in answers.items():
            decode_times = [answer.timings.decode_s for answer in answers_of_drafter]
            ratio = median(before / after for before, after in zip(plain, decode_times, strict=True))
            row = f"| {model.info.backend} | {text} | {name} | {len(script) / median(decode_times):.0f} | {ratio:.2f} |"
            if (stats := answers_of_drafter[-1].speculation) is not None:
                row += f" {stats.acceptance:.0%} of {stats.drafted} | {stats.switched_off}, {stats.switched_on} |"
            rows.append(row if stats is not None else row + " | |")
    return rows


def engine_rows(model: Model, n_tokens: int, rounds: int) -> list[str]:
    """Rows of the fourth table: medians of pairs of runs in turns, in one engine, which keeps no prefixes.

    Some backends read all tokens of their cache in each step: with prefixes, each run would be slower than the last.
    """
    rows = []
    with model.engine(n_ctx=3 * N_AT_ONCE * n_tokens, prefix_cache=False) as engine:
        for text, prompt, script in answers_of(model, n_tokens):
            for n in (1, N_AT_ONCE):
                prompts = [prompt[i:] for i in range(n)]
                pairs = [
                    [engine_seconds(engine, prompts, script, drafts) for drafts in (None, Speculation(PromptLookup()))]
                    for _ in range(rounds)
                ]
                plain, ratio = median(a for a, _ in pairs), median(a / b for a, b in pairs)
                rate = n * len(script) / plain
                rows.append(f"| {model.info.backend} | {text} | {n} | {rate:.0f} | {rate * ratio:.0f} | {ratio:.2f} |")
    return rows


def engine_seconds(
    engine: slm.Engine, prompts: Sequence[Sequence[int]], script: Sequence[int], speculation: Speculation | None
) -> float:
    """Seconds of answers to all prompts at once, with these tokens, after the last of the first tokens."""

    def answer(prompt: Sequence[int]) -> slm.RequestStream:
        def says(tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
            logits[script[len(tokens) - len(prompt)]] += 1000
            return logits

        sampling = Sampling(temperature=0, max_tokens=len(script))
        return engine.submit(prompt, sampling, logits_processors=[says], speculation=speculation)

    started = time.perf_counter()
    answers = [stream.run() for stream in [answer(prompt) for prompt in prompts]]
    elapsed = time.perf_counter() - started
    assert all(answer.tokens == tuple(script) for answer in answers)
    return elapsed - max(answer.timings.first_token_s or 0.0 for answer in answers)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "prompt lookup": PromptLookup,
    "suffix index": SuffixIndex,
}


def answers_of(model: Model, n_tokens: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Kinds of text, each with a prompt and the tokens of its answer."""
    prompt = prompt_of(model)
    yield "repeated", prompt, (prompt * (1 + n_tokens // len(prompt)))[:n_tokens]
    for text, path in (("prose", PROSE), ("code", CODE)):
        tokens = model.vocab.encode(path.read_text(), add_special=False, parse_special=False)
        yield text, tokens[:n_tokens], tokens[n_tokens : 2 * n_tokens]
    n_vocab = model.info.n_vocab
    drawn = np.random.default_rng(1).choice(n_vocab, n_tokens, replace=n_tokens > n_vocab).tolist()
    yield "random", prompt, [token for token in drawn if token not in model.vocab.eog_ids]


def prompt_of(model: Model) -> list[int]:
    return model.vocab.encode(REPEATED, add_special=False, parse_special=False)


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def best(measure: Callable[[], float], rounds: int = ROUNDS) -> float:
    return min(measure() for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--backend", action="append", help="by name, as often as wanted; native and llamacpp")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each answer in the third table")
    options = parser.parse_args()
    print(f"{platform.machine()}, {platform.platform()}, Python {platform.python_version()}, NumPy {np.__version__}")
    loop_overhead()
    engines, drafts, served = [], [], []
    for name in options.backend or ("native", "llamacpp"):
        with slm.load(options.model, backend=name) as model:
            engines.append(engine_overhead(model, options.tokens))
            drafts += speculation_rows(model, options.tokens, options.rounds)
            served += engine_rows(model, options.tokens, options.rounds)
    print(f"\nThe loop above a raw decode, {options.model} (microseconds a token)\n")
    print("| backend | vocabulary | raw decode | generate | above it |\n|---|---|---|---|---|", *engines, sep="\n")
    print(f"\nDrafts, {options.model} (tokens a second, and how many times as many as without: medians)\n")
    print("| backend | text | drafter | tokens/s | ratio | accepted | switched off, on |")
    print("|---|---|---|---|---|---|---|", *drafts, sep="\n")
    print(f"\nPrompt lookup in an engine, {options.model} (tokens a second of all answers: medians)\n")
    print("| backend | text | answers at once | without | with | ratio |\n|---|---|---|---|---|---|", *served, sep="\n")


if __name__ == "__main__":
    main()
