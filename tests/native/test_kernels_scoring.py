"""Activations, norms and options of attention scores, on every tier, against float64 one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slm_core.architectures import Activation, Xielu, alibi_slopes
from slm_native.kernels import Scoring
from slm_native.kernels.select import select_kernels

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
    """An absolute error of 2e-6 on top of the rounding of the result: the series of GELU errs by 1.5e-7 up to 12."""
    expected = np.array([FORMULAS[activation](float(x)) for x in X])
    up = np.linspace(-2, 2, len(X)).astype(np.float32)
    x = kernels.from_host(X[None])
    actual = kernels.to_host(kernels.activate(x, activation))[0]
    np.testing.assert_allclose(actual, expected, rtol=16 * ROUNDING, atol=2e-6)
    gated = kernels.to_host(kernels.gated(x, kernels.from_host(up[None]), activation))[0]
    np.testing.assert_allclose(gated, expected * up, rtol=16 * ROUNDING, atol=4e-6)


def test_the_clamped_gate_of_gpt_oss(kernels):
    rng = np.random.default_rng(0)
    gate, up = (8 * rng.standard_normal((2, 3, 50))).astype(np.float32)
    g, u = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    actual = kernels.gated(kernels.from_host(gate), kernels.from_host(up), Activation.SWIGLU_CLAMPED)
    np.testing.assert_allclose(kernels.to_host(actual), expected, rtol=32 * ROUNDING, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 96), (5, 3, 32)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(kernels, shape, has_bias):
    rng = np.random.default_rng(1)
    x, weight, bias = (rng.standard_normal(s).astype(np.float32) for s in (shape, shape[1:], shape[1:]))
    x = 3 * x + 2
    wide = torch.from_numpy(x).double()
    expected = torch.nn.functional.layer_norm(wide, shape[-1:], eps=1e-5).numpy() * weight + bias * has_bias
    device_bias = kernels.from_host(bias) if has_bias else None
    actual = kernels.layer_norm(kernels.from_host(x), kernels.from_host(weight), device_bias, 1e-5)
    np.testing.assert_allclose(kernels.to_host(actual), expected, atol=64 * ROUNDING * np.abs(expected).max())


def one_head(q, k, v, scale, position, scoring, head) -> list[float]:
    """Attention of one query by the definition of each option."""
    visible = [i for i in range(position + 1) if scoring.window is None or position - i < scoring.window]
    scores = []
    for i in visible:
        score = scale * math.fsum(float(a) * float(b) for a, b in zip(q, k[i], strict=True))
        if scoring.softcap is not None:
            score = scoring.softcap * math.tanh(score / scoring.softcap)
        if scoring.slopes is not None:
            score -= float(scoring.slopes[head]) * (position - i)
        if scoring.bias is not None and i < min(len(scoring.bias), position):
            score += float(scoring.bias[i])
        scores.append(score)
    sink = [] if scoring.sinks is None else [float(scoring.sinks[head])]
    largest = max(scores + sink)
    weights = [math.exp(score - largest) for score in scores]
    total = math.fsum(weights) + math.fsum(math.exp(score - largest) for score in sink)
    return [math.fsum(w * float(v[i][d]) for w, i in zip(weights, visible, strict=True)) / total for d in range(len(q))]


@pytest.mark.parametrize(
    "options",
    ["window", "softcap", "slopes", "sinks", "window softcap slopes sinks", "bias", "window softcap slopes sinks bias"],
)
@pytest.mark.parametrize(("n_tokens", "n_held"), [(1, 30), (12, 30), (9, 9)])
def test_attention_with_windows_softcaps_slopes_sinks_and_biases(kernels, options, n_tokens, n_held):
    if "bias" in options and not kernels.takes_bias:
        pytest.skip(f"the tier {kernels.name} adds no biases")
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((n_tokens, 6, 8), (n_held, 3, 8), (n_held, 3, 8)))
    values = {
        "window": 7,
        "softcap": 2.0,
        "slopes": alibi_slopes(6, 8.0),
        "sinks": rng.standard_normal(6).astype(np.float32),
        "bias": rng.choice([-np.inf, 0, 1.5, -2], n_held - 3).astype(np.float32),
    }
    scoring = Scoring(**{name: values[name] for name in options.split()})
    array_names = ("slopes", "sinks", "bias")
    device_scoring = Scoring(
        **{name: kernels.from_host(values[name]) if name in array_names else values[name] for name in options.split()}
    )
    actual = kernels.attention(*(kernels.from_host(x) for x in (2 * q, k, v)), 0.4, device_scoring)
    for token, head in np.ndindex(n_tokens, 6):
        expected = one_head(
            2 * q[token, head], k[:, head // 2], v[:, head // 2], 0.4, n_held - n_tokens + token, scoring, head
        )
        np.testing.assert_allclose(kernels.to_host(actual)[token, head], expected, atol=1e-5)


def test_alibi_slopes_equal_the_published_ones():
    """https://github.com/ofirpress/attention_with_linear_biases: a geometric series for a power of two; other numbers
    of heads take every second slope of the series for twice as many heads."""
    np.testing.assert_allclose(alibi_slopes(8, 8.0), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(12, 8.0)[8:], [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5])
