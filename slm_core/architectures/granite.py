"""granite: a llama with multipliers on embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec, read_rope, rope_factors
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes, read_sizes
from slm_core.architectures._spec import ExpertsSpec, LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, attention, biases, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a granite."""
    sizes = read_sizes(keys)
    dense = gated(sizes)
    return granite_spec(keys, sizes, dense | biases(dense, required=False))


def granite_spec(keys: Keys, sizes: Sizes, feed_forward: Table, experts: ExpertsSpec | None = None) -> ModelSpec:
    """A granite with these feed-forward layers."""
    outside = Table()
    layer = granite_attention(keys, sizes, outside)
    layer = replace(layer, tensors={**layer.tensors, **feed_forward}, experts=experts)
    return granite_decoder(keys, sizes, [layer] * sizes.n_layers, outside)


def granite_attention(keys: Keys, sizes: Sizes, outside: Table) -> LayerSpec:
    """A block up to its feed-forward layer; tensors outside the blocks are added to ``outside``.

    The key ``rope.scaling.finetuned`` states whether the model has a position embedding.
    """
    rope = rope_factors(read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED), outside)
    block = attention(sizes) | biases(attention(sizes), required=False) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    return LayerSpec(block, rope if keys.flag("rope.scaling.finetuned", True) else None)


def granite_decoder(keys: Keys, sizes: Sizes, layers: Sequence[LayerSpec], outside: Table) -> ModelSpec:
    """A granite of these blocks."""
    return decoder_spec(
        keys,
        sizes,
        layers,
        outside,
        embedding_scale=keys.number("embedding_scale", 1.0),
        residual_scale=keys.number("residual_scale", 1.0),
        attention_scale=keys.number("attention.scale", sizes.head_dim**-0.5),
        logit_scale=1 / keys.number("logit_scale"),
    )
