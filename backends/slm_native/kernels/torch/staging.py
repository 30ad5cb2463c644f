"""A step's inputs, copied to the device in one copy."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_known: dict[type[Any], tuple[str, ...]] = {}
_ALIGNMENT = 16  # of each tensor: enough for any load that Triton makes
_N_BUFFERS = 2  # while one travels, the next is filled


@dataclass(frozen=True, slots=True, eq=False)
class Staged(Generic[T]):
    """Tensors on a device that lie in one piece of memory.

    Attributes:
        memory: uint8 [n].
        tree: their container, otherwise unchanged.
    """

    memory: Tensor
    tree: T


class StepUploader:
    """Copies the tensors of dataclasses and containers to one device, all in one.

    On CUDA they are gathered in pinned memory and travel behind what was queued before; nothing is waited for but the
    use before last of that memory. Contexts may share it.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(_N_BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * _N_BUFFERS
        self._turn = 0
        self._lock = threading.Lock()

    def upload(self, tree: T) -> Staged[T]:
        """``tree`` with each of its host tensors on the device; shared ones stay shared."""
        tensors = tensors_of(tree)
        offsets, size = _laid_out(tensors)
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._send(tensors, offsets, memory)
        placed = {
            id(tensor): _typed(memory[start : start + tensor.nbytes], tensor)
            for tensor, start in zip(tensors, offsets, strict=True)
        }
        return Staged(memory, _replaced(tree, placed, {}))

    def refill(self, staged: Staged[T], tensors: list[Tensor]) -> None:
        """Copy tensors of the host, which have the shapes of the ones before, to where those of ``staged`` lie."""
        offsets, size = _laid_out(tensors)
        assert size == len(staged.memory), "a step of another shape"
        self._send(tensors, offsets, staged.memory)

    def _send(self, tensors: list[Tensor], offsets: list[int], target: Tensor) -> None:
        with self._lock:
            buffer = self._free_buffer(len(target))
            for tensor, start in zip(tensors, offsets, strict=True):
                buffer[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            target.copy_(buffer[: len(target)], non_blocking=self._is_cuda)
            if self._is_cuda:
                self._note_sent()

    def _free_buffer(self, size: int) -> Tensor:
        """Memory of the host that no copy reads any more."""
        self._turn = (self._turn + 1) % _N_BUFFERS
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        if len(self._buffers[self._turn]) < size:
            room = 1 << max(12, (size - 1).bit_length())
            self._buffers[self._turn] = torch.empty(room, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._buffers[self._turn]

    def _note_sent(self) -> None:
        event = self._sent[self._turn]
        if event is None:
            event = self._sent[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))


def tensors_of(tree: object) -> list[Tensor]:
    """Every tensor in dataclasses and containers, each once, in a fixed order."""
    tensors: list[Tensor] = []
    _gather(tree, tensors, set())
    return tensors


def _gather(value: object, tensors: list[Tensor], seen: set[int]) -> None:
    """This is done between two replays of a graph: nothing is looked at twice."""
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
    """The fields of a dataclass; of anything else, none."""
    if kind not in _known:
        _known[kind] = tuple(x.name for x in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
    return _known[kind]


def _parts(value: object) -> Mapping[Any, object]:
    """What a container holds, by key, place or name."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    return {name: getattr(value, name) for name in _names(type(value))}


def _replaced(value: Any, tensors: Mapping[int, Tensor], done: dict[int, Any]) -> Any:
    """The value with other tensors; values without tensors are unchanged."""
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
        return tuple(parts.values()) if type(value) is tuple else type(value)(*parts.values())  # a named one
    return dataclasses.replace(value, **parts)


def _laid_out(tensors: list[Tensor]) -> tuple[list[int], int]:
    """Where each begins, and the size of all."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _typed(memory: Tensor, like: Tensor) -> Tensor:
    return memory.view(like.dtype).view(like.shape)
