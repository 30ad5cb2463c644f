"""nemotron: Minitron and Nemotron 4. Layer norms with weights stored minus 1; squared ReLU."""

from __future__ import annotations

from slm_core.checkpoints.changes import OneAdded
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, LAYER, NORMS, UNGATED, decoder, read_sizes
from slm_core.checkpoints.recipe import Recipe, biases, changed, weights
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a nemotron."""
    sizes = read_sizes(config, norm=LAYER, eps_key="norm_eps", eps=1e-5)
    config.only("hidden_act", "relu2")
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    norms = {**changed(NORMS, OneAdded(), "attn_norm", "ffn_norm"), **biases(NORMS)}
    output_norm = weights({"output_norm": "model.norm"})
    outside = {**changed(output_norm, OneAdded(), "output_norm"), **biases(output_norm)}
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, partial=0.5)
    return decoder(config, "nemotron", sizes, ATTENTION | UNGATED | norms, positions, tied=False, model=outside)
