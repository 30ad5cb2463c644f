"""The parameters of operations besides activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slm_core.architectures import AnyActivation, ExpertsSpec, NormKind, RopeStyle
from slm_core.quant import QuantizedTensor
from slm_native.kv import Array


class WeightBytes(NamedTuple):
    """What the weights of a model take, packed.

    Attributes:
        embedding: those before the first block.
        blocks: those of each block [L].
        output: those after the last.
        tied: whether the embedding is the output matrix, too.
        absent: what of the blocks is not there at any time, where they are streamed.
    """

    embedding: int
    blocks: Sequence[int]
    output: int
    tied: bool = False
    absent: int = 0

    @property
    def total(self) -> int:
        """What is there at a time."""
        return self.embedding + sum(self.blocks) + self.output - self.absent


@dataclass(slots=True, eq=False)
class Weight:
    """A matrix that a kernel set has prepared; only that kernel set may use it, and tiers add fields of their own.

    Dropping the last reference to it frees whatever the tier holds for it, and its view on the mapped file.

    Attributes:
        tensor: the matrix as it lies in the file, (out, in).
    """

    tensor: QuantizedTensor

    @property
    def n_out(self) -> int:
        """Rows: the width of what the product gives."""
        return self.tensor.shape[0]

    @property
    def n_in(self) -> int:
        """Columns: the width of what the product takes."""
        return self.tensor.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix and what its product is scaled by and shifted by."""

    weight: Weight  # (out, in)
    scale: Array | None = None  # [1]
    bias: Array | None = None  # [out]


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

    spec: ExpertsSpec  # how they are chosen
    router: Linear  # (X, E)
    selection_bias: Array | None  # [X], on scores, for the choice alone
    experts: Sequence[FeedForward]  # [X]
    activation: AnyActivation
    shared: FeedForward | None = None  # used by every token
    shared_gate: Linear | None = None  # (1, E)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The angles by which the heads of a batch are rotated to their positions."""

    cos: Array  # [T, R/2]
    sin: Array  # [T, R/2]
    style: RopeStyle


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Operations of attention on scores besides softmax; none by default.

    Attributes:
        window: a query sees this many positions, its own included.
        softcap: c, for ``c tanh(score / c)``.
        slopes: ALiBi's, [H]: a key at distance d gets d times the head's slope taken off its score.
        sinks: scores [H] that take part in the softmax and have no value, so that a head may attend to nothing.
    """

    window: int | None = None
    softcap: float | None = None
    slopes: Array | None = None
    sinks: Array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing."""
        return self.window is None and self.softcap is None and self.slopes is None and self.sinks is None


PLAIN = Scoring()


class BlockRange(NamedTuple):
    """Where a bidirectional block and a run of its queries lie. The block ends at the last position held.

    The queries attend to the whole block, in addition to what they attend to without the block.

    Attributes:
        first: first position of the block.
        position: position of the first query.
    """

    first: int
    position: int

    @classmethod
    def whole(cls, n_tokens: int, n_held: int) -> BlockRange:
        """All queries of a block, which is the last ``n_tokens`` of the positions held."""
        return cls(n_held - n_tokens, n_held - n_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The weights of an attention layer."""

    q: Linear  # (H*D, E)
    k: Linear | None  # (K*D, E), None if another layer's keys are read
    v: Linear | None  # (K*D, E), None there, and where what makes keys makes values
    q_norm: Norm | None  # [D], [H, D] or [H*D]
    k_norm: Norm | None  # [D], [K, D] or [K*D]
    v_norm: Norm | None  # [D]
    output: Linear  # (E, H*D)
    sinks: Array | None  # [H]


class PerHead(ABC):
    """A matrix for each head, prepared. Nothing that a run changes, so threads may share it.

    Args:
        n_heads: H.
    """

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads

    @abstractmethod
    def run(self, x: Array) -> Array:
        """Each head's rows of [T, H, in] through its own matrix: [T, H, out]."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """The weights of attention to a latent, which all heads have in common.

    R rotated values of a query, N that are not, C width of the latent, U of a head's result, Q of compressed queries.
    """

    q_down: Linear | None  # (Q, E), if queries are compressed, too
    q_norm: Norm | None  # [Q]
    q: Linear  # (H*(N+R), E) or (H*(N+R), Q)
    kv_down: Linear  # (C+R, E)
    kv_norm: Norm | None  # [C]
    k_up: PerHead  # [H] of (C, N)
    v_up: PerHead  # [H] of (U, C)
    output: Linear  # (E, H*U)
    sinks: None = None
