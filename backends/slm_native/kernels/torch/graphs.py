"""Steps of a fixed shape: filled up to it, captured once, and replayed."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from slm_native.kernels.torch.pages import TorchPlan, place
from slm_native.kv import PAGE_TOKENS, BatchPlan, Run
from slm_native.kv.tables import PageTables

Inputs = TypeVar("Inputs")
Shape: TypeAlias = tuple[tuple[int, ...], ...]


class Captured(ABC):
    """A step of one shape that can be done again with other numbers."""

    @abstractmethod
    def replay(self, inputs: object) -> Tensor:
        """What the step makes of ``inputs``; valid until the next replay."""


class CapturedInCuda(Captured):
    """A CUDA graph, as https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs has it.

    Args:
        step: launches kernels alone, waits for nothing, and does the same when it is done again.
        inputs: their tensors are where the graph reads from now on.
    """

    def __init__(self, step: Callable[[Inputs], Tensor], inputs: Inputs) -> None:
        self._inputs = tensors_of(inputs)
        device = self._inputs[0].device
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):  # compiles and allocates what only the first time needs
            step(inputs)
            step(inputs)
        torch.cuda.current_stream(device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = step(inputs)

    def replay(self, inputs: object) -> Tensor:
        """Copy the numbers to where the graph reads them."""
        for target, source in zip(self._inputs, tensors_of(inputs), strict=True):
            target.copy_(source)
        self._graph.replay()
        return self._result


class StepGraphs:
    """The captured steps of one context, by shape; the one used longest ago makes room.

    Args:
        capture: captures a step.
        most: how many are kept.
    """

    def __init__(self, capture: Callable[[Callable[[Any], Tensor], Any], Captured], most: int) -> None:
        self._capture = capture
        self._most = most
        self._held: OrderedDict[Shape, Captured] = OrderedDict()

    def run(self, step: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
        """What ``step`` makes of ``inputs``.

        Args:
            step: depends on nothing but the shapes and numbers of ``tensors_of(inputs)``.
            inputs: fresh tensors; they may be kept and written to.
        """
        shape = tuple(tuple(tensor.shape) for tensor in tensors_of(inputs))
        captured = self._held.get(shape)
        if captured is None:
            while len(self._held) >= self._most:
                self._held.popitem(last=False)
            captured = self._held[shape] = self._capture(step, inputs)
        self._held.move_to_end(shape)
        return captured.replay(inputs)

    @property
    def shapes(self) -> list[Shape]:
        """What is kept, the longest unused first."""
        return list(self._held)


def tensors_of(inputs: object) -> list[Tensor]:
    """Every tensor in dataclasses and containers, each once, in a fixed order."""
    found: dict[int, Tensor] = {}
    for tensor in _walked(inputs):
        found.setdefault(id(tensor), tensor)
    return list(found.values())


def _walked(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _walked(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walked(getattr(value, field.name))


def filled(plan: BatchPlan, n_rows: int, spare: int, device: torch.device) -> TorchPlan:
    """A plan of sequences that bring one token each, and rows that nobody asked for, on the device.

    Tables are as wide as a power of two of pages, so that few shapes serve all lengths.

    Args:
        plan: as the cache made it.
        n_rows: tokens that there shall be.
        spare: a page that no sequence holds; what the added rows write goes there.
        device: where.
    """
    n_tokens, whole = len(plan.pages), slice(spare, spare + 1)
    added = np.arange(n_rows - n_tokens)
    runs = [Run(-1, slice(n_tokens + i, n_tokens + i + 1), 0, 1, whole) for i in added.tolist()]
    pages = np.concatenate([plan.pages, np.full(len(added), spare, np.intp)])
    slots = np.concatenate([plan.slots, added % PAGE_TOKENS])
    return place(BatchPlan([*plan.runs, *runs], pages, slots, plan.tables), device, in_powers=True)


def filled_alone(n_rows: int, n_pages: int, spare: int, device: torch.device) -> TorchPlan:
    """``filled`` for a batch of nothing, in tables for sequences of ``n_pages`` pages."""
    deep = Run(-1, slice(0, 1), 0, 1, np.full(n_pages, spare, np.intp))
    plan = BatchPlan([deep], np.array([spare]), np.zeros(1, np.intp), PageTables(0, ()))
    return filled(plan, n_rows, spare, device)
