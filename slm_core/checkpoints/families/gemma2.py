"""gemma2: Gemma 2. Pre-norms and post-norms, soft-caps, and a window in every other layer."""

from __future__ import annotations

from slm_core.checkpoints.changes import OneAdded
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, GELU_TANH, Sizes, decoder, read_sizes
from slm_core.checkpoints.families.gemma import NORM_ADDED
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope, sliding_layers
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

SANDWICH = weights(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    OneAdded(),
)
_LAYERS_OF_27B = 46


def recipe(config: Config) -> Recipe:
    """Read a gemma2."""
    sizes = read_sizes(config, num_key_value_heads=4, head_dim=256)
    check_gemma(config, sizes, _LAYERS_OF_27B)
    metadata: dict[str, PlainValue] = {
        "attention.sliding_window": config.size("sliding_window", 4096),
        "attention.sliding_window_pattern": sliding_layers(config, sizes.n_layers, lambda i: (i + 1) % 2 > 0),
        "attn_logit_softcapping": config.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": config.number("final_logit_softcapping", 30.0),
    }
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    block = ATTENTION | GATED | SANDWICH
    return decoder(config, "gemma2", sizes, block, positions, tied=True, model=NORM_ADDED, metadata=metadata)


def check_gemma(config: Config, sizes: Sizes, n_layers_of_27b: int, *, bidirectional: bool = False) -> None:
    """Refuse settings that no published model has, such as a scale of scores that GGUF files cannot store.

    Raises:
        UnsupportedModel: the configuration has such a setting.
    """
    config.only("hidden_act", *GELU_TANH)
    config.only("hidden_activation", *GELU_TANH)
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", bidirectional)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.is_null(name) and n_layers_of_27b == _LAYERS_OF_27B:
            raise UnsupportedModel(f"{config.source}: {name!r} is None, which is not implemented")
    expected = sizes.n_embd / sizes.n_heads if sizes.n_layers == n_layers_of_27b else sizes.head_dim
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if scalar != expected:
        raise UnsupportedModel(
            f"{config.source}: 'query_pre_attn_scalar' is {scalar}, which is not implemented (accepted: {expected})"
        )
