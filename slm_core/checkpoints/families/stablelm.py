"""stablelm: Stable LM 1 and 2. Layer norms, a part of each head rotated; some have parallel layers."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, LAYER, NORMS, SILU, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Part, Recipe, weights
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a stablelm; norms of heads are stored apart."""
    sizes = read_sizes(config, norm=LAYER, eps_key="layer_norm_eps", eps=1e-5, num_key_value_heads=32)
    config.only("hidden_act", *SILU)
    config.only("rotary_scaling_factor", 1.0)
    parallel = config.flag("use_parallel_residual", False)
    before = weights({"attn_norm": "input_layernorm"}) if parallel else NORMS
    attention = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v", wanted=config.flag("use_qkv_bias", False))
    block = attention | GATED | with_biases(before)
    if config.flag("qk_layernorm", False):
        for name, n_heads in (("q", sizes.n_heads), ("k", sizes.n_kv_heads)):
            block[f"attn_{name}_norm.weight"] = Part(f"self_attn.{name}_layernorm.norms.{{x}}.weight", None, n_heads)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, partial=0.25)
    outside = with_biases(weights({"output_norm": "model.norm"}))
    metadata = {"use_parallel_residual": parallel}
    return decoder(config, "stablelm", sizes, block, positions, tied=False, model=outside, metadata=metadata)
