"""phi: Phi 1, 1.5 and 2. Layer norms and biases, parallel attention and feed-forward after one norm, no gate."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import GELU_TANH, LAYER, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope

_BLOCK = with_biases(
    weights(
        {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        }
    )
)
_OUTSIDE = with_biases(weights({"output_norm": "model.final_layernorm", "output": "lm_head"}))


def recipe(config: Config) -> Recipe:
    """Read a phi."""
    sizes = read_sizes(config, norm=LAYER, eps_key="layer_norm_eps", eps=1e-5)
    config.only("hidden_act", *GELU_TANH)
    config.only("qk_layernorm", False)
    config.only("tie_word_embeddings", False)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, partial=0.5)
    return decoder(config, "phi2", sizes, _BLOCK, positions, tied=False, model=_OUTSIDE)
