"""Rotary position embedding: scaling against llama.cpp; moved keys against keys rotated at their new positions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.architectures import Rope, RopeSpec, RopeStyle, YarnSpec
from slm_core.types import ContextOptions
from slm_native.kernels.reference import ReferenceKernels

SCALINGS = {
    "linear": {"scaling.type": "linear", "scaling.factor": 4.0},
    "linear without a type": {"scaling.factor": 3.0},
    "linear by its old name": {"scale_linear": 2.5},
    "none, whatever the factor": {"scaling.type": "none", "scaling.factor": 4.0},
    "yarn": {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64},
    "yarn with a magnitude": {
        "scaling.type": "yarn",
        "scaling.factor": 8.0,
        "scaling.original_context_length": 256,
        "scaling.attn_factor": 0.7,
    },
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_scaling_equals_llama_cpp(
    tmp_path, load, feed, random_tokens, assert_close, llama_cpp_logits, architecture, scaling
):
    tiny = make_tiny_model(architecture, seed=3)
    tiny.metadata.update({f"{architecture}.rope.{key}": value for key, value in scaling.items()})
    path, tokens = tiny.write(tmp_path / "m.gguf"), random_tokens(120)
    with load(path).new_context(ContextOptions(n_ctx=128)) as context:
        logits = feed(context, tokens)
    assert_close(logits, llama_cpp_logits(path, tokens), 1e-4)
    plain = make_tiny_model(architecture, seed=3).write(tmp_path / "plain.gguf")
    with load(plain).new_context(ContextOptions(n_ctx=128)) as context:
        is_same = np.allclose(feed(context, tokens), logits, rtol=1e-3)
    assert is_same == (scaling.get("scaling.type") == "none"), (
        "scaling changes the logits if and only if it is declared"
    )


def test_yarn_keeps_fast_dimensions_and_interpolates_slow_ones():
    """Both ends of the ramp (https://arxiv.org/abs/2309.00071, eq. 17), by rotations within the original context."""
    spec = RopeSpec(RopeStyle.HALF_SPLIT, 128, 1e4, 8.0, YarnSpec(4096, beta_fast=32, beta_slow=1))
    plain = 1e4 ** (-np.arange(0, 128, 2) / 128)
    n_rotations = 4096 * plain / (2 * math.pi)
    frequencies = Rope(spec, None).frequencies
    np.testing.assert_allclose(frequencies[n_rotations > 40], plain[n_rotations > 40])
    np.testing.assert_allclose(frequencies[n_rotations < 0.8], plain[n_rotations < 0.8] / 8)
    between = (n_rotations < 25) & (n_rotations > 1.3)
    assert (frequencies[between] < plain[between]).all()
    assert (frequencies[between] > plain[between] / 8).all()


@pytest.mark.parametrize("style", RopeStyle)
@pytest.mark.parametrize("delta", [-1, -100, -1900, 7])
def test_a_moved_key_equals_a_key_rotated_at_its_new_position(style, delta):
    factors = np.random.default_rng(0).uniform(1, 4, 16).astype(np.float32)
    rope = Rope(RopeSpec(style, 32, 1e4, 2.0, YarnSpec(512, 32, 1), magnitude=1.3), factors)
    keys = np.random.default_rng(1).standard_normal((50, 3, 32)).astype(np.float32)
    positions, kernels = np.arange(1950, 2000, dtype=np.int32), ReferenceKernels()
    rotated = kernels.rope(keys, *rope.tables(positions), style)
    moved = kernels.rope(rotated, *rope.step_tables(delta, 50), style)
    expected = kernels.rope(keys, *rope.tables(positions + np.int32(delta)), style)
    # Two rotations round twice, one rounds once: three roundings of numbers of magnitude up to 1.3 * 5.
    np.testing.assert_allclose(moved, expected, rtol=0, atol=4 * 2**-24 * np.abs(keys).max() * 1.3 * 2)
