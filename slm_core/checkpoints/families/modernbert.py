"""modernbert: ModernBERT, an encoder. Pre-norms, gates, no biases; sliding windows in two layers of three."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import LAYER, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope, sliding_layers, stated_rope
from slm_core.gguf import RANK_POOLING, PlainValue

_FREQ_BASE, _LOCAL_FREQ_BASE = 160_000.0, 10_000.0
_BLOCK = weights(
    {
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    }
)
_FIRST = {name: part for name, part in _BLOCK.items() if name != "attn_norm.weight"}
_OUTSIDE = weights(
    {"token_embd": "embeddings.tok_embeddings", "token_embd_norm": "embeddings.norm", "output_norm": "final_norm"}
)
_NEUTRAL = """
cls_token_id decoder_bias deterministic_flash_attn
global_rope_theta initializer_cutoff_factor layer_norm_eps local_rope_theta mlp_dropout position_embedding_type
reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction tie_word_embeddings
"""
"""Keys of training, and of heads after the last norm."""


def recipe(config: Config) -> Recipe:
    """Read a modernbert."""
    sizes = read_sizes(
        config,
        norm=LAYER,
        eps_key="norm_eps",
        eps=1e-5,
        hidden_size=768,
        intermediate_size=1152,
        num_hidden_layers=22,
        num_attention_heads=12,
        max_position_embeddings=8192,
    )
    config.only("hidden_activation", "gelu")
    for name in ("attention_bias", "mlp_bias", "norm_bias"):
        config.only(name, False)
    config.neutral(*_NEUTRAL.split())
    period = config.size("global_attn_every_n_layers", 3)
    freq_base, local = _bases(config)
    metadata: dict[str, PlainValue] = {
        "attention.causal": False,
        "attention.sliding_window": config.size("local_attention", 128),
        "attention.sliding_window_pattern": sliding_layers(config, sizes.n_layers, lambda i: i % period > 0),
        "rope.freq_base_swa": local,
    }
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, freq_base, layers="full_attention")
    blocks = [_BLOCK if i else _FIRST for i in range(sizes.n_layers)]
    config.only("classifier_activation", "gelu")
    head = with_biases(weights({"cls.output": "classifier", "cls.norm": "head.norm"}), "cls.output")
    dense = with_biases(weights({"cls": "head.dense"}), wanted=config.flag("classifier_bias", False))
    return replace(
        decoder(config, "modern-bert", sizes, blocks, positions, tied=True, metadata=metadata),
        model=_OUTSIDE,
        prefix="layers.{i}.",
        unused=r"^(head|decoder|classifier)\.",
        renamed={r"^model\.": ""},
        rank_head=head | dense,
        rank_metadata={RANK_POOLING: config.text("classifier_pooling", "cls")},
    )


def _bases(config: Config) -> tuple[float, float]:
    """The bases of RoPE in global layers and in sliding-window layers."""
    if "rope_parameters" not in config:
        local = config.number("local_rope_theta", _LOCAL_FREQ_BASE)
        return config.number("global_rope_theta", _FREQ_BASE), local
    parameters = stated_rope(config, _LOCAL_FREQ_BASE, "sliding_attention")
    parameters.where.only("rope_type", "default")
    return _FREQ_BASE, parameters.freq_base
