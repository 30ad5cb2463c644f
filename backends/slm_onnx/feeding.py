"""Runs the decoder graph, in the shape of each batch or padded to a few shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.types import Logits
from slm_onnx import runtime
from slm_onnx.kvstore import KvStore
from slm_onnx.providers import Device

Inputs = Mapping[str, NDArray[Any]]

_LEAST_CELLS = 256
_ON_HOST = frozenset({"total_sequence_length", "n_cells"})  # attention reads them on the host, with every provider


class Sizes(NamedTuple):
    """The shape of a run: tokens, cells that attention reads, rows of logits."""

    tokens: int
    cells: int
    rows: int


class Feed(Protocol):
    """Runs the decoder of one context."""

    def sizes(self, n: int, n_used: int, n_rows: int) -> Sizes:
        """The shape for ``n`` tokens after ``n_used`` cells with ``n_rows`` rows of logits, padded or not."""
        ...

    def run(self, inputs: Inputs, output: str = "logits") -> Logits:
        """Logits [rows, V], or the output "states" [rows, E]; valid until the next run.

        Raises:
            DecodeFailed: the runtime reported a failure.
        """
        ...

    def bind(self, inputs: Inputs) -> None:
        """Keep inputs for all later runs: the changes of adapters. They are in host memory."""
        ...

    def close(self) -> None:
        """Release the provider's memory for this context; a second call does nothing."""
        ...


class ExactFeed:
    """Runs each batch in its own shape.

    Args:
        session: session of the decoder graph.
        store: the cache.
    """

    def __init__(self, session: Any, store: KvStore) -> None:
        self._session = session
        self._binding = store.bind(session)
        self._outputs: list[str] = []  # the outputs that were requested so far, in the order of binding
        self._bound: Inputs = {}

    def bind(self, inputs: Inputs) -> None:
        """See ``Feed.bind``."""
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        self._bound = inputs  # the binding points into the arrays

    def sizes(self, n: int, n_used: int, n_rows: int) -> Sizes:
        """See ``Feed.sizes``."""
        return Sizes(n, n_used + n, max(1, n_rows))

    def run(self, inputs: Inputs, output: str = "logits") -> Logits:
        """See ``Feed.run``."""
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        if output not in self._outputs:
            self._outputs.append(output)
        for name in self._outputs:  # in every run: afterwards they are bound to the tensors of the run
            self._binding.bind_output(name, "cpu")
        runtime.run(self._session, self._binding)
        at = self._outputs.index(output) - len(self._outputs)  # after the caches
        rows: Logits = self._binding.get_outputs()[at].numpy()[0]
        return rows

    def close(self) -> None:
        """See ``Feed.close``; there is nothing to release."""


class SplitFeed:
    """Splits long batches into several runs; later runs attend to the cache.

    Args:
        feed: runs the parts.
        n_most: most tokens of a run.
    """

    def __init__(self, feed: ExactFeed, n_most: int) -> None:
        self._feed = feed
        self._n_most = n_most

    def bind(self, inputs: Inputs) -> None:
        """See ``Feed.bind``."""
        self._feed.bind(inputs)

    def sizes(self, n: int, n_used: int, n_rows: int) -> Sizes:
        """See ``Feed.sizes``."""
        return self._feed.sizes(n, n_used, n_rows)

    def run(self, inputs: Inputs, output: str = "logits") -> Logits:
        """See ``Feed.run``. Devices that limit the tokens of a run have no other output."""
        assert output == "logits", "hidden states are not declared"
        n, parts = inputs["rows"].shape[1], []
        if n <= self._n_most:
            return self._feed.run(inputs)
        for first in range(0, n, self._n_most):
            part = _part(inputs, first, min(n, first + self._n_most))
            n_rows = len(part["logits_rows"])
            if not n_rows:
                part["logits_rows"] = np.zeros(1, np.int64)  # the graph needs at least one row
            parts.append(self._feed.run(part)[:n_rows].copy())
        return np.concatenate(parts)

    def close(self) -> None:
        """See ``Feed.close``."""
        self._feed.close()


def _part(inputs: Inputs, first: int, end: int) -> dict[str, NDArray[Any]]:
    """The inputs of tokens [first, end) of a batch. They attend to earlier cells, and to the batch up to ``end``."""
    n, n_cells = inputs["rows"].shape[1], int(inputs["total_sequence_length"])
    total, output_rows, part = n_cells - n + end, inputs["logits_rows"], {}
    for name, array in inputs.items():
        if name.startswith(("attention_bias", "distances")):
            part[name] = array[:, :, first:end, :total]
        elif name.startswith(("cos", "sin")):
            part[name] = array[first:end]
        elif name.startswith(("inputs_embeds", "temperature")):
            part[name] = array[:, first:end]
    part["rows"] = np.arange(end - first, dtype=np.int64)[None]
    part["seqlens_k"] = np.array([total - 1], np.int32)
    part["total_sequence_length"] = np.array(total, np.int32)
    part["logits_rows"] = output_rows[(first <= output_rows) & (output_rows < end)] - first
    return part


class FixedFeed:
    """Pads runs to powers of two; each shape uses the same memory in every run.

    Providers need this if they capture runs, as with CUDA graphs, or compile for one shape.

    Args:
        session: session of the decoder graph.
        store: the cache; it has ``spare_cells`` more than the context.
        n_vocab: width of logits V.
        device: device of the memory.
        numbers: unused numbers of captured runs; a number belongs to one shape of one context.
        captures: whether the provider captures runs, and keeps them until they are released.
    """

    def __init__(
        self, session: Any, store: KvStore, n_vocab: int, device: Device, numbers: Iterator[int], *, captures: bool
    ) -> None:
        self._session = session
        self._store = store
        self._n_vocab = n_vocab
        self._device = device
        self._numbers = numbers
        self._captures = captures
        self._bound: dict[tuple[tuple[int, ...], ...], _ShapeMemory] = {}

    def bind(self, inputs: Inputs) -> None:
        """See ``Feed.bind``. With fixed shapes there are no adapters."""
        assert not inputs, "adapters are not declared"

    def sizes(self, n: int, n_used: int, n_rows: int) -> Sizes:
        """See ``Feed.sizes``."""
        tokens = bucket(n)
        cells = min(bucket(max(_LEAST_CELLS, n_used + tokens)), self._store.n_cells)
        return Sizes(tokens, cells, bucket(max(1, n_rows)))

    def run(self, inputs: Inputs, output: str = "logits") -> Logits:
        """See ``Feed.run``. With fixed shapes there is no other output."""
        assert output == "logits", "hidden states are not declared"
        shapes = tuple(array.shape for array in inputs.values())
        if shapes not in self._bound:
            self._bound[shapes] = self._bind(inputs)
        bound = self._bound[shapes]
        for name, array in inputs.items():
            bound.inputs[name].update_inplace(np.ascontiguousarray(array))
        runtime.run(self._session, bound.binding, bound.number)
        rows: Logits = bound.logits.numpy()[0]
        return rows

    def close(self) -> None:
        """See ``Feed.close``."""
        for bound in self._bound.values() if self._captures else ():
            self._session.release_captured_graph(bound.number)
        self._bound.clear()

    def _bind(self, inputs: Inputs) -> _ShapeMemory:
        binding = self._store.bind(self._session)
        device, host = self._device, runtime.module().OrtValue.ortvalue_from_numpy
        placed = {
            name: (host if name in _ON_HOST else device.place)(np.array(array, order="C"))
            for name, array in inputs.items()
        }
        for name, value in placed.items():
            binding.bind_ortvalue_input(name, value)
        logits = device.zeros((1, len(inputs["logits_rows"]), self._n_vocab), np.dtype(np.float32))
        binding.bind_ortvalue_output("logits", logits)
        return _ShapeMemory(binding, placed, logits, next(self._numbers))


class _ShapeMemory(NamedTuple):
    """The memory of one shape, and its number as a captured run of the session."""

    binding: Any
    inputs: dict[str, Any]
    logits: Any
    number: int


def bucket(n: int) -> int:
    """The smallest power of two that is at least ``n`` >= 1."""
    return 1 << (n - 1).bit_length()


def spare_cells(n_batch: int) -> int:
    """The number of extra cells for the padding of batches of up to ``n_batch`` tokens."""
    return bucket(n_batch) // 2


def padded(values: NDArray[Any], n: int) -> NDArray[Any]:
    """Values [m, ...], padded to ``n`` with the last one."""
    return values if len(values) == n else np.concatenate([values, np.repeat(values[-1:], n - len(values), axis=0)])
