"""Copies all inputs of a step to the device at once."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_field_names: dict[type[Any], tuple[str, ...]] = {}
_ALIGNMENT = 16  # bytes, of each tensor: enough for any load of Triton
_N_BUFFERS = 2  # one is copied while the next is filled


@dataclass(frozen=True, slots=True, eq=False)
class Staged(Generic[T]):
    """Tensors that share one allocation on a device.

    Attributes:
        memory: uint8 [n].
        tree: the container of the tensors, otherwise unchanged.
    """

    memory: Tensor
    tree: T


class StepUploader:
    """Copies the tensors in dataclasses and containers to one device, with one copy.

    On CUDA, tensors are gathered in pinned memory and copied asynchronously. There are two buffers: an upload waits
    only for the copy from its buffer two uploads ago. Contexts may share an uploader.

    Args:
        device: the target device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(_N_BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * _N_BUFFERS
        self._current = 0
        self._lock = threading.Lock()

    def upload(self, tree: T) -> Staged[T]:
        """``tree`` with its host tensors on the device; a tensor that occurs twice is copied once."""
        tensors = tensors_of(tree)
        offsets, size = _laid_out(tensors)
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._send(tensors, offsets, memory)
        copies = {
            id(tensor): _typed(memory[start : start + tensor.nbytes], tensor)
            for tensor, start in zip(tensors, offsets, strict=True)
        }
        return Staged(memory, _replaced(tree, copies, {}))

    def refill(self, staged: Staged[T], tensors: list[Tensor]) -> None:
        """Copy host tensors of the same shapes into the memory of ``staged``."""
        offsets, size = _laid_out(tensors)
        assert size == len(staged.memory), "a step of another shape"
        self._send(tensors, offsets, staged.memory)

    def _send(self, tensors: list[Tensor], offsets: list[int], target: Tensor) -> None:
        with self._lock:
            buffer = self._free_buffer(len(target))
            host = buffer.numpy()  # copies of a few bytes take NumPy a third of torch's time
            for tensor, start in zip(tensors, offsets, strict=True):
                host[start : start + tensor.nbytes] = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
            target.copy_(buffer[: len(target)], non_blocking=self._is_cuda)
            if self._is_cuda:
                self._record_sent()

    def _free_buffer(self, size: int) -> Tensor:
        """The next buffer, once its last copy is done."""
        self._current = (self._current + 1) % _N_BUFFERS
        sent = self._sent[self._current]
        if sent is not None:
            sent.synchronize()
        if len(self._buffers[self._current]) < size:
            capacity = 1 << max(12, (size - 1).bit_length())
            self._buffers[self._current] = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._buffers[self._current]

    def _record_sent(self) -> None:
        event = self._sent[self._current]
        if event is None:
            event = self._sent[self._current] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))


def tensors_of(tree: object) -> list[Tensor]:
    """All tensors in dataclasses and containers, without duplicates, in a fixed order."""
    tensors: list[Tensor] = []
    _gather(tree, tensors, set())
    return tensors


def _gather(value: object, tensors: list[Tensor], seen: set[int]) -> None:
    """Collect tensors. Each object is visited once: this runs between two replays of a graph, and must be fast."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, list | tuple):
        for part in value:
            _gather(part, tensors, seen)
    elif names := _names(type(value)):
        for name in names:
            _gather(getattr(value, name), tensors, seen)
    elif isinstance(value, dict):
        for part in value.values():
            _gather(part, tensors, seen)


def _names(kind: type[Any]) -> tuple[str, ...]:
    """The field names of a dataclass; empty for other types."""
    if kind not in _field_names:
        _field_names[kind] = tuple(x.name for x in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
    return _field_names[kind]


def _parts(value: object) -> Mapping[Any, object]:
    """The elements of a container or dataclass, by key, index or field name."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    return {name: getattr(value, name) for name in _names(type(value))}


def _replaced(value: Any, tensors: Mapping[int, Tensor], done: dict[int, Any]) -> Any:
    """``value`` with its tensors replaced; objects without tensors are not copied."""
    if isinstance(value, Tensor):
        return tensors[id(value)]
    if id(value) not in done:
        parts = _parts(value)
        changed = {key: _replaced(part, tensors, done) for key, part in parts.items()}
        same = all(changed[key] is part for key, part in parts.items())
        done[id(value)] = value if same else _rebuilt(value, changed)
    return done[id(value)]


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, dict):
        return parts
    if isinstance(value, list):
        return list(parts.values())
    if isinstance(value, tuple):
        return tuple(parts.values()) if type(value) is tuple else type(value)(*parts.values())  # a NamedTuple
    return dataclasses.replace(value, **parts)


def _laid_out(tensors: list[Tensor]) -> tuple[list[int], int]:
    """The offset of each tensor, and the size of all."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _typed(memory: Tensor, like: Tensor) -> Tensor:
    return memory.view(like.dtype).view(like.shape)
