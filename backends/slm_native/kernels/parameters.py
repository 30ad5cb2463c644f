"""The parameters of operations, apart from activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, ExpertsSpec, NormKind, RopeStyle
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor
from slm_native.kv import Array


class WeightBytes(NamedTuple):
    """Bytes of a model's packed weights.

    Attributes:
        embedding: weights before the first block.
        blocks: weights of each block [L].
        output: weights after the last block.
        tied: whether the embedding is also the output matrix.
        absent: weights of blocks that are not in memory, if layers are offloaded.
    """

    embedding: int
    blocks: Sequence[int]
    output: int
    tied: bool = False
    absent: int = 0

    @property
    def total(self) -> int:
        """Bytes in memory at a time."""
        return self.embedding + sum(self.blocks) + self.output - self.absent


@dataclass(slots=True, eq=False)
class Weight:
    """A matrix that a kernel set has prepared. Only that kernel set may use it; tiers add fields.

    Dropping the last reference frees the tier's memory for it, and its view on the mapped file.

    Attributes:
        tensor: the matrix (out, in) as stored in the file.
    """

    tensor: QuantizedTensor

    @property
    def n_out(self) -> int:
        """Number of rows: the output width."""
        return self.tensor.shape[0]

    @property
    def n_in(self) -> int:
        """Number of columns: the input width."""
        return self.tensor.shape[1]


def float_tensor(name: str, values: NDArray[np.float32] | NDArray[np.float16]) -> QuantizedTensor:
    """An array as a tensor of a file, in its own precision."""
    kind = GgmlType.F16 if values.dtype == np.float16 else GgmlType.F32
    return QuantizedTensor(name, values.shape, kind, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """A low-rank change ``b @ a`` of a matrix (LoRA)."""

    a: Weight  # (r, in)
    b: Weight  # (out, r)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix, with a scale and a bias for its product, and the low-rank change of an adapter."""

    weight: Weight  # (out, in)
    scale: Array | None = None  # [1]
    bias: Array | None = None  # [out]
    lora: Lora | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm: its kind, weight and bias."""

    weight: Array  # [width], or [heads, D]
    bias: Array | None  # [width]
    kind: NormKind
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """The weights of a feed-forward layer, or of one expert."""

    gate: Linear | None  # (F, E)
    up: Linear  # (F, E)
    down: Linear  # (E, F)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """An MoE layer."""

    spec: ExpertsSpec  # the selection rule
    router: Linear  # (X, E)
    selection_bias: Array | None  # [X], added to scores for selection only
    experts: Sequence[FeedForward]  # [X]
    activation: AnyActivation
    shared: FeedForward | None = None  # used by every token
    shared_gate: Linear | None = None  # (1, E)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """RoPE's cosines and sines for the tokens of a batch."""

    cos: Array  # [T, R/2]
    sin: Array  # [T, R/2]
    style: RopeStyle


class LayerPositions(NamedTuple):
    """RoPE and attention temperature of a layer, for the positions of a batch.

    Attributes:
        rotation: RoPE of queries and keys; None without RoPE.
        temperature: factor on queries [T, 1, 1]; None for none.
    """

    rotation: Rotation | None
    temperature: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Changes of attention scores before the softmax; none by default.

    Attributes:
        window: the number of positions that a query attends to, its own included.
        softcap: c in ``c * tanh(score / c)``.
        slopes: ALiBi's slopes [H]; ``slope * distance`` is subtracted from a score.
        sinks: an extra score for each head [H], without a value, so that a head may attend to nothing.
        bias: the attention bias of the first n keys [n], n <= S; a query's score on its own key stays as it is.
    """

    window: int | None = None
    softcap: float | None = None
    slopes: Array | None = None
    sinks: Array | None = None
    bias: Array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are not changed."""
        changes = self.window, self.softcap, self.slopes, self.sinks, self.bias
        return all(change is None for change in changes)


PLAIN = Scoring()


class BlockRange(NamedTuple):
    """The position of a bidirectional block and of a run of its queries. The block ends at the last position held.

    The queries attend to the whole block, and to all positions that they attend to without the block.

    Attributes:
        first: first position of the block.
        position: position of the first query.
    """

    first: int
    position: int

    @classmethod
    def whole(cls, n_tokens: int, n_held: int) -> BlockRange:
        """All queries of a block that consists of the last ``n_tokens`` positions held."""
        return cls(n_held - n_tokens, n_held - n_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The weights of an attention layer."""

    q: Linear  # (H*D, E)
    k: Linear | None  # (K*D, E); None if the layer reads another layer's keys
    v: Linear | None  # (K*D, E); None if it reads another layer's values, or if keys are the values
    q_norm: Norm | None  # [D], [H, D] or [H*D]
    k_norm: Norm | None  # [D], [K, D] or [K*D]
    v_norm: Norm | None  # [D]
    output: Linear  # (E, H*D)
    sinks: Array | None  # [H]


class PerHead(ABC):
    """A prepared matrix for each head. Immutable, so threads may share it.

    Args:
        n_heads: H.
    """

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads

    @abstractmethod
    def run(self, x: Array) -> Array:
        """Multiply each head of [T, H, in] by its own matrix: [T, H, out]."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """The weights of multi-head latent attention.

    Widths: R rotated part of a query, N the rest, C latent, U a head's output, Q compressed queries.
    """

    q_down: Linear | None  # (Q, E), if queries are compressed
    q_norm: Norm | None  # [Q]
    q: Linear  # (H*(N+R), E) or (H*(N+R), Q)
    kv_down: Linear  # (C+R, E)
    kv_norm: Norm | None  # [C]
    k_up: PerHead  # [H] of (C, N)
    v_up: PerHead  # [H] of (U, C)
    output: Linear  # (E, H*U)
    sinks: None = None
