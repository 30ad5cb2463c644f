"""Cost of sampling a token: each step and the default chain, compared with llama.cpp and transformers.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --vocab 32000 --rounds 50

Rows are random, with the head and tail of a language model: a few likely tokens, the rest far below. All libraries
alternate on the same rows, so that other load of the machine affects all of them. Times are medians in microseconds; a
ratio is the other library's time over ours. llama.cpp's time includes filling its array of candidates, as
``llama_sampler_sample`` does before every chain; transformers' time includes the softmax and the draw.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from slm_core.sampling import SamplerChain, Sampling

Draw = Callable[[np.ndarray], int]
N_HISTORY = 1000

CASES: dict[str, dict[str, object]] = {
    "default chain": {},
    "greedy": {"preset": "greedy"},
    "nothing but the draw": {"preset": "neutral"},
    "top_k": {"preset": "neutral", "top_k": 40},
    "top_p": {"preset": "neutral", "top_p": 0.95},
    "min_p": {"preset": "neutral", "min_p": 0.05},
    "typical_p": {"preset": "neutral", "typical_p": 0.9},
    "top_n_sigma": {"preset": "neutral", "top_n_sigma": 1.0},
    "temperature": {"preset": "neutral", "temperature": 0.7},
    "default and penalties": {"repeat_penalty": 1.1, "frequency_penalty": 0.1},
    "default and DRY": {"dry_multiplier": 0.8, "dry_breakers": ()},
    "default and no_repeat_ngram": {"no_repeat_ngram": 3},
    "mirostat 1": {"preset": "neutral", "mirostat": 1},
    "mirostat 2": {"preset": "neutral", "mirostat": 2},
    "eta_cutoff": {"preset": "neutral", "eta_cutoff": 1e-3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens of the vocabulary")
    parser.add_argument("--rounds", type=int, default=100, help="rows that each draws from")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = [model_like_row(rng, options.vocab) for _ in range(8)]
    history = rng.integers(0, 200, N_HISTORY).tolist()
    print(
        f"{platform.processor() or platform.machine()}, numpy {np.__version__}, {options.vocab} tokens, medians in us\n"
    )
    print(f"{'':28}{'slm':>9}{'llama.cpp':>12}{'ratio':>8}{'transformers':>14}{'ratio':>8}")
    for name, case in CASES.items():
        case = dict(case)
        sampling = Sampling.preset(str(case.pop("preset", "balanced")), seed=1, **case)
        competitors = [llama_cpp_draw(sampling, options.vocab, history), transformers_draw(sampling, history)]
        times = measure([chain_draw(sampling, history), *competitors], rows, options.rounds)
        print(
            f"{name:28}{times[0]:9.0f}"
            + "".join(shown(t, times[0], w) for t, w in zip(times[1:], (12, 14), strict=True))
        )


def model_like_row(rng: np.random.Generator, n_vocab: int) -> np.ndarray:
    """Logits that fall with rank by a power law, in random order."""
    logits = -1.2 * np.log(np.arange(1, n_vocab + 1)) + 0.5 * rng.standard_normal(n_vocab)
    return rng.permutation(12 + logits).astype(np.float32)


def measure(draws: list[Draw | None], rows: list[np.ndarray], rounds: int) -> list[float]:
    """Median microseconds of each; nan if a library lacks it."""
    times: list[list[float]] = [[] for _ in draws]
    for i in range(rounds + 3):
        for draw, samples in zip(draws, times, strict=True):
            if draw is None:
                continue
            started = time.perf_counter()
            draw(rows[i % len(rows)])
            samples.append(1e6 * (time.perf_counter() - started))
    return [statistics.median(samples[3:]) if samples else float("nan") for samples in times]


def shown(theirs: float, ours: float, width: int) -> str:
    return f"{'-':>{width}}{'':8}" if theirs != theirs else f"{theirs:{width}.0f}{theirs / ours:8.1f}"


def chain_draw(sampling: Sampling, history: list[int]) -> Draw:
    chain = SamplerChain(sampling)
    chain.set_history(history)

    def draw(row: np.ndarray) -> int:
        token = chain.sample(row)
        chain.accept(token)
        return token

    return draw


def llama_cpp_draw(sampling: Sampling, n_vocab: int, history: list[int]) -> Draw | None:
    if importlib.util.find_spec("llama_cpp") is None or sampling.no_repeat_ngram or sampling.eta_cutoff:
        return None
    import llama_cpp as api

    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for sampler in llama_cpp_samplers(api, sampling, n_vocab):
        api.llama_sampler_chain_add(chain, sampler)
    for token in history:
        api.llama_sampler_accept(chain, token)
    data = (api.llama_token_data * n_vocab)()
    table = np.frombuffer(data, np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")]))
    ids = np.arange(n_vocab, dtype=np.int32)

    def draw(row: np.ndarray) -> int:
        table["id"], table["logit"], table["p"] = ids, row, 0
        array = api.llama_token_data_array(data, n_vocab, -1, False)
        api.llama_sampler_apply(chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        api.llama_sampler_accept(chain, token)
        return token

    return draw


def llama_cpp_samplers(api: Any, s: Sampling, n_vocab: int) -> list[Any]:
    """llama.cpp's samplers for the same options, in its own order."""
    penalties = s.repeat_penalty, s.frequency_penalty, s.presence_penalty
    samplers = (
        [api.llama_sampler_init_penalties(n_vocab, s.penalty_window or n_vocab, *penalties)]
        if penalties != (1, 0, 0)
        else []
    )
    if s.dry_multiplier:
        base, allowed = s.dry_base, s.dry_allowed_length
        samplers.append(api.llama_sampler_init_dry(None, s.dry_multiplier, base, allowed, N_HISTORY, None, 0))
    samplers += [api.llama_sampler_init_top_n_sigma(s.top_n_sigma)] if s.top_n_sigma else []
    samplers += [api.llama_sampler_init_top_k(s.top_k)] if s.top_k else []
    samplers += [api.llama_sampler_init_typical(s.typical_p, 1)] if s.typical_p < 1 else []
    samplers += [api.llama_sampler_init_top_p(s.top_p, 1)] if s.top_p < 1 else []
    samplers += [api.llama_sampler_init_min_p(s.min_p, 1)] if s.min_p else []
    samplers += [api.llama_sampler_init_temp(s.temperature)] if s.temperature != 1 else []
    if s.mirostat == 1:
        return [*samplers, api.llama_sampler_init_mirostat(n_vocab, 1, s.mirostat_tau, s.mirostat_eta, 100)]
    if s.mirostat == 2:
        return [*samplers, api.llama_sampler_init_mirostat_v2(1, s.mirostat_tau, s.mirostat_eta)]
    return [*samplers, api.llama_sampler_init_greedy() if s.temperature == 0 else api.llama_sampler_init_dist(1)]


def transformers_draw(sampling: Sampling, history: list[int]) -> Draw | None:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return None
    if sampling.dry_multiplier or sampling.mirostat or sampling.top_n_sigma:
        return None
    import torch

    torch.set_num_threads(1)
    processors, ids = transformers_processors(sampling), torch.tensor([history])

    def draw(row: np.ndarray) -> int:
        scores = processors(ids, torch.from_numpy(row)[None].clone())
        if sampling.temperature == 0:
            return int(scores.argmax())
        return int(torch.multinomial(torch.softmax(scores, -1), 1))

    return draw


def transformers_processors(s: Sampling) -> Any:
    """transformers' processors for the same options, in the same order, if it has them."""
    from transformers.generation import logits_process as t

    processors = [t.RepetitionPenaltyLogitsProcessor(s.repeat_penalty)] if s.repeat_penalty != 1 else []
    processors += [t.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram)] if s.no_repeat_ngram else []
    processors += [t.TopKLogitsWarper(s.top_k)] if s.top_k else []
    processors += [t.TypicalLogitsWarper(mass=s.typical_p)] if s.typical_p < 1 else []
    processors += [t.TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    processors += [t.MinPLogitsWarper(s.min_p)] if s.min_p else []
    processors += [t.EtaLogitsWarper(s.eta_cutoff)] if s.eta_cutoff else []
    processors += [t.TemperatureLogitsWarper(s.temperature)] if s.temperature not in (0, 1) else []
    return t.LogitsProcessorList(processors)


if __name__ == "__main__":
    main()
