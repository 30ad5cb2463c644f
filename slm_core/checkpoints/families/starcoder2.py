"""starcoder2: StarCoder 2. Layer norms, biases everywhere, no gate."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GELU_TANH, LAYER, NORMS, decoder, read_sizes, window_of, with_biases
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope

_MATRICES = ATTENTION | weights({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})


def recipe(config: Config) -> Recipe:
    """Read a starcoder2."""
    sizes = read_sizes(config, norm=LAYER, eps_key="norm_epsilon", eps=1e-5, num_key_value_heads=2)
    config.only("hidden_act", *GELU_TANH)
    config.only("use_bias", True)
    config.only("mlp_type", "default")
    config.only("norm_type", "layer_norm")
    config.only("scale_attn_weights", True)
    # of the class that the first models were trained with
    config.neutral("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "rms_norm_eps")
    config.neutral("scale_attention_softmax_in_fp32")
    metadata = {"attention.sliding_window": window_of(config)}
    outside = with_biases(weights({"output_norm": "model.norm"}))
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    block = with_biases(_MATRICES | NORMS)
    return decoder(config, "starcoder2", sizes, block, positions, tied=True, model=outside, metadata=metadata)
