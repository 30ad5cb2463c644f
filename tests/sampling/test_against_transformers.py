"""Steps compared with the logits processors of transformers on random rows: the same distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from slm_core.sampling import SamplerChain, Sampling

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

N_VOCAB = 400
# transformers computes in float32: one ulp of a logit up to 20 is 2e-6, the error of a sum of 400 weights 400 * 6e-8.
TOLERANCE = 5e-5

Make = Callable[[Any], Any]
"""Makes a processor from transformers' module of processors."""


def rows(n: int = 25) -> list[np.ndarray]:
    """Rows of logits from flat to peaked."""
    rng = np.random.default_rng(17)
    return [(rng.uniform(0.3, 3) * rng.standard_normal(N_VOCAB) + rng.normal()).astype(np.float32) for _ in range(n)]


def processed(make: Make, history: list[int], row: np.ndarray) -> np.ndarray:
    """Probabilities [V] from transformers."""
    from transformers.generation import logits_process

    ids, scores = torch.tensor([history], dtype=torch.long), torch.tensor(row)[None].clone()
    probs: np.ndarray = torch.softmax(make(logits_process)(ids, scores)[0].double(), -1).numpy()
    return probs


def check(chain: SamplerChain, make: Make, history: list[int], row: np.ndarray) -> None:
    chain.set_history(history)
    ids, probs = chain.distribution(row)
    expected = processed(make, history, row)
    assert ids.tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(probs, expected[ids], rtol=TOLERANCE, atol=1e-9)


STEPS: Mapping[str, tuple[dict[str, object], Make]] = {
    "top_k": ({"top_k": 12}, lambda t: t.TopKLogitsWarper(12)),
    "top_p": ({"top_p": 0.7}, lambda t: t.TopPLogitsWarper(0.7)),
    "top_p min_keep": ({"top_p": 0.1, "min_keep": 6}, lambda t: t.TopPLogitsWarper(0.1, min_tokens_to_keep=6)),
    "min_p": ({"min_p": 0.1}, lambda t: t.MinPLogitsWarper(0.1)),
    "min_p min_keep": ({"min_p": 0.8, "min_keep": 5}, lambda t: t.MinPLogitsWarper(0.8, min_tokens_to_keep=5)),
    "typical_p": ({"typical_p": 0.7}, lambda t: t.TypicalLogitsWarper(mass=0.7)),
    "typical_p min_keep": (
        {"typical_p": 0.05, "min_keep": 8},
        lambda t: t.TypicalLogitsWarper(mass=0.05, min_tokens_to_keep=8),
    ),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.004}, lambda t: t.EpsilonLogitsWarper(0.004)),
    "epsilon_cutoff min_keep": (
        {"epsilon_cutoff": 0.3, "min_keep": 3},
        lambda t: t.EpsilonLogitsWarper(0.3, min_tokens_to_keep=3),
    ),
    "eta_cutoff": ({"eta_cutoff": 0.02}, lambda t: t.EtaLogitsWarper(0.02)),
    "eta_cutoff min_keep": ({"eta_cutoff": 0.9, "min_keep": 7}, lambda t: t.EtaLogitsWarper(0.9, min_tokens_to_keep=7)),
    "temperature": ({"temperature": 1.9}, lambda t: t.TemperatureLogitsWarper(1.9)),
    "logit_bias": (
        {"logit_bias": {7: 3.0, 9: -2.0}},
        lambda t: t.SequenceBiasLogitsProcessor({(7,): 3.0, (9,): -2.0}),
    ),
    "banned_tokens": ({"banned_tokens": [3, 77]}, lambda t: t.SuppressTokensLogitsProcessor([3, 77], device="cpu")),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_gives_the_same_distribution(case: str) -> None:
    options, make = STEPS[case]
    chain = SamplerChain(Sampling.preset("neutral", seed=1, **options))
    plain = SamplerChain(Sampling.preset("neutral"))
    changed = 0
    for row in rows():
        check(chain, make, [0], row)
        changed += not np.array_equal(chain.distribution(row)[1], plain.distribution(row)[1])
    assert changed >= 5, "the step changed too few rows"


def histories() -> list[list[int]]:
    """Histories of few distinct tokens, so that n-grams repeat."""
    rng = np.random.default_rng(23)
    return [rng.integers(0, 4, n).tolist() for n in (1, 2, 3, 10, 40, 90)]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repeat_penalty_over_the_whole_history(penalty: float) -> None:
    sampling = Sampling.create(
        repetition_penalty=penalty, repeat_last_n=-1, top_k=0, top_p=1.0, min_p=0, temperature=1.0, seed=1
    )
    for history, row in zip(histories(), rows(), strict=False):
        check(SamplerChain(sampling), lambda t: t.RepetitionPenaltyLogitsProcessor(penalty), history, row)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram(size: int) -> None:
    sampling, n_banned = Sampling.preset("neutral", no_repeat_ngram=size, seed=1), 0
    for history, row in zip(histories(), rows(), strict=False):
        check(SamplerChain(sampling), lambda t: t.NoRepeatNGramLogitsProcessor(size), history, row)
        chain = SamplerChain(sampling)
        chain.set_history(history)
        n_banned += N_VOCAB - len(chain.distribution(row)[0])
    assert n_banned >= 2, "too few tokens were banned"


def test_min_tokens() -> None:
    row, prompt, n_min, eog = rows(1)[0], [4, 5, 6], 3, [0, 1]
    chain = SamplerChain(Sampling.preset("neutral", min_tokens=n_min, seed=1), eog_ids=eog)
    chain.set_history(prompt)
    for n_generated in range(6):
        expected = processed(
            lambda t: t.MinNewTokensLengthLogitsProcessor(len(prompt), n_min, eog, device="cpu"),
            prompt + [9] * n_generated,
            row,
        )
        ids, probs = chain.distribution(row)
        assert ids.tolist() == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(probs, expected[ids], rtol=TOLERANCE)
        assert (0 in ids) == (n_generated >= n_min)
        chain.accept(9)


def test_a_chain_of_many_steps_equals_a_list_of_processors() -> None:
    def make(t: Any) -> Any:
        return t.LogitsProcessorList(
            [
                t.RepetitionPenaltyLogitsProcessor(1.2),
                t.TemperatureLogitsWarper(1.4),
                t.TopKLogitsWarper(50),
                t.TypicalLogitsWarper(mass=0.95),
                t.TopPLogitsWarper(0.9),
                t.EpsilonLogitsWarper(3e-3),
                t.EtaLogitsWarper(5e-3),
            ]
        )

    chain = SamplerChain(
        Sampling(
            repeat_penalty=1.2, penalty_window=None, temperature=1.4, top_k=50, typical_p=0.95, top_p=0.9, min_p=0,
            epsilon_cutoff=3e-3, eta_cutoff=5e-3, seed=1,
            order=("penalties", "temperature", "top_k", "typical_p", "top_p", "epsilon_cutoff", "eta_cutoff"),
        )
    )  # fmt: skip
    for history, row in zip(histories(), rows(), strict=False):
        check(chain, make, history, row)
