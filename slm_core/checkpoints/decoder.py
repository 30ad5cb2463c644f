"""Shared parts of the recipes of decoders: dimensions, windows, tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slm_core.checkpoints.changes import Interleaved
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.recipe import Part, Parts, Recipe, biases, changed, weights
from slm_core.checkpoints.rope import Positions
from slm_core.gguf import PlainValue

RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
ATTENTION = weights(
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
    }
)
UNGATED = weights({"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"})
GATED = UNGATED | weights({"ffn_gate": "mlp.gate_proj"})
NORMS = weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
HEAD_NORMS = weights({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
SILU, GELU_TANH = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
"""The names of an activation."""


class Sizes(NamedTuple):
    """The dimensions that families use, and all dimensions as GGUF's keys."""

    n_layers: int
    n_ctx: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    metadata: dict[str, PlainValue]


def read_sizes(
    config: Config,
    *,
    norm: str = RMS,
    eps_key: str = "rms_norm_eps",
    eps: float = 1e-6,
    n_ff: int | None = None,
    **defaults: int,
) -> Sizes:
    """Read the dimensions. Without a value in the configuration or ``defaults``, K = H and D = E / H.

    Args:
        config: read for the dimensions and the norms' epsilon.
        norm: GGUF's key of the epsilon.
        eps_key: the configuration's key of the epsilon.
        eps: default of the epsilon.
        n_ff: F, if the family's configurations store it in another form.
        defaults: the family's defaults of sizes.
    """
    n_embd = config.size("hidden_size", defaults.get("hidden_size"))
    n_heads = config.size("num_attention_heads", defaults.get("num_attention_heads"))
    n_kv_heads = n_heads if config.is_null("num_key_value_heads") else defaults.get("num_key_value_heads", n_heads)
    return make_sizes(
        n_layers=config.size("num_hidden_layers", defaults.get("num_hidden_layers"), MAX_PARTS),
        n_ctx=config.size("max_position_embeddings", defaults.get("max_position_embeddings")),
        n_embd=n_embd,
        n_ff=n_ff or config.size("intermediate_size", defaults.get("intermediate_size")),
        n_heads=n_heads,
        n_kv_heads=config.size("num_key_value_heads", n_kv_heads),
        head_dim=config.size("head_dim", defaults.get("head_dim", n_embd // n_heads or 1)),
        further={norm: config.number(eps_key, eps)},
    )


def make_sizes(
    *,
    n_layers: int,
    n_ctx: int,
    n_embd: int,
    n_ff: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    further: dict[str, PlainValue],
) -> Sizes:
    """The dimensions as GGUF's keys, and the keys of ``further``."""
    metadata: dict[str, PlainValue] = {
        "block_count": n_layers,
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **further,
    }
    return Sizes(n_layers, n_ctx, n_embd, n_heads, n_kv_heads, head_dim, metadata)


def window_of(config: Config, default: int = 0) -> int:
    """The window of sliding-window layers; 0 if there is none."""
    return 0 if config.is_null("sliding_window") else config.count("sliding_window", default)


def outside(config: Config, *, tied: bool) -> dict[str, Part]:
    """The tensors outside the blocks. There is no output matrix if the configuration ties it to the embedding.

    Args:
        config: read for ``tie_word_embeddings``.
        tied: its default.
    """
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not config.flag("tie_word_embeddings", tied):
        names["output"] = "lm_head"
    return weights(names)


def decoder(
    config: Config,
    architecture: str,
    sizes: Sizes,
    blocks: Parts | Sequence[Parts],
    positions: Positions | None,
    *,
    tied: bool,
    model: Parts | None = None,
    metadata: Mapping[str, PlainValue] | None = None,
) -> Recipe:
    """Compose a recipe.

    Args:
        config: read for whether the output matrix is the embedding.
        architecture: its name in GGUF files.
        sizes: the dimensions.
        blocks: the tensors of each block, or one mapping for all blocks.
        positions: the position embedding; None if the family has no keys for it.
        tied: see ``outside``.
        model: tensors outside the blocks that ``outside`` lacks, or that have other names.
        metadata: additional keys.
    """
    model_parts = outside(config, tied=tied) | dict(model or {})
    keys, tables = positions if positions is not None else ({}, {})
    unused = (
        r"rotary_emb\.inv_freq$"
        if "output.weight" in model_parts
        else r"rotary_emb\.inv_freq$|^(lm_head|embed_out)\.weight$"
    )
    each = [blocks] * sizes.n_layers if isinstance(blocks, Mapping) else blocks
    return Recipe(
        architecture, sizes.metadata | keys | dict(metadata or {}), model_parts, each, tables=tables, unused=unused
    )


def interleaved(parts: Parts, sizes: Sizes) -> dict[str, Part]:
    """``parts`` with query and key rows in the order of interleaved RoPE pairs."""
    with_queries = changed(parts, Interleaved(sizes.n_heads), "attn_q")
    return changed(with_queries, Interleaved(sizes.n_kv_heads), "attn_k")


def with_biases(parts: Parts, *names: str, wanted: bool = True) -> dict[str, Part]:
    """``parts``, and the biases of the named weights if ``wanted``."""
    return {**parts, **(biases(parts, *names) if wanted else {})}


def experts(theirs: str, gate: str, up: str, down: str, n_experts: int) -> dict[str, Part]:
    """The matrices of all experts, stored separately under the name ``theirs``, in which "{x}" is the index."""
    names = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {f"{name}.weight": Part(f"{theirs}.{each}.weight", None, n_experts) for name, each in names.items()}
