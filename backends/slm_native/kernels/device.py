"""Where a tier keeps weights, inputs and the pages of the KV cache, and which shapes of batches it prefers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.quant import QuantizedTensor
from slm_core.types import KvType, TopLogits
from slm_native.kernels.parameters import Weight, WeightBytes
from slm_native.kv import Array, BatchPlan, HostPageStore, KvLayer, PageLayout, PageStore

FloatArray: TypeAlias = NDArray[np.float32]
T = TypeVar("T")


class FixedShape(NamedTuple):
    """A batch padded to one of a few fixed shapes.

    Attributes:
        plan: the plan that ``place`` made of the padded batch. Padding entries may point anywhere.
        n_tokens: tokens of the padded batch.
        run: runs a step that depends only on the shapes and numbers of its argument. The argument has not ``arrived``;
            the result is valid until the next call.
        output_mask: the tokens whose rows are computed, bool [n_tokens]; None for all.
    """

    plan: BatchPlan
    n_tokens: int
    run: Callable[[Callable[[Any], Array], Any], Array]
    output_mask: NDArray[np.bool_] | None = None


class Device(ABC):
    """Holds what operations compute with, and moves it between the host and where they compute.

    An ``Array`` is a float32 array in the tier's own memory: NumPy's, or a tensor on a device. It comes from an
    operation or ``from_host``, and ``to_host`` reads it back.
    """

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

    def on_device_of(self, x: Array, values: NDArray[Any]) -> Array:
        """NumPy numbers on the device of ``x``."""
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

    def arrived(self, staged: T) -> T:
        """All that ``place`` and ``stage`` gave for a step, in dataclasses and containers, where this tier computes."""
        return staged

    def new_pages(self, layout: PageLayout, n_pages: int) -> PageStore:
        """Room for a context's keys and values.

        Raises:
            InvalidOption: more than there is memory for.
        """
        return HostPageStore(layout, n_pages)

    def top_logits(self, logits: Array, k: int) -> TopLogits:
        """The ``k`` largest of each row, 1 <= k <= V, and the total: what the host makes of whole rows, by definition.

        Args:
            logits: [rows, V], at least one row; those that are no number count as the largest.
            k: how many.
        """
        return top_of_rows(self.to_host(logits), k)

    def fixed(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape | None:
        """Pad a batch with one token per sequence to a fixed shape; None to run the batch unpadded.

        Args:
            plan: the plan that the cache made.
            layers: the KV cache of each layer.
        """
        return None

    def fixed_prefill(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape | None:
        """As ``fixed``, for a part of a prompt whose output mask is empty; None to run it unpadded."""
        return None

    def warm_shapes(self, layers: Sequence[KvLayer]) -> Iterator[FixedShape]:
        """Shapes to run once when a context is made, all tokens of them padding."""
        return iter(())

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


def top_of_rows(rows: FloatArray, k: int) -> TopLogits:
    """The ``k`` largest logits of each row [rows, V], and the total, in NumPy."""
    ranks = np.argsort(-rows, axis=1, kind="stable")[:, :k]  # what is no number comes last
    broken = np.isnan(rows).any(axis=1)
    ranks[broken, 0] = np.isnan(rows[broken]).argmax(axis=1)
    best = rows.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        totals = best[:, 0] + np.log(np.exp(rows - best).sum(axis=1))
    return TopLogits(ranks.astype(np.int32), np.take_along_axis(rows, ranks, 1), totals)
