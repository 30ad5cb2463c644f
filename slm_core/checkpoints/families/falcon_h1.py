"""falcon_h1: Falcon-H1. Parallel attention and Mamba 2 in each block; multipliers, which GGUF folds into weights."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import Multiplied
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, SILU, decoder, read_sizes
from slm_core.checkpoints.recipe import Part, Parts, Recipe, changed, weights
from slm_core.checkpoints.recurrent import heads_keys, heads_state
from slm_core.checkpoints.rope import read_rope
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_REST = weights(
    {
        "attn_norm": "input_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    }
)


def recipe(config: Config) -> Recipe:
    """Read a falcon_h1."""
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=8)
    config.only("hidden_act", *SILU)
    for name in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        config.only(name, False)
    config.only("mamba_conv_bias", True)
    if config.flag("mamba_rms_norm", False):
        config.only("mamba_norm_before_gate", False)
    config.only("attn_layer_indices")
    config.only("mamba_use_mlp", True)
    config.neutral("mamba_norm_before_gate", "mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor")
    config.neutral("time_step_floor", "time_step_max", "time_step_min")  # only for training
    expanded = config.size("mamba_expand", 2) * sizes.n_embd
    keys = heads_keys(config, "mamba_", config.size("mamba_d_ssm", expanded))
    block = {**ATTENTION, **_REST, **heads_state("mamba", int(str(keys["ssm.group_count"])))}
    block["ffn_norm"] = Part("pre_ff_layernorm.weight")  # the name in GGUF files
    if not config.flag("mamba_rms_norm", False):
        block.pop("ssm_norm.weight")
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    base = decoder(config, "falcon-h1", sizes, _multiplied(config, block, keys), positions, tied=False, metadata=keys)
    return replace(base, model=_outside(config, base.model))


def _multiplied(config: Config, block: Parts, keys: dict[str, PlainValue]) -> Parts:
    """The block; the multipliers before and after a matrix are folded into it."""
    into, gate_and_down = config.number("attention_in_multiplier", 1.0), _several(config, "mlp_multipliers", 2)
    factors = {
        "attn_q": into,
        "attn_k": config.number("key_multiplier", 1.0) * into,
        "attn_v": into,
        "attn_output": config.number("attention_out_multiplier", 1.0),
        "ssm_out": config.number("ssm_out_multiplier", 1.0),
        "ffn_gate": gate_and_down[0],
        "ffn_down": gate_and_down[1],
    }
    for name, factor in factors.items():
        block = changed(block, Multiplied(factor), name)
    n_inner, n_heads = int(str(keys["ssm.inner_size"])), int(str(keys["ssm.time_step_rank"]))
    n_selected = int(str(keys["ssm.group_count"])) * int(str(keys["ssm.state_size"]))
    counts = (n_inner, n_inner, n_selected, n_selected, n_heads)
    rows = tuple(zip(counts, _several(config, "ssm_multipliers", 5), strict=True))
    return changed(block, Multiplied(config.number("ssm_in_multiplier", 1.0), rows), "ssm_in")


def _outside(config: Config, parts: Parts) -> Parts:
    """The tensors outside the blocks; a tied output matrix would need another multiplier."""
    into, out = config.number("embedding_multiplier", 1.0), config.number("lm_head_multiplier", 1.0)
    model = {name: part for name, part in parts.items() if name != "output_norm.weight"}
    model["output_norm.weight"] = Part("model.final_layernorm.weight")
    model = changed(model, Multiplied(into), "token_embd")
    if "output.weight" in model:
        return changed(model, Multiplied(out), "output")
    if into != out:
        raise UnsupportedModel(
            f"{config.source}: 'lm_head_multiplier' is {out}, and the output matrix is the embedding, times {into}"
        )
    return model


def _several(config: Config, name: str, n: int) -> list[float]:
    multipliers = config.items(name, float, n)
    return [1.0] * n if multipliers is None else multipliers
