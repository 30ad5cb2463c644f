"""Reads the weights of AltUp's residual streams and of per-layer embeddings, and prepares them for a kernel set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slm_native.kernels import AltUp, Laurel, LayerEmbedding, Linear, Norm, Weight
from slm_native.kv import Array
from slm_native.steps import LayerEmbeddingTable


class Tensors(NamedTuple):
    """Functions that read tensors by name. Names of matrices and norms have no ".weight".

    Attributes:
        linear: reads a matrix.
        each: reads the matrices of one tensor.
        table: reads a matrix whose rows are looked up.
        vector: reads a tensor as float32.
        norm: reads a norm.
        has: whether the file has a tensor.
    """

    linear: Callable[[str], Linear]
    each: Callable[[str], Sequence[Linear]]
    table: Callable[[str], Weight]
    vector: Callable[[str], Array | None]
    norm: Callable[[str], Norm | None]
    has: Callable[[str], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """The matrices that split one residual stream into several, and merge several into one."""

    spread: Sequence[Linear]  # [N-1] of (E, E)
    merge: Sequence[Linear]  # [N-1] of (E, E)


def read_streams(tensors: Tensors) -> Streams:
    """The matrices of the residual streams, outside the blocks."""
    return Streams(tensors.each("altup_proj"), tensors.each("altup_unembd_proj"))


def read_layer_embeddings(tensors: Tensors) -> LayerEmbeddingTable | None:
    """The per-layer embeddings and their projection; None if the model has none."""
    if not tensors.has("per_layer_token_embd.weight"):
        return None
    return LayerEmbeddingTable(
        table=tensors.table("per_layer_token_embd.weight"),
        project=tensors.linear("per_layer_model_proj"),
        norm=_norm(tensors, "per_layer_proj_norm"),
    )


def read_altup(tensors: Tensors, prefix: str) -> AltUp | None:
    """A block's AltUp weights; None if it has none."""
    if not tensors.has(f"{prefix}altup_router.weight"):
        return None
    return AltUp(
        router=tensors.linear(f"{prefix}altup_router"),
        router_norm=_norm(tensors, f"{prefix}altup_router_norm"),
        predict=tensors.linear(f"{prefix}altup_predict_coef"),
        correct=tensors.linear(f"{prefix}altup_correct_coef"),
        scale=tensors.vector(f"{prefix}altup_correct_scale.weight"),
    )


def read_laurel(tensors: Tensors, prefix: str) -> Laurel | None:
    """A block's LAuReL weights; None if it has none."""
    if not tensors.has(f"{prefix}laurel_l.weight"):
        return None
    left, right = tensors.linear(f"{prefix}laurel_l"), tensors.linear(f"{prefix}laurel_r")
    return Laurel(left, right, _norm(tensors, f"{prefix}laurel_post_norm"))


def read_layer_embedding(tensors: Tensors, prefix: str) -> LayerEmbedding | None:
    """The weights of a block's per-layer embedding; None if it has none."""
    if not tensors.has(f"{prefix}inp_gate.weight"):
        return None
    gate, project = tensors.linear(f"{prefix}inp_gate"), tensors.linear(f"{prefix}proj")
    return LayerEmbedding(gate, project, _norm(tensors, f"{prefix}post_norm"))


def _norm(tensors: Tensors, name: str) -> Norm:
    norm = tensors.norm(name)
    assert norm is not None, "the architecture declares it"
    return norm
