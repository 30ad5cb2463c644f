"""Activations and what attention does with scores, on every tier, one number at a time in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slm_core.architectures import Activation, Xielu, alibi_slopes
from slm_native.kernels import Scoring, select_kernels

ROUNDING = 2.0**-24
X = np.concatenate([np.linspace(-12, 12, 241), [-1e4, -100.0, 100.0, 1e4]]).astype(np.float32)

FORMULAS = {
    Activation.SILU: lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
    Activation.GELU: lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    Activation.GELU_TANH: lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Activation.RELU: lambda x: max(x, 0.0),
    Activation.RELU_SQUARED: lambda x: max(x, 0.0) ** 2,
    Xielu(0.9, 0.6, 0.5, -1e-6): lambda x: (
        0.6 * x * x + 0.5 * x if x > 0 else 0.9 * (math.expm1(min(x, -1e-6)) - x) + 0.5 * x
    ),
}


@pytest.fixture
def kernels(tier):
    return select_kernels(tier).kernels


@pytest.mark.parametrize("activation", FORMULAS, ids=str)
def test_activations(kernels, activation):
    """Within 1e-6 of the largest input up to 12, beyond the rounding of the result: GELU's series is off by 1.5e-7."""
    wanted = np.array([FORMULAS[activation](float(x)) for x in X])
    up = np.linspace(-2, 2, len(X)).astype(np.float32)
    x = kernels.from_host(X[None])
    found = kernels.to_host(kernels.activate(x, activation))[0]
    np.testing.assert_allclose(found, wanted, rtol=16 * ROUNDING, atol=2e-6)
    gated = kernels.to_host(kernels.gated(x, kernels.from_host(up[None]), activation))[0]
    np.testing.assert_allclose(gated, wanted * up, rtol=16 * ROUNDING, atol=4e-6)


def test_the_clamped_gate_of_gpt_oss(kernels):
    rng = np.random.default_rng(0)
    gate, up = (8 * rng.standard_normal((2, 3, 50))).astype(np.float32)
    g, u = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    wanted = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    found = kernels.gated(kernels.from_host(gate), kernels.from_host(up), Activation.SWIGLU_CLAMPED)
    np.testing.assert_allclose(kernels.to_host(found), wanted, rtol=32 * ROUNDING, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 96), (5, 3, 32)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(kernels, shape, has_bias):
    rng = np.random.default_rng(1)
    x, weight, bias = (rng.standard_normal(s).astype(np.float32) for s in (shape, shape[1:], shape[1:]))
    x = 3 * x + 2
    wide = torch.from_numpy(x).double()
    wanted = torch.nn.functional.layer_norm(wide, shape[-1:], eps=1e-5).numpy() * weight + bias * has_bias
    given = kernels.from_host(bias) if has_bias else None
    found = kernels.layer_norm(kernels.from_host(x), kernels.from_host(weight), given, 1e-5)
    np.testing.assert_allclose(kernels.to_host(found), wanted, atol=64 * ROUNDING * np.abs(wanted).max())


def one_head(q, k, v, scale, position, scoring, head) -> list[float]:
    """Attention of one query by the definition of each option."""
    shown = [i for i in range(position + 1) if scoring.window is None or position - i < scoring.window]
    scores = []
    for i in shown:
        score = scale * math.fsum(float(a) * float(b) for a, b in zip(q, k[i], strict=True))
        if scoring.softcap is not None:
            score = scoring.softcap * math.tanh(score / scoring.softcap)
        if scoring.slopes is not None:
            score -= float(scoring.slopes[head]) * (position - i)
        scores.append(score)
    sink = [] if scoring.sinks is None else [float(scoring.sinks[head])]
    largest = max(scores + sink)
    weights = [math.exp(score - largest) for score in scores]
    total = math.fsum(weights) + math.fsum(math.exp(score - largest) for score in sink)
    return [math.fsum(w * float(v[i][d]) for w, i in zip(weights, shown, strict=True)) / total for d in range(len(q))]


@pytest.mark.parametrize("options", ["window", "softcap", "slopes", "sinks", "window softcap slopes sinks"])
@pytest.mark.parametrize(("n_tokens", "n_held"), [(1, 30), (12, 30), (9, 9)])
def test_attention_with_more_than_a_softmax(kernels, options, n_tokens, n_held):
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((n_tokens, 6, 8), (n_held, 3, 8), (n_held, 3, 8)))
    values = {
        "window": 7,
        "softcap": 2.0,
        "slopes": alibi_slopes(6, 8.0),
        "sinks": rng.standard_normal(6).astype(np.float32),
    }
    given = Scoring(**{name: values[name] for name in options.split()})
    arrays = ("slopes", "sinks")
    placed = Scoring(
        **{name: kernels.from_host(values[name]) if name in arrays else values[name] for name in options.split()}
    )
    found = kernels.attention(*(kernels.from_host(x) for x in (2 * q, k, v)), 0.4, placed)
    for token, head in np.ndindex(n_tokens, 6):
        wanted = one_head(
            2 * q[token, head], k[:, head // 2], v[:, head // 2], 0.4, n_held - n_tokens + token, given, head
        )
        np.testing.assert_allclose(kernels.to_host(found)[token, head], wanted, atol=1e-5)


def test_slopes_of_alibi_are_those_of_its_authors():
    """https://github.com/ofirpress/attention_with_linear_biases: for a power of two a series, for others every second
    of the series for twice as many."""
    np.testing.assert_allclose(alibi_slopes(8, 8.0), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(12, 8.0)[8:], [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5])
