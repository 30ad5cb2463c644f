"""gemma3n: E2B and E4B. Residual streams (AltUp), per-layer embeddings, sparse gates, shared keys and values."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec, read_rope, read_windows
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes, read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, RopeStyle, TensorSpec
from slm_core.architectures._tables import Table, linear, norms
from slm_core.architectures.gemma2 import sandwiched_block
from slm_core.errors import InvalidModelFile

_LAUREL_RANK = 64  # files have no key for it
_SHARED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
"""Unused tensors in files, of layers with shared keys and values."""


def spec(keys: Keys) -> ModelSpec:
    """Read a gemma3n."""
    sizes, n_streams = read_sizes(keys), keys.size("altup.num_inputs", largest=64)
    active, width = keys.count("altup.active_idx", 0), keys.size("embedding_length_per_layer_input")
    if active >= n_streams:
        raise InvalidModelFile(f"{keys.gguf.path}: metadata 'gemma3n.altup.active_idx' is {active} of {n_streams}")
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=1e6)
    local = replace(rope, freq_base=keys.number("rope.freq_base_swa", 10_000.0), factor=1.0)
    block, thresholds = _block(sizes, n_streams, width), keys.thresholds("activation_sparsity_scale", sizes.n_layers)
    layers = [
        LayerSpec(
            block,
            rope if window is None else local,
            window,
            activation=Activation.GELU_TANH,
            gate_threshold=threshold,
            plain_norms=("attn_v_norm",),
        )
        for window, threshold in zip(read_windows(keys, sizes.n_layers, period=5), thresholds, strict=True)
    ]
    return decoder_spec(
        keys,
        sizes,
        share_keys(keys, layers, keys.count("attention.shared_kv_layers", 0)),
        _outside(sizes, n_streams, width),
        embedding_scale=sizes.n_embd**0.5,
        scales_rows=False,
        attention_scale=1.0,
        logit_softcap=keys.number("final_logit_softcapping", 30.0),
        active_stream=active,
        layer_embedding_width=width,
    )


def share_keys(keys: Keys, layers: list[LayerSpec], n_shared: int) -> list[LayerSpec]:
    """``layers``; the last ``n_shared`` share the keys and values of the last earlier layer of the same kind."""
    first = max(0, len(layers) - n_shared)
    of_kind = {layer.window: index for index, layer in enumerate(layers[:first])}
    if any(layer.window not in of_kind for layer in layers[first:]):
        raise InvalidModelFile(
            f"{keys.gguf.path}: {n_shared} of {len(layers)} blocks read the keys of a block like them that is not there"
            f" (metadata '{keys.architecture}.attention.shared_kv_layers')"
        )
    shared = [
        replace(layer, kv_layer=of_kind[layer.window], tensors={**layer.tensors, **_unused(layer)})
        for layer in layers[first:]
    ]
    return layers[:first] + shared


def _unused(layer: LayerSpec) -> Table:
    return {name: replace(layer.tensors[name], required=False, used=False) for name in _SHARED if name in layer.tensors}


def _outside(sizes: Sizes, n_streams: int, width: int) -> Table:
    """The tensors outside the blocks."""
    whole = (n_streams - 1, sizes.n_embd, sizes.n_embd)
    table = {"altup_proj.weight": TensorSpec(whole), "altup_unembd_proj.weight": TensorSpec(whole)}
    return table | per_layer_outside(sizes, width)


def per_layer_outside(sizes: Sizes, width: int) -> Table:
    """The tensors of per-layer embeddings outside the blocks."""
    return {
        "per_layer_token_embd.weight": TensorSpec((sizes.n_vocab, sizes.n_layers * width)),
        **linear("per_layer_model_proj", (sizes.n_layers * width, sizes.n_embd)),
        **norms(width, "per_layer_proj_norm"),
    }


def per_layer_inside(sizes: Sizes, width: int) -> Table:
    """The tensors of per-layer embeddings in a block."""
    table = linear("inp_gate", (width, sizes.n_embd)) | linear("proj", (sizes.n_embd, width))
    return table | norms(sizes.n_embd, "post_norm")


def _block(sizes: Sizes, n_streams: int, width: int) -> Table:
    n_embd = sizes.n_embd
    return {
        **sandwiched_block(sizes),
        **norms(sizes.head_dim, "attn_q_norm", "attn_k_norm"),
        **per_layer_inside(sizes, width),
        **linear("laurel_l", (_LAUREL_RANK, n_embd)),
        **linear("laurel_r", (n_embd, _LAUREL_RANK)),
        **norms(n_embd, "laurel_post_norm", "altup_router_norm", "altup_correct_scale"),
        **linear("altup_router", (n_streams, n_embd)),
        **linear("altup_predict_coef", (n_streams**2, n_streams)),
        **linear("altup_correct_coef", (n_streams, n_streams)),
    }
