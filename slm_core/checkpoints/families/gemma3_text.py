"""gemma3_text: Gemma 3. A gemma2 without caps, with per-head norms; five layers of six have windows and their own RoPE.

EmbeddingGemma is an encoder of the same layers, with ``use_bidirectional_attention``.
"""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import OneAdded
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, HEAD_NORMS, decoder, read_sizes
from slm_core.checkpoints.families.gemma import NORM_ADDED
from slm_core.checkpoints.families.gemma2 import SANDWICH, check_gemma
from slm_core.checkpoints.recipe import Recipe, changed
from slm_core.checkpoints.rope import read_rope, sliding_layers
from slm_core.gguf import PlainValue

_LAYERS_OF_27B = 62
_FREQ_BASE, _LOCAL_FREQ_BASE = 1e6, 1e4


def recipe(config: Config) -> Recipe:
    """Read a gemma3; configurations of models with vision omit sizes."""
    sizes = read_sizes(
        config,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
    )
    bidirectional = config.flag("use_bidirectional_attention", False)
    check_gemma(config, sizes, _LAYERS_OF_27B, bidirectional=bidirectional)
    config.only("attn_logit_softcapping")
    period = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 6))
    metadata: dict[str, PlainValue] = {
        "attention.sliding_window": config.size("sliding_window", 4096),
        "attention.sliding_window_pattern": sliding_layers(config, sizes.n_layers, lambda i: (i + 1) % period > 0),
        "rope.freq_base_swa": local_base(config),
        "final_logit_softcapping": config.number("final_logit_softcapping", 0.0),
    }
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, _FREQ_BASE, layers="full_attention")
    block = ATTENTION | changed(HEAD_NORMS, OneAdded(), "attn_q_norm", "attn_k_norm") | GATED | SANDWICH
    name = "gemma-embedding" if bidirectional else "gemma3"
    base = decoder(config, name, sizes, block, positions, tied=True, model=NORM_ADDED, metadata=metadata)
    return replace(base, renamed={r"^(?=(embed_tokens|layers|norm)\.)": "model."}) if bidirectional else base


def local_base(config: Config) -> float:
    """The base of RoPE in layers with a window."""
    base = config.number("rope_local_base_freq", _LOCAL_FREQ_BASE)
    if "rope_parameters" not in config:
        return base
    local = config.part("rope_parameters").part("sliding_attention")
    local.only("rope_type", "default")
    return local.number("rope_theta", base)
