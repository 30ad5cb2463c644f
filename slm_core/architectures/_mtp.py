"""Layers for multi-token prediction (MTP, DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes
from slm_core.architectures._spec import LayerSpec, TensorSpec
from slm_core.architectures._tables import Table, linear, norms
from slm_core.errors import InvalidModelFile


def without_mtp_layers(keys: Keys, sizes: Sizes) -> tuple[Sizes, int]:
    """The dimensions without the file's MTP layers, which "block_count" includes, and the number of MTP layers.

    Raises:
        InvalidModelFile: no other layers are left.
    """
    n_mtp = keys.count("nextn_predict_layers", 0)
    if n_mtp >= sizes.n_layers:
        raise InvalidModelFile(
            f"{keys.gguf.path}: metadata '{keys.architecture}.nextn_predict_layers' is {n_mtp}"
            f" (accepted: 0 to {sizes.n_layers - 1}, below 'block_count')"
        )
    return replace(sizes, n_layers=sizes.n_layers - n_mtp), n_mtp


def mtp_layers(keys: Keys, sizes: Sizes, layer: LayerSpec, n_mtp: int) -> tuple[LayerSpec, ...]:
    """The MTP layers: blocks after the last layer, each with the tensors for its input and its logits.

    Args:
        keys: the file; without the first layer's projection it has metadata of MTP layers, but not the layers.
        sizes: the dimensions, without MTP layers.
        layer: the transformer block in each of them.
        n_mtp: their number.
    """
    if f"blk.{sizes.n_layers}.nextn.eh_proj.weight" not in keys.gguf.tensors:
        return ()
    return (replace(layer, tensors={**layer.tensors, **_tensors(sizes)}),) * n_mtp


def _tensors(sizes: Sizes) -> Table:
    """The projection of [embedding, hidden state], norms of both; norm, embeddings and output matrix, if not shared."""
    return {
        **linear("nextn.eh_proj", (sizes.n_embd, 2 * sizes.n_embd)),
        **norms(sizes.n_embd, "nextn.enorm", "nextn.hnorm"),
        **norms(sizes.n_embd, "nextn.shared_head_norm", required=False),
        "nextn.embed_tokens.weight": TensorSpec((sizes.n_vocab, sizes.n_embd), required=False),
        **linear("nextn.shared_head_head", (sizes.n_vocab, sizes.n_embd), required=False),
    }
