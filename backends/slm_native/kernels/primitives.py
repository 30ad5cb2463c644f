"""What a tier has to bring: the steps that are no compositions of others, and how it holds things."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, RopeStyle
from slm_core.quant import QuantizedTensor
from slm_core.types import KvType, TopLogits
from slm_native.kernels.parameters import (
    PLAIN,
    Scoring,
    Span,
    Weight,
    WeightBytes,
)
from slm_native.kv import Array, BatchPlan, HostPageStore, KvLayer, PageLayout, PageStore

FloatArray: TypeAlias = NDArray[np.float32]
T = TypeVar("T")


class FixedShape(NamedTuple):
    """A batch that was filled up to a shape of a few.

    Attributes:
        plan: what ``place`` gives, for so many tokens; those behind the batch's own are anybody's.
        n_tokens: those of the batch and those behind them.
        run: does a step that depends on shapes and numbers of its argument alone, which has not ``arrived``; what it
            gives lasts until the next.
        wanted: which tokens' rows are computed [n_tokens]; None for all.
    """

    plan: BatchPlan
    n_tokens: int
    run: Callable[[Callable[[Any], Array], Any], Array]
    wanted: NDArray[np.bool_] | None = None


class Primitives(ABC):
    """What every tier computes in its own way, and where; ``KernelSet`` builds on it."""

    name: str
    """The tier: "reference", "cpu", "torch"."""
    device: str
    """Where it computes: "cpu", "cuda:0"."""

    picks_top: bool = False
    """Whether ``top_logits`` is computed where logits are."""
    chunk: int | None = None
    """Tokens that are computed at a time where a sequence brings several; None for all of a batch."""
    splits: bool = False
    """Whether layers are on several devices."""
    captures: bool = False
    """Whether steps of fixed shapes are captured: then they wait for nothing, and no weight moves."""
    failures: tuple[type[Exception], ...] = ()
    """What steps raise where the device fails them, as for want of memory."""
    reads_file: bool
    """Whether steps read weights from the mapped file; else ``prepare`` has read them."""
    kv_type: KvType = KvType.F32
    """What keys and values are stored in where no type is asked for."""
    kv_types: tuple[KvType, ...] = tuple(KvType)
    """What they can be stored in."""

    @abstractmethod
    def describe(self) -> str:
        """What was chosen, in one line for ``slm info``."""

    @abstractmethod
    def from_host(self, values: NDArray[Any]) -> Array:
        """NumPy's numbers, float32 or integers, where this tier computes."""

    @abstractmethod
    def to_host(self, x: Array) -> FloatArray:
        """What a step made, in NumPy's memory."""

    @abstractmethod
    def rows(self, x: Array, which: slice | NDArray[Any]) -> Array:
        """Some rows of ``x``: a slice, ids in NumPy, or a NumPy mask [T]."""

    def beside(self, x: Array, values: NDArray[Any]) -> Array:
        """NumPy's numbers where ``x`` is."""
        return self.from_host(values)

    def entering(self, x: Array, layer: int) -> Array:
        """``x`` where that layer computes; the one behind the last stands for the output matrix."""
        return x

    def spread(self, items: Sequence[T]) -> Sequence[T]:
        """What each layer is given [L], where it computes."""
        return items

    def place(self, plan: BatchPlan) -> BatchPlan:
        """Where the tokens of a batch go, in indices that this tier's KV layers take, once they have ``arrived``."""
        return plan

    def stage(self, values: NDArray[Any]) -> Array:
        """NumPy's numbers, which a step is told; they are where this tier computes once they have ``arrived``."""
        return self.from_host(values)

    def arrived(self, told: T) -> T:
        """All that ``place`` and ``stage`` gave for a step, in dataclasses and containers, where this tier computes."""
        return told

    def top_logits(self, logits: Array, k: int) -> TopLogits:
        """The ``k`` largest of each row, 1 <= k <= V, and the total: what the host makes of whole rows, by definition.

        Args:
            logits: [rows, V], at least one row; those that are no number count as the largest.
            k: how many.
        """
        return top_of_rows(self.to_host(logits), k)

    def fixed(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape | None:
        """A batch of which each sequence brings one token, filled up; None where it is computed as it is.

        Args:
            plan: as the cache made it.
            layers: the KV cache of each layer.
        """
        return None

    def fixed_prefill(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape | None:
        """A part of a prompt of which no rows are wanted, as ``fixed``; None where it is computed as it is."""
        return None

    def warm_shapes(self, layers: Sequence[KvLayer]) -> Iterator[FixedShape]:
        """Shapes to run once when a context is made, filled with nothing but what is behind a batch's tokens."""
        return iter(())

    def new_pages(self, layout: PageLayout, n_pages: int) -> PageStore:
        """Room for a context's keys and values.

        Raises:
            InvalidOption: more than there is memory for.
        """
        return HostPageStore(layout, n_pages)

    @abstractmethod
    def reserve(self, sizes: WeightBytes) -> None:
        """Called with the bytes of all weights before the first of them is prepared.

        Raises:
            UnsupportedModel: the device has no room for them; the message has the sizes.
        """

    @abstractmethod
    def ready(self) -> None:
        """Called when the last weight is prepared; never, where weights come and go."""

    @abstractmethod
    def settle(self) -> None:
        """Return once all that was asked for is done: weights have arrived, and none is in use any more."""

    @abstractmethod
    def prepare(self, tensor: QuantizedTensor) -> Weight:
        """Make a matrix ready for ``embed`` and ``matmul``; where the host computes, nothing is copied or read.

        Args:
            tensor: shape (out, in).

        Raises:
            UnsupportedModel: no kernel for its type.
            InvalidModelFile: not a matrix, rows that are no whole number of blocks, or data of the wrong size.
        """

    @abstractmethod
    def vector(self, tensor: QuantizedTensor) -> Array:
        """A norm weight, bias or table of factors as float32, in the tensor's shape.

        Raises:
            UnsupportedModel: no kernel for its type.
            InvalidModelFile: data of the wrong size.
        """

    @abstractmethod
    def embed(self, weight: Weight, token_ids: NDArray[np.int32] | Array) -> Array:
        """Rows ``token_ids`` [T], in NumPy or where ``from_host`` has put them, of an embedding matrix: [T, in].

        Raises:
            IndexError: an id in NumPy outside 0 .. n_out - 1.
        """

    @abstractmethod
    def matmul(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """``x @ weight.T + bias``: [T, in] to [T, out]; ``bias`` is [out]."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, which ``weight`` [width] matches."""

    @abstractmethod
    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last axis.

        Args:
            x: [T, width] or [T, heads, D].
            weight: [width], or [heads, D].
            bias: of the same shape.
            eps: see above.
        """

    @abstractmethod
    def rope(self, x: Array, cos: Array, sin: Array, style: RopeStyle) -> Array:
        """Rotate the first R of each head's D values; those beyond R pass through.

        Args:
            x: [T, H, D].
            cos: [T, R/2] cosines of each token's angles.
            sin: [T, R/2] sines of the same.
            style: which values make a pair.
        """

    @abstractmethod
    def silu_mul(self, gate: Array, up: Array) -> Array:
        """``gate * sigmoid(gate) * up``, element by element: the activation of a gated feed-forward layer."""

    @abstractmethod
    def activate(self, x: Array, activation: AnyActivation) -> Array:
        """The activation of a feed-forward layer without a gate, element by element."""

    @abstractmethod
    def gated(self, gate: Array, up: Array, activation: AnyActivation) -> Array:
        """``activation(gate) * up``, element by element: ``silu_mul`` for any activation."""

    @abstractmethod
    def sigmoid(self, x: Array) -> Array:
        """``1 / (1 + exp(-x))``."""

    @abstractmethod
    def softcap(self, x: Array, cap: float) -> Array:
        """``cap * tanh(x / cap)``."""

    @abstractmethod
    def above_threshold(self, x: Array, n_deviations: float) -> Array:
        """By how much numbers of a row are above its mean and so many of its standard deviations; 0 where they are not.

        The deviation is the root of the mean square: ``max(0, x - mean(x) - n_deviations * std(x))``, for x [T, width].
        """

    @abstractmethod
    def as_large(self, x: Array, like: Array) -> Array:
        """``x`` times what gives its rows the root mean square of those of ``like``; both [T, width].

        The mean square of ``x`` is taken to be 1e-5 at least, as in gemma3n.
        """

    @abstractmethod
    def clip(self, x: Array, limit: float) -> Array:
        """``x``, but no further from 0 than ``limit``."""

    @abstractmethod
    def concatenated(self, parts: Sequence[Array], axis: int = 0) -> Array:
        """Arrays one after another along an axis; the other axes are equal."""

    @abstractmethod
    def attention(
        self, q: Array, k: Array, v: Array, scale: float, scoring: Scoring = PLAIN, span: Span | None = None
    ) -> Array:
        """Causal attention of the last T of the S positions of one sequence, heads grouped (GQA).

        Args:
            q: [T, H, D]; query t stands at position S - T + t and sees positions up to its own, unless in a span.
            k: [S, K, D], H a multiple of K; query head h reads key head h // (H / K).
            v: [S, K, D].
            scale: factor on ``q · k``.
            scoring: what else is done with scores.
            span: of the queries, if they are part of one.

        Returns:
            [T, H, D].
        """

    @abstractmethod
    def selective_scan(self, x: Array, steps: Array, a: Array, b: Array, c: Array, state: Array) -> tuple[Array, Array]:
        """A selective state space (Gu and Dao 2023, https://arxiv.org/abs/2312.00752, algorithm 2), token by token.

        ``state = exp(step * a) * state + step * x * b; y = sum(state * c)``, with ``step = log(1 + exp(steps))``.
        H heads of P channels share a step, and H / G of them b and c; Mamba has heads of one channel.

        Args:
            x: [B, T, H, P] of B sequences with T tokens each.
            steps: [B, T, H].
            a: [H, N], or [H, 1] where all N numbers of a channel decay alike.
            b: [B, T, G, N], H a multiple of G.
            c: [B, T, G, N].
            state: before the first token, [B, H, P, N].

        Returns:
            y [B, T, H, P], and the state after the last token.
        """

    @abstractmethod
    def delta_scan(
        self, r: Array, log_decay: Array, k: Array, v: Array, a: Array, b: Array, state: Array
    ) -> tuple[Array, Array]:
        """The generalized delta rule (RWKV-7, https://arxiv.org/abs/2503.14456, equation 17), token by token.

        ``state = state * exp(log_decay) + (state a) bᵀ + v kᵀ; y = state r`` for each head.

        Args:
            r: [B, T, H, P], as are all but the last.
            log_decay: of the columns of the state, at most 0.
            k: keys.
            v: values.
            a: what is taken out of the state, with its sign.
            b: where that goes.
            state: before the first token, [B, H, P, P], a row for each number of a value.

        Returns:
            y [B, T, H, P], and the state after the last token.
        """

    @abstractmethod
    def inner(self, x: Array, y: Array) -> Array:
        """The sum of ``x * y`` over the last axis, which stays, with one number."""

    @abstractmethod
    def attention_both_ways(self, q: Array, k: Array, v: Array, scale: float, scoring: Scoring = PLAIN) -> Array:
        """Attention of all positions of one sequence to all of them, heads grouped (GQA).

        Args:
            q: [T, H, D].
            k: [T, K, D].
            v: [T, K, D].
            scale: factor on ``q · k``.
            scoring: what else is done with scores; of a window, half lies to each side of a query.

        Returns:
            [T, H, D].
        """


def top_of_rows(rows: FloatArray, k: int) -> TopLogits:
    """The ``k`` largest logits of each row [rows, V], and the total, in NumPy."""
    ranks = np.argsort(-rows, axis=1, kind="stable")[:, :k]  # what is no number comes last
    broken = np.isnan(rows).any(axis=1)
    ranks[broken, 0] = np.isnan(rows[broken]).argmax(axis=1)
    best = rows.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        totals = best[:, 0] + np.log(np.exp(rows - best).sum(axis=1))
    return TopLogits(ranks.astype(np.int32), np.take_along_axis(rows, ranks, 1), totals)
