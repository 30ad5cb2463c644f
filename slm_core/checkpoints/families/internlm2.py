"""internlm2: InternLM 2 and 2.5. A llama with other tensor names, and queries, keys and values in one matrix."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import Both, GroupPart, Interleaved
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import SILU, decoder, read_sizes
from slm_core.checkpoints.recipe import Part, Recipe, weights
from slm_core.checkpoints.rope import Positions, read_rope, stated_rope

_BLOCK = weights(
    {
        "attn_norm": "attention_norm",
        "attn_output": "attention.wo",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    }
)
_OUTSIDE = weights({"token_embd": "model.tok_embeddings", "output_norm": "model.norm", "output": "output"})
_FUSED = "attention.wqkv.weight"


def recipe(config: Config) -> Recipe:
    """Read an internlm2."""
    sizes = read_sizes(config)
    config.only("hidden_act", *SILU)
    config.only("bias", False)
    config.only("tie_word_embeddings", False)
    n_queries = sizes.n_heads // sizes.n_kv_heads
    parts = [GroupPart(n_queries, sizes.n_kv_heads, slice(*bounds)) for bounds in ((0, -2), (-2, -1), (-1, None))]
    block = {
        **_BLOCK,
        "attn_q.weight": Part(_FUSED, Both(parts[0], Interleaved(sizes.n_heads))),
        "attn_k.weight": Part(_FUSED, Both(parts[1], Interleaved(sizes.n_kv_heads))),
        "attn_v.weight": Part(_FUSED, parts[2]),
    }
    base = decoder(config, "internlm2", sizes, block, _positions(config, sizes.head_dim, sizes.n_ctx), tied=False)
    return replace(base, model=_OUTSIDE)


def _positions(config: Config, head_dim: int, n_ctx: int) -> Positions:
    """RoPE for up to ``n_ctx`` tokens: published models scale it by the length of longer texts."""
    rope = stated_rope(config, 10_000.0)
    if rope.kind != "dynamic":
        return read_rope(config, head_dim, n_ctx)
    rope.where.neutral("factor")
    return Positions({"rope.dimension_count": head_dim, "rope.freq_base": rope.freq_base}, {})
