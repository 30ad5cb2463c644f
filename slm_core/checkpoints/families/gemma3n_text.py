"""gemma3n_text: Gemma 3n. Residual streams (AltUp), per-layer embeddings, sparse gates, shared keys and values."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, GELU_TANH, HEAD_NORMS, decoder, read_sizes
from slm_core.checkpoints.families.gemma3_text import local_base
from slm_core.checkpoints.recipe import Part, Recipe, weights
from slm_core.checkpoints.rope import read_rope, sliding_layers
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_LAUREL_RANK = 64  # files have no key for it
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # defaults
_KEYS = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
SANDWICH = weights(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
PER_LAYER_INSIDE = weights(
    {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
)
PER_LAYER_OUTSIDE = weights(
    {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
_STREAMS = {
    **weights(
        {
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_correct_coef": "altup.correction_coefs",
        }
    ),
    "altup_correct_scale.weight": Part("altup.correct_output_scale"),
}


def recipe(config: Config) -> Recipe:
    """Read a gemma3n."""
    n_layers = config.size("num_hidden_layers", 35, MAX_PARTS)
    sizes = read_sizes(
        config,
        n_ff=_n_ff(config, n_layers),
        hidden_size=2048,
        num_hidden_layers=35,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=32_768,
    )
    config.only("hidden_activation", *GELU_TANH)
    config.only("attention_bias", False)
    config.only("laurel_rank", _LAUREL_RANK)
    config.only("altup_correct_scale", True)
    config.neutral("altup_coef_clip", "altup_lr_multiplier")  # only for training
    config.neutral("vocab_size_per_layer_input")  # shapes are checked
    config.neutral("query_pre_attn_scalar")  # published, and read by no class: scores are not scaled
    n_streams, n_shared = config.size("altup_num_inputs", 4, MAX_PARTS), config.count("num_kv_shared_layers", 15)
    metadata: dict[str, PlainValue] = {
        "attention.sliding_window": config.size("sliding_window", 512),
        "attention.sliding_window_pattern": sliding_layers(config, n_layers, lambda i: (i + 1) % 5 > 0),
        "attention.shared_kv_layers": n_shared,
        "altup.num_inputs": n_streams,
        "altup.active_idx": config.count("altup_active_idx", 0),
        "embedding_length_per_layer_input": config.size("hidden_size_per_layer_input", 256),
        "activation_sparsity_scale": _thresholds(config, n_layers),
        "final_logit_softcapping": config.number("final_logit_softcapping", 30.0),
        "rope.freq_base_swa": local_base(config),
    }
    outside = PER_LAYER_OUTSIDE | {
        f"{name}.weight": Part(f"model.{theirs}.{{x}}.weight", None, n_streams - 1)
        for name, theirs in (("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections"))
    }
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 1e6, layers="full_attention")
    block = {**ATTENTION, **HEAD_NORMS, **GATED, **SANDWICH, **PER_LAYER_INSIDE, **_STREAMS}
    base = decoder(config, "gemma3n", sizes, block, positions, tied=True, model=outside, metadata=metadata)
    return without_shared_keys(base, n_shared)


def without_shared_keys(recipe: Recipe, n_shared: int) -> Recipe:
    """``recipe`` whose last blocks read other blocks' keys and values: their own tensors are unused."""
    first = max(0, len(recipe.blocks) - n_shared)
    shared = [{name: part for name, part in block.items() if name not in _KEYS} for block in recipe.blocks[first:]]
    if not shared:
        return recipe
    indices = "|".join(str(first + i) for i in range(len(shared)))
    keys = rf"^model\.layers\.({indices})\.self_attn\.(k_proj|v_proj|k_norm)\.weight$"
    unread = {
        f"blk.{i}.{name}": part.below(recipe.prefix.format(i=i))
        for i, block in enumerate(recipe.blocks[first:], first)
        for name, part in block.items()
        if name in _KEYS
    }
    blocks = [*recipe.blocks[:first], *shared]
    return replace(recipe, blocks=blocks, unused=f"{recipe.unused}|{keys}", unread=unread)


def _n_ff(config: Config, n_layers: int) -> int:
    """One width, or one for each layer."""
    if not config.is_list("intermediate_size"):
        return config.size("intermediate_size", 16_384)
    widths = set(config.items("intermediate_size", int, n_layers) or [])
    if len(widths) != 1 or min(widths) < 1:
        raise UnsupportedModel(
            f"{config.source}: 'intermediate_size' has {str(sorted(widths))[:80]} (accepted: one width of all layers)"
        )
    return int(widths.pop())


def _thresholds(config: Config, n_layers: int) -> list[float]:
    """The quantile of the normal distribution for each share; minus infinity for a share of 0."""
    default = [_SPARSITY if i < _SPARSE_LAYERS < n_layers else 0.0 for i in range(n_layers)]
    shares = config.items("activation_sparsity_pattern", float, n_layers) or default
    if not all(0 <= share < 1 for share in shares):
        raise UnsupportedModel(
            f"{config.source}: 'activation_sparsity_pattern' has {repr(shares)[:80]} (accepted: 0 to 1)"
        )
    return [NormalDist().inv_cdf(share) if share else -math.inf for share in shares]
