"""Memory of a tier: weights, inputs, pages of the KV cache; and the fixed shapes of batches that it prefers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidOption
from slm_core.quant import QuantizedTensor
from slm_core.types import KvType, TopLogits
from slm_native.kernels.parameters import Weight, WeightBytes
from slm_native.kv import Array, BatchPlan, HostPageStore, KvLayer, PageLayout, PageStore

FloatArray: TypeAlias = NDArray[np.float32]
T = TypeVar("T")


class FixedShape(NamedTuple):
    """A batch padded to one of a few fixed shapes.

    Attributes:
        plan: the result of ``place`` for the padded batch. Padding entries may point anywhere.
        n_tokens: number of tokens of the padded batch.
        run: runs a step that depends only on the shapes and numbers of its argument. The argument has not ``arrived``;
            the result is valid until the next call.
        output_mask: the tokens whose rows are computed, bool [n_tokens]; None for all.
    """

    plan: BatchPlan
    n_tokens: int
    run: Callable[[Callable[[Any], Array], Any], Array]
    output_mask: NDArray[np.bool_] | None = None


class Device(ABC):
    """Holds the arrays of operations, and copies them between the host and the device.

    An ``Array`` is a float32 array in the tier's own memory: NumPy's, or a tensor on a device. It comes from an
    operation or ``from_host``, and ``to_host`` reads it back.
    """

    name: str
    """The tier: "reference", "cpu", "torch"."""
    device: str
    """The name of the device: "cpu", "cuda:0"."""

    picks_top: bool = False
    """Whether ``top_logits`` is computed on the device."""
    chunk: int | None = None
    """The number of tokens that are computed at a time if a sequence has several; None for the whole batch."""
    splits: bool = False
    """Whether layers are on several devices."""
    captures: bool = False
    """Whether steps of fixed shapes are captured. A captured step does not synchronize, and weights do not move."""
    failures: tuple[type[Exception], ...] = ()
    """The exceptions of steps if the device fails, for example out of memory."""
    reads_file: bool
    """Whether steps read weights from the mapped file; otherwise ``prepare`` has copied them."""
    kv_type: KvType = KvType.F32
    """The default KV type."""
    kv_types: tuple[KvType, ...] = tuple(KvType)
    """The supported KV types."""

    @abstractmethod
    def describe(self) -> str:
        """The device and its settings, in one line for ``slm info``."""

    @abstractmethod
    def from_host(self, values: NDArray[Any]) -> Array:
        """A NumPy array, float32 or integers, on this tier's device."""

    @abstractmethod
    def to_host(self, x: Array) -> FloatArray:
        """An array as a NumPy array, once it is computed."""

    def on_device_of(self, x: Array, values: NDArray[Any]) -> Array:
        """A NumPy array, copied to the device of ``x``."""
        return self.from_host(values)

    def entering(self, x: Array, layer: int) -> Array:
        """``x`` on the device of a layer; the number of layers means the output matrix."""
        return x

    def spread(self, items: Sequence[T]) -> Sequence[T]:
        """The inputs of each layer [L], on the device of the layer."""
        return items

    def place(self, plan: BatchPlan) -> BatchPlan:
        """``plan`` with indices that this tier's KV layers accept, once they have ``arrived``."""
        return plan

    def stage(self, values: NDArray[Any]) -> Array:
        """A NumPy array as an input of a step. It is on the device once it has ``arrived``."""
        return self.from_host(values)

    def arrived(self, staged: T) -> T:
        """Dataclasses and containers of a step's ``place`` and ``stage`` results, copied to the device."""
        return staged

    def new_pages(self, layout: PageLayout, n_pages: int) -> PageStore:
        """Allocate the pages of a context.

        Raises:
            InvalidOption: the device has too little memory.
        """
        return HostPageStore(layout, n_pages)

    def top_logits(self, logits: Array, k: int) -> TopLogits:
        """The ``k`` largest logits of each row, 1 <= k <= V, and its log-sum-exp; equal to the host's result.

        Args:
            logits: [rows, V], at least one row; NaN counts as the largest.
            k: number of logits per row.
        """
        return top_of_rows(self.to_host(logits), k)

    def forgo_capture(self, reason: str) -> None:
        """Run the steps of a model uncaptured; called before its weights are prepared, and only if ``captures``.

        Args:
            reason: the property of the model or of its options that prevents capture.

        Raises:
            InvalidOption: the options ask for capture.
        """
        raise InvalidOption(f"capture is not supported if {reason} (accepted: false)")

    def fixed(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape | None:
        """Pad a batch with one token per sequence to a fixed shape; None to run the batch unpadded.

        Args:
            plan: the plan of the cache.
            layers: the KV cache of each layer.
        """
        return None

    def fixed_prefill(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape | None:
        """Like ``fixed``, for a part of a prompt with an empty output mask; None to run it unpadded."""
        return None

    def warm_shapes(self, layers: Sequence[KvLayer]) -> Iterator[FixedShape]:
        """The shapes to run once for a new context, with padding only."""
        return iter(())

    @abstractmethod
    def reserve(self, sizes: WeightBytes) -> None:
        """Called with the bytes of all weights before the first of them is prepared.

        Raises:
            UnsupportedModel: the device has too little memory; the message has the sizes.
        """

    @abstractmethod
    def ready(self) -> None:
        """Called when the last weight is prepared; never if weights are offloaded."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all queued work is done: weights are copied, and no weight is in use."""

    @abstractmethod
    def prepare(self, tensor: QuantizedTensor) -> Weight:
        """Prepare a matrix for ``embed`` and ``matmul``. On the host, nothing is copied or read.

        Args:
            tensor: a matrix (out, in).

        Raises:
            UnsupportedModel: no kernel for its type.
            InvalidModelFile: not a matrix, rows that are not whole blocks, or data of the wrong size.
        """

    @abstractmethod
    def vector(self, tensor: QuantizedTensor) -> Array:
        """A norm weight, bias or table of factors as float32, in the tensor's shape.

        Raises:
            UnsupportedModel: no kernel for its type.
            InvalidModelFile: data of the wrong size.
        """


def top_of_rows(rows: FloatArray, k: int) -> TopLogits:
    """The ``k`` largest logits of each row [rows, V], and the log-sum-exp, in NumPy."""
    ranks = np.argsort(-rows, axis=1, kind="stable")[:, :k]  # NaN sorts last
    broken = np.isnan(rows).any(axis=1)
    ranks[broken, 0] = np.isnan(rows[broken]).argmax(axis=1)
    best = rows.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        totals = best[:, 0] + np.log(np.exp(rows - best).sum(axis=1))
    return TopLogits(ranks.astype(np.int32), np.take_along_axis(rows, ranks, 1), totals)
