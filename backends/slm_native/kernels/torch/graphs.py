"""Steps of a fixed shape: filled up to it, captured once, and replayed."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
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
"""One capture at a time: to begin one, torch waits for the device, which another must not be asked to."""


class Captured(ABC):
    """A step of one shape that can be done again with other numbers."""

    @abstractmethod
    def replay(self) -> Tensor:
        """The step's output for the current content of its inputs; valid until the next replay."""


class CapturedInCuda(Captured):
    """A CUDA graph, as https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs has it.

    Args:
        step: only launches kernels, without synchronization, and is repeatable.
        inputs: their tensors are where the graph reads from now on.
    """

    def __init__(self, step: Callable[[Inputs], Tensor], inputs: Inputs) -> None:
        self._inputs = inputs  # which keeps the memory that the graph reads
        device = tensors_of(inputs)[0].device
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):  # the first run compiles and allocates
            step(inputs)
            step(inputs)
        torch.cuda.current_stream(device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # By default torch captures on a stream that it makes once, on the device that is current then.
        capture = torch.cuda.graph(self._graph, stream=aside, capture_error_mode="thread_local")
        with _capturing, torch.cuda.device(device), capture:
            self._result = step(inputs)

    def replay(self) -> Tensor:
        """Launch the graph on the current stream."""
        self._graph.replay()
        return self._result


class StepGraphs:
    """The captured steps of one context, by shape; the one used longest ago makes room.

    Args:
        capture: captures a step.
        most: how many are kept.
        uploader: copies a step's inputs to the graph's inputs.
    """

    def __init__(
        self, capture: Callable[[Callable[[Any], Tensor], Any], Captured], most: int, uploader: StepUploader
    ) -> None:
        self._capture = capture
        self._most = most
        self._uploader = uploader
        self._held: OrderedDict[Shape, tuple[Captured, Staged[Any]]] = OrderedDict()

    def run(self, step: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
        """What ``step`` makes of ``inputs``.

        Args:
            step: depends on nothing but the shapes and numbers of ``tensors_of(inputs)``.
            inputs: with tensors of the host.
        """
        tensors = tensors_of(inputs)
        shape = tuple(tuple(tensor.shape) for tensor in tensors)
        if shape in self._held:
            captured, staged = self._held[shape]
            self._uploader.refill(staged, tensors)
        else:
            while len(self._held) >= self._most:
                self._held.popitem(last=False)
            staged = self._uploader.upload(inputs)
            captured = self._capture(step, staged.tree)
            self._held[shape] = captured, staged
        self._held.move_to_end(shape)
        return captured.replay()

    @property
    def shapes(self) -> list[Shape]:
        """What is kept, the longest unused first."""
        return list(self._held)


def filled(plan: BatchPlan, n_rows: int, spare: int) -> TorchPlan:
    """A plan of sequences that bring one token each, and rows that nobody asked for.

    Tables are as wide as a power of two of pages, so that few shapes serve all lengths.

    Args:
        plan: as the cache made it.
        n_rows: tokens that there shall be.
        spare: a page that no sequence holds; padding rows write to it.
    """
    n_tokens, whole = len(plan.pages), slice(spare, spare + 1)
    added = np.arange(n_rows - n_tokens)
    runs = [Run(-1, slice(n_tokens + i, n_tokens + i + 1), 0, 1, whole) for i in added.tolist()]
    pages = np.concatenate([plan.pages, np.full(len(added), spare, np.intp)])
    slots = np.concatenate([plan.slots, added % PAGE_TOKENS])
    placed = place(BatchPlan([*plan.runs, *runs], pages, slots, plan.tables), in_powers=True)
    return dataclasses.replace(placed, runs=())  # a step of a fixed shape does not read runs


def filled_prefill(plan: BatchPlan) -> TorchPlan:
    """A plan of one sequence that brings several tokens; its table is as wide as a power of two of pages."""
    (run,) = plan.runs
    held = np.arange(run.pages.start, run.pages.stop) if isinstance(run.pages, slice) else run.pages
    pages = np.zeros(1 << (len(held) - 1).bit_length(), np.int64)
    pages[: len(held)] = held
    n_tokens = len(plan.pages)
    rows, positions = (torch.arange(start, start + n_tokens) for start in (0, run.start))
    whole = Prefill(rows, torch.from_numpy(pages), len(pages) * PAGE_TOKENS, positions)
    placed = place(plan)
    return TorchPlan((), placed.pages, placed.slots, plan.tables, None, [whole])


def chunks_alone(n_tokens: int, n_pages: int, spare: int) -> Iterator[BatchPlan]:
    """Plans of ``n_tokens`` of no sequence, one for each table that a prompt of ``n_pages`` pages comes by."""
    width = 1 << (-(-n_tokens // PAGE_TOKENS) - 1).bit_length()
    ids = np.arange(n_tokens)
    while width < 2 * n_pages:
        start = width * PAGE_TOKENS - n_tokens
        run = Run(-1, slice(0, n_tokens), start, start + n_tokens, np.full(width, spare, np.intp))
        yield BatchPlan([run], np.full(n_tokens, spare), ids % PAGE_TOKENS, PageTables(0, ()))
        width *= 2


def filled_alone(n_rows: int, n_pages: int, spare: int) -> TorchPlan:
    """``filled`` for a batch of nothing, in tables for sequences of ``n_pages`` pages."""
    deep = Run(-1, slice(0, 1), 0, 1, np.full(n_pages, spare, np.intp))
    plan = BatchPlan([deep], np.array([spare]), np.zeros(1, np.intp), PageTables(0, ()))
    return filled(plan, n_rows, spare)
