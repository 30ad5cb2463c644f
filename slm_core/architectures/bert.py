"""bert: BERT and related encoders (MiniLM, BGE, E5, GTE). Learned positions, post-norms, biases, no gate."""

from __future__ import annotations

from slm_core.architectures._decoder import encoder_spec
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import POSITIONS, Activation, LayerSpec, ModelSpec, NormKind, TensorSpec
from slm_core.architectures._tables import attention, biases, embedding_of_texts, norms, rank_head, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read a bert."""
    sizes = read_sizes(keys)
    block = attention(sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_output_norm", "layer_output_norm")
    layer = LayerSpec(block | biases(block), None, activation=Activation.GELU)
    outside = embedding_of_texts(keys, sizes) | rank_head(keys, sizes)
    outside[POSITIONS] = TensorSpec((keys.size("context_length"), sizes.n_embd))
    return encoder_spec(keys, sizes, [layer] * sizes.n_layers, outside, norm=NormKind.LAYER, output_norm="")
