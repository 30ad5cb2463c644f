"""rwkv7: RWKV-7 "Goose". Time mixing by a recurrent state; no attention, no positions.

Directories have the tensor names of flash-linear-attention, or of the reference implementation (BlinkDL's RWKV-LM).
Configurations of the reference implementation have the class Rwkv7ForCausalLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from slm_core.checkpoints.changes import Reshaped, Transposed
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import LAYER
from slm_core.checkpoints.recipe import Part, Recipe, biases, weights
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_N_CTX = 2**20  # as in GGUF files; a recurrent state has no limit
_HEAD_EPS = 64e-5  # of the per-head norm; neither GGUF files nor the reference implementation have a key for it
_REFERENCE = "Rwkv7ForCausalLM"  # flash-linear-attention's begins with four capitals
_RANKS = {"decay": ("decay", 64), "iclr": ("a", 64), "value_residual_mix": ("v", 16), "gate": ("gate", 128)}
_NEUTRAL = """
attn_mode fuse_cross_entropy fuse_linear_cross_entropy fuse_norm max_position_embeddings num_heads use_l2warp
"""
"""Keys of kernels and of training; the number of heads follows from other keys."""

_NORMS = weights({"attn_norm": "attn_norm", "attn_norm_2": "ffn_norm", "time_mix_ln": "attn.g_norm"})
_MATRICES = weights(
    {
        "time_mix_receptance": "attn.r_proj",
        "time_mix_key": "attn.k_proj",
        "time_mix_value": "attn.v_proj",
        "time_mix_output": "attn.o_proj",
        "channel_mix_key": "ffn.key",
        "channel_mix_value": "ffn.value",
    }
)
_REFERENCE_NORMS = weights({"attn_norm": "ln1", "attn_norm_2": "ln2", "time_mix_ln": "att.ln_x"})
_REFERENCE_MATRICES = weights(
    {
        **{f"time_mix_{name}": f"att.{name}" for name in ("receptance", "key", "value", "output")},
        **{f"channel_mix_{name}": f"ffn.{name}" for name in ("key", "value")},
    }
)
_SHARES = (6, 1, 1)


def recipe(config: Config) -> Recipe:
    """Read an rwkv7; the first block's value mixing is not used."""
    return _of_reference(config) if _REFERENCE in config.strings("architectures") else _of_linear_attention(config)


def _of_linear_attention(config: Config) -> Recipe:
    """A directory with the names of flash-linear-attention."""
    n_embd, n_layers = config.size("hidden_size", 2048), config.size("num_hidden_layers", 24, MAX_PARTS)
    config.only("hidden_act", "sqrelu")
    config.only("norm_first", True)
    config.only("norm_bias", True)
    config.only("value_dim", n_embd, [n_embd] * n_layers)
    config.only("attn", None)  # layers with attention
    config.neutral(*_NEUTRAL.split())
    ranks = {key: _rank(config, *stated) for key, stated in _RANKS.items()}
    metadata = _metadata(config, n_embd, n_layers, _n_ff(config, n_embd), ranks)
    outside = weights({"token_embd_norm": "model.layers.0.pre_norm", "output_norm": "model.norm"})
    matrices = {"token_embd": "model.embeddings"}
    if not config.flag("tie_word_embeddings", False):
        matrices["output"] = "lm_head"
    unused = r"^model\.layers\.0\.attn\.v_lora\." + ("" if "output" in matrices else r"|^lm_head\.weight$")
    model = outside | biases(outside) | weights(matrices)
    return Recipe("rwkv7", metadata, model, [_block(is_first=i == 0) for i in range(n_layers)], unused=unused)


def _of_reference(config: Config) -> Recipe:
    """A directory with the reference implementation's names; ranks are required, because default ranks vary."""
    n_embd, n_layers = config.size("hidden_size", 768), config.size("num_hidden_layers", 12, MAX_PARTS)
    config.only("norm_bias", True)
    config.only("use_deep_embed", False)
    config.only("num_heads", n_embd // config.size("head_dim", 64))
    config.neutral("max_position_embeddings", "wkv_implementation", "wkv_state_dtype")
    ranks = {key: config.size(f"{name}_low_rank_dim") for key, (name, _) in _RANKS.items()}
    metadata = _metadata(config, n_embd, n_layers, config.size("intermediate_size", 4 * n_embd), ranks)
    outside = weights({"token_embd_norm": "rwkv7.blocks.0.ln0", "output_norm": "rwkv7.ln_out"})
    matrices = {"token_embd": "rwkv7.emb"}
    if not config.flag("tie_word_embeddings", False):
        matrices["output"] = "head"
    unused = r"^rwkv7\.blocks\.0\.att\.v[012]$" + ("" if "output" in matrices else r"|^head\.weight$")
    model = outside | biases(outside) | weights(matrices)
    blocks = [_reference_block(is_first=i == 0) for i in range(n_layers)]
    return Recipe("rwkv7", metadata, model, blocks, "rwkv7.blocks.{i}.", unused=unused)


def _metadata(config: Config, n_embd: int, n_layers: int, n_ff: int, ranks: Mapping[str, int]) -> dict[str, PlainValue]:
    return {
        "block_count": n_layers,
        "context_length": _N_CTX,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": 0,
        **_heads(config, n_embd),
        **{f"attention.{key}_lora_rank": rank for key, rank in ranks.items()},
    }


def _block(*, is_first: bool) -> dict[str, Part]:
    block = _NORMS | biases(_NORMS) | _MATRICES | _vectors("attn")
    block["time_mix_lerp_fused.weight"] = replace(
        block["time_mix_lerp_fused.weight"], older=Part("attn.x_x", Reshaped(_SHARES))
    )
    for name in "wag" if is_first else "wavg":
        block |= weights({f"time_mix_{name}{i}": f"attn.{name}_lora.lora.{at}" for i, at in ((1, 0), (2, 2))})
        if name != "g":
            block[f"time_mix_{name}0.weight"] = Part(f"attn.{name}_lora.lora.2.bias")
    return block


def _reference_block(*, is_first: bool) -> dict[str, Part]:
    block = _REFERENCE_NORMS | biases(_REFERENCE_NORMS) | _REFERENCE_MATRICES | _vectors("att")
    for name in "wag" if is_first else "wavg":
        for i in (1, 2):
            block[f"time_mix_{name}{i}.weight"] = Part(f"att.{name}{i}", Transposed())
        if name != "g":
            block[f"time_mix_{name}0.weight"] = Part(f"att.{name}0", Reshaped())
    return block


def _vectors(mixing: str) -> dict[str, Part]:
    """The mixing ratios and other numbers per channel; ``mixing`` is the name of time mixing."""
    return {
        "time_mix_lerp_fused.weight": Part(f"{mixing}.x_{{x}}", Reshaped(_SHARES), 6, letters="rwkvag"),
        **{f"time_mix_{name}.weight": Part(f"{mixing}.{name}", Reshaped()) for name in ("k_k", "k_a", "r_k")},
        "channel_mix_lerp_k.weight": Part("ffn.x_k", Reshaped()),
    }


def _n_ff(config: Config, n_embd: int) -> int:
    """The width of channel mixing; if it is missing, from the ratio, rounded to 32."""
    ratio = config.number("hidden_ratio", 4)
    return config.size("intermediate_size", max(1, 32 * math.ceil(int(n_embd * ratio) / 32)))


def _heads(config: Config, n_embd: int) -> dict[str, PlainValue]:
    """The width of heads, which determines the epsilon of their norm, and the epsilon of other norms."""
    if config.is_null("head_dim"):
        head_dim = n_embd // config.size("num_heads") or 1
        config.neutral("head_dim")
    else:
        head_dim = config.size("head_dim", 64)
    eps = config.number("norm_eps", 1e-5)
    if not math.isclose(head_dim * eps, _HEAD_EPS, rel_tol=1e-6):
        raise UnsupportedModel(
            f"{config.source}: 'head_dim' times 'norm_eps' is {head_dim * eps} (accepted: {_HEAD_EPS}, the epsilon of"
            " the heads' norm)"
        )
    return {"wkv.head_size": head_dim, LAYER: eps}


def _rank(config: Config, name: str, default: int) -> int:
    """A rank; null means a formula that differs between versions of the package."""
    key = f"{name}_low_rank_dim"
    if config.is_null(key):
        raise UnsupportedModel(f"{config.source}: {key!r} is null (accepted: the rank)")
    return config.size(key, default)
