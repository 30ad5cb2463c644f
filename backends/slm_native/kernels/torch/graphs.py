"""Steps of fixed shapes: padded, captured once, and replayed."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from slm_native.kernels.torch.pages import Prefill, TorchPlan, place
from slm_native.kernels.torch.staging import Staged, StepUploader, tensors_of
from slm_native.kv import PAGE_TOKENS, BatchPlan, Run
from slm_native.kv.tables import PageTables

Inputs = TypeVar("Inputs")
Shape: TypeAlias = tuple[tuple[int, ...], ...]
_capturing = threading.Lock()
"""Only one capture at a time: the device is synchronized before a capture, which a running capture forbids."""


class Captured(ABC):
    """A step of one shape that can be repeated with other numbers."""

    @abstractmethod
    def replay(self) -> Tensor:
        """The step's output for the current content of its inputs, valid until the next replay."""


Capture: TypeAlias = Callable[[Callable[[Any], Tensor], Any], Captured]
"""Captures a step for its inputs; every replay reads their tensors. A step only launches kernels, and never waits."""


class CudaCapture:
    """Captures the steps of one context in CUDA graphs, which share a stream and a pool of memory.

    Only one of the graphs is replayed at a time, and its result is read before the next one, so they may share memory.
    See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[Any], Tensor], inputs: Any) -> Captured:
        """Run the step, which compiles and allocates, then capture it.

        Unlike ``torch.cuda.graph``, this neither collects garbage nor empties torch's cache of memory, which takes most
        of a second in a large program.
        """
        device = tensors_of(inputs)[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step(inputs)
        graph = torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.device(device), torch.cuda.stream(self._stream):
            torch.cuda.synchronize(device)
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = step(inputs)
            finally:
                graph.capture_end()
        return _CudaGraph(graph, inputs, result)


class _CudaGraph(Captured):
    """A graph, with the memory that it reads and writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: object, result: Tensor) -> None:
        self._graph, self._inputs, self._result = graph, inputs, result

    def replay(self) -> Tensor:
        """Launch the graph on the current stream."""
        self._graph.replay()
        return self._result


class StepGraphs:
    """The captured steps of one context, by shape, in an LRU cache.

    Args:
        capture: captures a step.
        most: capacity of the cache.
        uploader: copies a step's inputs to the graph's inputs.
        n_uncaptured: the number of steps of a shape that run uncaptured before one is captured.
    """

    def __init__(self, capture: Capture, most: int, uploader: StepUploader, n_uncaptured: int = 0) -> None:
        self._capture = capture
        self._n_uncaptured = n_uncaptured
        self._n_runs: Counter[Shape] = Counter()
        self._most = most
        self._uploader = uploader
        self._cache: OrderedDict[Shape, tuple[Captured, Staged[Any]]] = OrderedDict()

    def run(self, step: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
        """Run ``step`` for ``inputs``. After ``n_uncaptured`` runs of a shape, the step is captured and then replayed.

        Args:
            step: depends only on the shapes and numbers of ``tensors_of(inputs)``.
            inputs: inputs with host tensors.
        """
        tensors = tensors_of(inputs)
        shape = tuple(tuple(tensor.shape) for tensor in tensors)
        if shape in self._cache:
            captured, staged = self._cache[shape]
            self._uploader.refill(staged, tensors)
        elif self._n_runs[shape] < self._n_uncaptured:
            self._n_runs[shape] += 1
            return step(self._uploader.upload(inputs).tree)
        else:
            while len(self._cache) >= self._most:
                self._cache.popitem(last=False)
            staged = self._uploader.upload(inputs)
            captured = self._capture(step, staged.tree)
            self._cache[shape] = captured, staged
        self._cache.move_to_end(shape)
        return captured.replay()

    @property
    def shapes(self) -> list[Shape]:
        """The shapes in the cache, least recently used first."""
        return list(self._cache)


def filled(plan: BatchPlan, n_rows: int, spare: int, least_table: int = 1) -> TorchPlan:
    """Pad the plan of sequences with one token each.

    Tables are padded to a power of two of pages, so that a few shapes serve all lengths.

    Args:
        plan: the plan of the cache.
        n_rows: number of tokens after padding.
        spare: a page that no sequence holds; padding rows write to it.
        least_table: smallest width of tables, a power of two.
    """
    n_tokens, spare_page = len(plan.pages), slice(spare, spare + 1)
    added = np.arange(n_rows - n_tokens)
    runs = [Run(-1, slice(n_tokens + i, n_tokens + i + 1), 0, 1, spare_page) for i in added.tolist()]
    pages = np.concatenate([plan.pages, np.full(len(added), spare, np.intp)])
    slots = np.concatenate([plan.slots, added % PAGE_TOKENS])
    padded = place(BatchPlan([*plan.runs, *runs], pages, slots, plan.tables), least_table)
    return dataclasses.replace(padded, runs=())  # steps of fixed shapes do not read runs


def filled_prefill(plan: BatchPlan) -> TorchPlan:
    """Pad the plan of one sequence with several tokens: its table becomes a power of two of pages wide."""
    (run,) = plan.runs
    table = np.arange(run.pages.start, run.pages.stop) if isinstance(run.pages, slice) else run.pages
    pages = np.zeros(1 << (len(table) - 1).bit_length(), np.int64)
    pages[: len(table)] = table
    n_tokens = len(plan.pages)
    rows, positions = (torch.arange(start, start + n_tokens) for start in (0, run.start))
    prefill = Prefill(rows, torch.from_numpy(pages), len(pages) * PAGE_TOKENS, positions)
    placed = place(plan)
    return TorchPlan((), placed.pages, placed.slots, plan.tables, None, [prefill])


def chunks_alone(n_tokens: int, n_pages: int, spare: int) -> Iterator[BatchPlan]:
    """Plans of ``n_tokens`` padding tokens, one for each width of table up to a prompt of ``n_pages`` pages."""
    width = 1 << (-(-n_tokens // PAGE_TOKENS) - 1).bit_length()
    ids = np.arange(n_tokens)
    while width < 2 * n_pages:
        start = width * PAGE_TOKENS - n_tokens
        run = Run(-1, slice(0, n_tokens), start, start + n_tokens, np.full(width, spare, np.intp))
        yield BatchPlan([run], np.full(n_tokens, spare), ids % PAGE_TOKENS, PageTables(0, ()))
        width *= 2


def filled_alone(n_rows: int, n_pages: int, spare: int, least_table: int = 1) -> TorchPlan:
    """``filled`` for an empty batch, with tables for sequences of ``n_pages`` pages."""
    run = Run(-1, slice(0, 1), 0, 1, np.full(n_pages, spare, np.intp))
    plan = BatchPlan([run], np.array([spare]), np.zeros(1, np.intp), PageTables(0, ()))
    return filled(plan, n_rows, spare, least_table)
