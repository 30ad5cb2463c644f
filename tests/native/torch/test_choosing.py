"""Top-k logits on the device: the same as a stable sort in NumPy, and the same answers as from full rows."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.chat import Session
from slm_core.generation import Answer
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import Capability, ContextOptions, ModelOptions, TopLogits
from slm_native.backend import NativeBackend
from slm_native.kernels.device import top_of_rows

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.torch.choosing import top_logits  # noqa: E402

BUCKETS = "[decode]\nbuckets = [2, 4]\n"


def expected(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Top-k by the larger logit, then the lower id."""
    order = np.array([np.lexsort((np.arange(len(row)), -row))[:k] for row in rows])
    return order, np.take_along_axis(rows, order, 1)


@pytest.mark.parametrize("pick", [lambda rows, k: top_logits(torch.from_numpy(rows), k), top_of_rows])
@pytest.mark.parametrize("k", [1, 2, 7, 300, 1001])
def test_ties_signs_and_infinities(pick, k):
    rows = np.random.default_rng(k).standard_normal((6, 1001)).astype(np.float32).round(1)  # with many ties
    rows[1] = -5.0
    rows[2, 3:] = -np.inf
    rows[3] = np.where(np.arange(1001) % 2, 0.0, -0.0)
    rows[4] = -1e-42 * np.arange(1001)  # subnormal numbers
    top = pick(rows, k)
    tokens, logits = expected(rows, k)
    np.testing.assert_array_equal(top.tokens, tokens)
    np.testing.assert_array_equal(top.logits, logits)
    totals = np.log(np.exp(rows.astype(np.float64)).sum(1))
    np.testing.assert_allclose(top.log_totals, totals, rtol=1e-6, atol=1e-6)
    assert (top.tokens.dtype, top.logits.dtype, top.log_totals.dtype) == (np.int32, np.float32, np.float32)


@pytest.mark.parametrize("pick", [lambda rows, k: top_logits(torch.from_numpy(rows), k), top_of_rows])
@pytest.mark.parametrize("k", [1, 4])
def test_nan_and_infinity_come_first(pick, k):
    rows = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    rows[0, 17], rows[1, 3] = np.nan, np.inf
    top = pick(rows, k)
    assert np.isnan(top.logits[0, 0]) and top.tokens[0, 0] == 17
    assert top.logits[1, 0] == np.inf and top.tokens[1, 0] == 3


class OpaqueSampler:
    """A sampler with only the methods of the protocol: the engine cannot know that it needs fewer than V logits."""

    def __init__(self, chain: SamplerChain) -> None:
        self.sample, self.accept, self.set_history = chain.sample, chain.accept, chain.set_history


@pytest.mark.parametrize("profile", [None, BUCKETS], ids=["plain", "buckets"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {}, {"top_k": 7, "temperature": 1.4, "min_p": 0}, {"top_k": 305, "xtc_probability": 0.5}],
    ids=["greedy", "default", "top_k", "all"],
)
def test_answers_equal_those_from_full_rows(tmp_path, monkeypatch, profile, options):
    path = make_tiny_model("qwen3", "q8_0").write(tmp_path / "tiny.gguf")
    if profile is not None:
        path.with_name("tiny.profile.toml").write_text(profile)
    sampling, calls = Sampling(seed=4, max_tokens=24, **options), []

    def answer(model, *, full_rows: bool) -> tuple[Answer, list[float]]:
        with model.new_context(ContextOptions(128, 2, 64)) as context:
            assert Capability.DEVICE_SAMPLING in context.capabilities
            monkeypatch.setattr(context, "_engine_decode_top", recorded(context._engine_decode_top, calls))
            session = Session(context, model.vocab)
            session.append("The quick brown fox jumps")
            chain = SamplerChain.for_vocab(sampling, model.vocab)
            generation = session.generate(sampling, sampler=OpaqueSampler(chain) if full_rows else None)
            logprobs = [event.logprob for event in generation]
            return generation.answer, logprobs

    with NativeBackend().load(path, ModelOptions(device="cpu", backend_options={"tier": "torch"})) as model:
        from_rows, from_top = answer(model, full_rows=True), answer(model, full_rows=False)
    assert len(calls) == len(from_top[0].tokens) > 1, "only the second answer must use decode_top"
    assert from_top[0].tokens == from_rows[0].tokens and from_top[0].text == from_rows[0].text
    np.testing.assert_allclose(from_top[1], from_rows[1], atol=1e-5)  # float32 sums, in another order


def recorded(run, calls):
    def call(batch, k) -> TopLogits:
        calls.append(k)
        return run(batch, k)

    return call


@pytest.mark.parametrize(
    "options",
    [{"repeat_penalty": 1.1}, {"logprobs": 2}, {"top_k": 0}, {"min_tokens": 3}, {"logit_bias": {5: 1.0}}],
    ids=lambda options: next(iter(options)),
)
def test_options_that_need_more_logits_get_full_rows(tmp_path, monkeypatch, options):
    path = make_tiny_model("llama").write(tmp_path / "tiny.gguf")
    with (
        NativeBackend().load(path, ModelOptions(device="cpu", backend_options={"tier": "torch"})) as model,
        model.new_context(ContextOptions(64)) as context,
    ):
        monkeypatch.setattr(context, "_engine_decode_top", lambda batch, k: pytest.fail("picked"))
        session = Session(context, model.vocab)
        session.append("Hello")
        assert len(session.generate(Sampling(seed=1, max_tokens=4, **options)).run().tokens) > 0
        with pytest.raises(pytest.fail.Exception, match="picked"):
            session.generate(Sampling(seed=1, max_tokens=4)).run()
