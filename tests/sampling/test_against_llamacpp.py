"""Steps compared with llama.cpp's samplers on random rows: the same tokens remain, with the same probabilities."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sampling.llama_sampler import LlamaSampler, LlamaVocab, Make
from slm_conformance.oracle.factories import tiny_model
from slm_core.sampling import SamplerChain, Sampling
from slm_core.vocabularies import load_vocab

pytest.importorskip("llama_cpp")

N_VOCAB = 300
# llama.cpp computes in float32: the error of a logit up to 20 is one ulp (2e-6), of a sum of 300 weights 300 * 6e-8.
TOLERANCE = 5e-5

NewSampler = Callable[..., LlamaSampler]


@pytest.fixture
def new_sampler() -> Iterator[NewSampler]:
    samplers: list[LlamaSampler] = []

    def new(make: Make, vocab: object = None) -> LlamaSampler:
        samplers.append(LlamaSampler(make, vocab))
        return samplers[-1]

    yield new
    for sampler in samplers:
        sampler.close()


def rows(n: int = 25, n_vocab: int = N_VOCAB, scale: float = 3.0) -> list[np.ndarray]:
    """Rows of logits from flat to peaked."""
    rng = np.random.default_rng(7)
    return [
        (rng.uniform(0.3, scale) * rng.standard_normal(n_vocab) + rng.normal()).astype(np.float32) for _ in range(n)
    ]


def check(chain: SamplerChain, sampler: LlamaSampler, row: np.ndarray) -> None:
    ids, probs = sampler.apply(row)
    kept_ids, shares = chain.distribution(row)
    assert kept_ids.tolist() == ids.tolist(), f"our chain kept {len(kept_ids)} tokens, llama.cpp {len(ids)}"
    np.testing.assert_allclose(shares, probs, rtol=TOLERANCE, atol=1e-9)


TRUNCATION: Mapping[str, tuple[dict[str, float], Make]] = {
    "top_k": ({"top_k": 17}, lambda api, v: api.llama_sampler_init_top_k(17)),
    "top_k beyond V": ({"top_k": 999}, lambda api, v: api.llama_sampler_init_top_k(999)),
    "top_p": ({"top_p": 0.8}, lambda api, v: api.llama_sampler_init_top_p(0.8, 1)),
    "top_p min_keep": ({"top_p": 0.2, "min_keep": 9}, lambda api, v: api.llama_sampler_init_top_p(0.2, 9)),
    "min_p": ({"min_p": 0.07}, lambda api, v: api.llama_sampler_init_min_p(0.07, 1)),
    "min_p min_keep": ({"min_p": 0.9, "min_keep": 4}, lambda api, v: api.llama_sampler_init_min_p(0.9, 4)),
    "typical_p": ({"typical_p": 0.6}, lambda api, v: api.llama_sampler_init_typical(0.6, 1)),
    "typical_p min_keep": ({"typical_p": 0.1, "min_keep": 7}, lambda api, v: api.llama_sampler_init_typical(0.1, 7)),
    "top_n_sigma": ({"top_n_sigma": 1.3}, lambda api, v: api.llama_sampler_init_top_n_sigma(1.3)),
    "temperature": ({"temperature": 0.6}, lambda api, v: api.llama_sampler_init_temp(0.6)),
    "greedy": ({"temperature": 0}, lambda api, v: api.llama_sampler_init_temp(0.0)),
    "dynatemp": (
        {"temperature": 1.1, "dynatemp_range": 0.7, "dynatemp_exponent": 1.6},
        lambda api, v: api.llama_sampler_init_temp_ext(1.1, 0.7, 1.6),
    ),
    "xtc": (
        {"xtc_probability": 1, "xtc_threshold": 0.03},
        lambda api, v: api.llama_sampler_init_xtc(1.0, 0.03, 1, 5),
    ),
    "xtc min_keep": (
        {"xtc_probability": 1, "xtc_threshold": 0.004, "min_keep": 280},
        lambda api, v: api.llama_sampler_init_xtc(1.0, 0.004, 280, 5),
    ),
}


@pytest.mark.parametrize("case", TRUNCATION)
def test_a_step_keeps_the_same_tokens_as_llama_cpp(case: str, new_sampler: NewSampler) -> None:
    options, make = TRUNCATION[case]
    chain, sampler = SamplerChain(Sampling.preset("neutral", seed=1, **options)), new_sampler(make)
    sizes = set()
    for row in rows():
        check(chain, sampler, row)
        sizes.add(len(chain.distribution(row)[0]))
    assert len(sizes) > 1 or case in ("top_k", "top_k beyond V", "temperature", "greedy", "dynatemp"), (
        f"every row kept {sizes} tokens: the step was not tested"
    )


def test_a_chain_of_many_steps_equals_llama_cpps_chain(new_sampler: NewSampler) -> None:
    def make(api: Any, vocab: object) -> object:
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        for sampler in (
            api.llama_sampler_init_penalties(N_VOCAB, 64, 1.3, 0.2, 0.1),
            api.llama_sampler_init_top_k(60),
            api.llama_sampler_init_typical(0.95, 2),
            api.llama_sampler_init_top_p(0.9, 2),
            api.llama_sampler_init_min_p(0.02, 2),
            api.llama_sampler_init_temp(0.8),
        ):
            api.llama_sampler_chain_add(chain, sampler)
        return chain

    chain = SamplerChain(
        Sampling(
            repeat_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, top_k=60, typical_p=0.95, top_p=0.9,
            min_p=0.02, min_keep=2, temperature=0.8, seed=1,
        )
    )  # fmt: skip
    sampler, rng = new_sampler(make), np.random.default_rng(2)
    for row in rows():
        token = int(rng.integers(N_VOCAB))
        chain.accept(token)
        sampler.accept([token])
        check(chain, sampler, row)


def test_steps_in_another_order_equal_llama_cpps_chain_in_that_order(new_sampler: NewSampler) -> None:
    def make(api: Any, vocab: object) -> object:
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        for sampler in (api.llama_sampler_init_temp(1.9), api.llama_sampler_init_top_p(0.7, 1)):
            api.llama_sampler_chain_add(chain, sampler)
        return chain

    options = {"temperature": 1.9, "top_p": 0.7, "seed": 1}
    chain = SamplerChain(Sampling.preset("neutral", **options, order=("temperature", "top_p")))
    usual, sampler = SamplerChain(Sampling.preset("neutral", **options)), new_sampler(make)
    for row in rows():
        check(chain, sampler, row)
    assert any(len(usual.distribution(row)[0]) != len(chain.distribution(row)[0]) for row in rows())


@pytest.mark.parametrize("window", [1, 20, 64, None])
@pytest.mark.parametrize(("repeat", "frequency", "presence"), [(1.4, 0, 0), (1, 0.3, 0), (1, 0, 0.9), (0.7, -0.2, 0.5)])
def test_penalties(
    window: int | None, repeat: float, frequency: float, presence: float, new_sampler: NewSampler
) -> None:
    options = {"repeat_penalty": repeat, "frequency_penalty": frequency, "presence_penalty": presence}
    chain = SamplerChain(Sampling.preset("neutral", seed=1, **options, penalty_window=window))
    sampler = new_sampler(
        lambda api, v: api.llama_sampler_init_penalties(
            N_VOCAB, 1000 if window is None else window, repeat, frequency, presence
        )
    )
    history = np.random.default_rng(3).integers(0, 40, 150).tolist()
    chain.set_history(history)
    sampler.accept(history)
    for row in rows(10):
        check(chain, sampler, row)
        chain.accept(9)
        sampler.accept([9])


def test_logit_bias(new_sampler: NewSampler) -> None:
    bias = {3: 2.5, 8: -4.0, 250: 0.5, 20: -math.inf}

    def make(api: Any, vocab: object) -> object:
        pairs = (api.llama_logit_bias * len(bias))(*(api.llama_logit_bias(*pair) for pair in bias.items()))
        return api.llama_sampler_init_logit_bias(N_VOCAB, len(bias), pairs)

    chain = SamplerChain(Sampling.preset("neutral", seed=1, logit_bias=bias))
    sampler = new_sampler(make)
    for row in rows(10):
        check(chain, sampler, row)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("tau", "eta"), [(5.0, 0.1), (2.0, 0.4)])
def test_mirostat_keeps_the_same_tokens_as_llama_cpp_in_each_step(
    version: int, tau: float, eta: float, new_sampler: NewSampler
) -> None:
    """llama.cpp samples, and our chain accepts its token: both must update ``mu`` in the same way."""

    def make(api: Any, vocab: object) -> object:
        if version == 1:
            return api.llama_sampler_init_mirostat(N_VOCAB, 11, tau, eta, 100)
        return api.llama_sampler_init_mirostat_v2(11, tau, eta)

    chain = SamplerChain(Sampling.preset("neutral", mirostat=version, mirostat_tau=tau, mirostat_eta=eta, seed=1))
    sampler, sizes = new_sampler(make), []
    for row in rows(60):
        check(chain, sampler, row)
        assert sampler.selected is not None
        chain.accept(sampler.selected)
        sizes.append(len(chain.distribution(row)[0]))
    assert min(sizes) < N_VOCAB, "no token was ever removed"


@pytest.mark.parametrize("probability", [0.3, 0.8])
def test_xtc_acts_with_its_probability(probability: float) -> None:
    row = np.array([2.0, 1.9, 1.0, -3.0], np.float32)
    chain = SamplerChain(Sampling.preset("neutral", seed=4, xtc_probability=probability))
    n, cut = 4000, 0
    for _ in range(n):
        cut += len(chain.distribution(row)[0]) == 2
        chain.sample(row)
    # Six standard deviations of a binomial count: chance fails one run in 10^8.
    assert abs(cut - n * probability) < 6 * math.sqrt(n * probability * (1 - probability)), cut


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("vocab"))


@pytest.fixture(scope="module")
def llama_vocab(vocab_file: Path) -> Iterator[LlamaVocab]:
    vocab = LlamaVocab(vocab_file)
    yield vocab
    vocab.close()


@pytest.mark.parametrize("breakers", [(), ("e",), ("\n", ":", '"', "*")], ids=repr)
@pytest.mark.parametrize(("base", "allowed", "window"), [(1.75, 2, None), (1.2, 4, 60), (1.0, 1, None), (4.0, 1, 25)])
def test_dry(
    breakers: tuple[str, ...],
    base: float,
    allowed: int,
    window: int | None,
    new_sampler: NewSampler,
    vocab_file: Path,
    llama_vocab: LlamaVocab,
) -> None:
    vocab = load_vocab(vocab_file)

    def make(api: Any, handle: object) -> object:
        texts = (ctypes.c_char_p * max(1, len(breakers)))(*(text.encode() for text in breakers))
        return api.llama_sampler_init_dry(
            handle, 0.9, base, allowed, 10_000 if window is None else window, texts, len(breakers)
        )

    options = {"dry_multiplier": 0.9, "dry_base": base, "dry_allowed_length": allowed, "dry_window": window}
    chain = SamplerChain.for_vocab(Sampling.preset("neutral", seed=1, **options, dry_breakers=breakers), vocab)
    sampler, changed = new_sampler(make, llama_vocab.handle), 0
    rng = np.random.default_rng(5)
    frequent, breaker = rng.choice(256, 2, replace=False), vocab.encode("e", add_special=False, parse_special=False)[0]
    plain = SamplerChain(Sampling.preset("neutral"))
    for i, row in enumerate(rows(120, vocab.size)):
        token = int(rng.choice(frequent)) if rng.random() < 0.9 else breaker
        chain.accept(token)
        sampler.accept([token])
        check(chain, sampler, row)
        changed += not np.array_equal(chain.distribution(row)[1], plain.distribution(row)[1]) and i > 0
    assert changed > 20, "too few rows were penalized"


def test_dry_of_one_token_repeated_stays_finite(new_sampler: NewSampler, llama_vocab: LlamaVocab) -> None:
    """The power would overflow float32 after 158 repetitions."""
    chain = SamplerChain(Sampling.preset("neutral", seed=1, dry_multiplier=0.5, dry_breakers=[]))
    sampler = new_sampler(
        lambda api, v: api.llama_sampler_init_dry(v, 0.5, 1.75, 2, 10_000, None, 0), llama_vocab.handle
    )
    chain.set_history([5] * 700)
    sampler.accept([5] * 700)
    check(chain, sampler, rows(1)[0])
