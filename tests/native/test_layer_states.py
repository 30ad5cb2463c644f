"""States after each layer equal transformers', for every kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slm_core as slm
from native.architectures.encoders import CASES as ENCODERS
from native.architectures.engines import make_subject
from native.exact import exact
from slm_core.types import Capability, Pos

FAMILIES = ("qwen3", "gemma2", "qwen3moe", "deepseek2", "falcon", "mamba2", "falcon_h1", "olmo2", "bert", "modern_bert")
"""Plain, norms around layers, MoE, latent attention, parallel, recurrent, hybrid, norms of sums, encoders."""
BOUND = 1e-4  # clause 9 of the contract: float32, relative


@pytest.mark.parametrize("family", FAMILIES)
def test_states_after_each_layer_equal_transformers(family: str, tmp_path: Path, load: Any, random_tokens: Any) -> None:
    is_encoder = family in ENCODERS
    subject, tokens = make_subject(tmp_path, family, *([ENCODERS] if is_encoder else [])), random_tokens(40)
    with torch.inference_mode():
        states = subject.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    model = load(subject.path)
    n_layers, first = model.info.n_layers, int(family != "mamba2")  # the others begin with the embeddings
    expected = [each[0].float().numpy() for each in states[first : first + n_layers]]
    with model.new_context(exact(n_ctx=64, n_batch=64)) as context:
        assert Capability.LAYER_STATES in context.capabilities
        batch = context.new_batch()
        batch.extend(tokens, Pos(0, 0), logits="all")
        actual = context.layer_states(batch, range(n_layers))
    n_compared = n_layers if family in ("bert", "mamba2") else n_layers - 1  # the last states are normalized
    for layer in range(n_compared):
        error = np.linalg.norm(actual[layer] - expected[layer], axis=1) / np.linalg.norm(expected[layer], axis=1)
        assert error.max() < BOUND, f"layer {layer}"
    assert n_compared > 1


def test_streams_and_offloaded_layers_are_not_declared(tmp_path: Path, load: Any) -> None:
    model = load(make_subject(tmp_path, "gemma3n").path)
    with model.new_context(exact(n_ctx=32)) as context:
        assert Capability.LAYER_STATES not in context.capabilities
    with (
        slm.load(slm.demo_model_path(), backend="native", resident_bytes=1 << 20) as demo,
        demo.new_context(n_ctx=32) as context,
    ):
        assert Capability.LAYER_STATES not in context.capabilities
