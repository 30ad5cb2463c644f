"""One model on several devices: placement of layers, weights and inputs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slm_core.errors import InvalidOption, UnsupportedModel
from slm_native.kernels.parameters import WeightBytes
from slm_native.kernels.torch.devices import choose_device, devices, memory
from slm_native.kernels.torch.pages import TorchPageStore
from slm_native.kv import PageLayout, PageStore, Planes

T = TypeVar("T")
DeviceMap: TypeAlias = Literal["auto"] | Mapping[str, int]
"""The number of layers on each device, in order; "auto" to split by memory."""
_STEPS = 50  # of a bisection over the used share of memory: precision 1e-15


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a model's weights.

    Attributes:
        layers: the device of each layer [L]; consecutive layers are together.
        home: the device of the embedding; host data is copied to it.
        head: the device of the output matrix.
    """

    layers: tuple[torch.device, ...]
    home: torch.device
    head: torch.device

    def of(self, name: str) -> torch.device:
        """The device of a tensor."""
        if name.startswith("blk."):
            return self.layers[int(name.split(".")[1])]
        return self.head if name.startswith("output") else self.home


def devices_of(device: str, device_map: DeviceMap | None) -> list[torch.device]:
    """The devices of a model; the first one has the first layer.

    Raises:
        BackendUnavailable: a device is missing.
        InvalidOption: ``device`` is not the map's first, or devices are of several kinds.
    """
    if device_map is None:
        return [choose_device(device)]
    if isinstance(device_map, str):
        first = choose_device(device)
        same_kind = [other for candidate in devices() if (other := torch.device(candidate.name)).type == first.type]
        return [first, *(other for other in same_kind if other != first)]
    mapped = [choose_device(name) for name in device_map]
    if len({mapped_device.type for mapped_device in mapped}) > 1 or len(set(mapped)) < len(mapped):
        raise InvalidOption(f"device_map={dict(device_map)!r} (accepted: devices of one kind, each once)")
    if device != "auto" and choose_device(device) != mapped[0]:
        raise InvalidOption(
            f"device_map begins with {mapped[0]}, and device is {device!r} (accepted: 'auto', {mapped[0]})"
        )
    return mapped


def placement_of(devices: Sequence[torch.device], device_map: DeviceMap, sizes: WeightBytes) -> Placement:
    """Place the weights.

    Raises:
        InvalidOption: the number of layers in the map is wrong.
        UnsupportedModel: the devices have too little memory.
    """
    known = {str(device): memory(device)[0] for device in devices}
    free = {name: sys.maxsize if n is None else n for name, n in known.items()}
    if isinstance(device_map, str):
        counts = counts_by_memory(sizes, free)
    else:
        counts = counts_by_map(device_map, len(sizes.blocks))
    layers = tuple(device for device, n in zip(devices, counts, strict=True) for _ in range(n))
    placement = Placement(layers, layers[0], layers[0] if sizes.tied else layers[-1])
    _check_room(placement, sizes, free)
    return placement


def _check_room(placement: Placement, sizes: WeightBytes, free: Mapping[str, int]) -> None:
    used = dict.fromkeys(free, 0)
    for device, n_bytes in zip(placement.layers, sizes.blocks, strict=True):
        used[str(device)] += n_bytes
    used[str(placement.home)] += sizes.embedding
    used[str(placement.head)] += sizes.output
    for name, n_bytes in used.items():
        if n_bytes > free[name]:
            raise UnsupportedModel(
                f"device_map gives {name} weights of {n_bytes >> 20} MiB, and {free[name] >> 20} MiB are free there"
            )


def counts_by_memory(sizes: WeightBytes, free: Mapping[str, int]) -> list[int]:
    """The number of layers on each device that minimizes the used share of the fullest device.

    Args:
        sizes: bytes of the weights; the embedding counts with the first layer, the output matrix with the last.
        free: free bytes of each device, in order.

    Raises:
        UnsupportedModel: the devices have too little memory.
    """
    capacities = list(free.values())
    if (best := _filled(sizes, capacities)) is None:
        free_mib = ", ".join(f"{name} {n >> 20}" for name, n in free.items())
        raise UnsupportedModel(
            f"the weights take {sizes.total >> 20} MiB, and the layers do not fit into the free MiB ({free_mib}): use a"
            " smaller quantization, other devices, or free some memory"
        )
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        share = (low + high) / 2
        counts = _filled(sizes, [int(n * share) for n in capacities])
        low, high, best = (low, share, counts) if counts is not None else (share, high, best)
    return best


def _filled(sizes: WeightBytes, capacities: Sequence[int]) -> list[int] | None:
    """Assign layers in order to devices in order; None if they do not fit."""
    counts, left = [0] * len(capacities), list(capacities)
    at, n_layers = 0, len(sizes.blocks)
    for i, n_bytes in enumerate(sizes.blocks):
        needed = n_bytes + (sizes.embedding if i == 0 else 0) + (sizes.output if i == n_layers - 1 else 0)
        while at < len(capacities) and left[at] < needed:
            if i == 0:
                left[at] = 0
            at += 1
        if at == len(capacities):
            return None
        left[at] -= needed
        counts[at] += 1
    return counts


def counts_by_map(device_map: Mapping[str, int], n_layers: int) -> list[int]:
    """Check the number of layers on each device.

    Raises:
        InvalidOption: the numbers do not add up to the layers of the model.
    """
    if sum(device_map.values()) != n_layers or min(device_map.values()) < 1:
        raise InvalidOption(
            f"device_map={dict(device_map)!r}: the model has {n_layers} layers, and each device gets some"
        )
    return list(device_map.values())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device."""
    return tensor.to(device)


def moved(value: T, device: torch.device, done: dict[tuple[int, torch.device], Any]) -> T:
    """A value with its tensors copied to a device.

    Args:
        value: a tensor, or a dataclass or container of tensors.
        device: the target device.
        done: copies made so far, by identity of the tensor; it keeps them alive.
    """
    key = (id(value), device)
    if key not in done:
        done[key] = _moved(value, device, done)
    layer: T = done[key]
    return layer


def _moved(value: Any, device: torch.device, done: dict[tuple[int, torch.device], Any]) -> Any:
    if isinstance(value, Tensor):
        return to_device(value, device)
    if isinstance(value, tuple):
        parts = [moved(part, device, done) for part in value]
        return tuple(parts) if type(value) is tuple else type(value)(*parts)  # a NamedTuple
    if isinstance(value, list):
        return [moved(part, device, done) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: moved(part, device, done) for name, part in named.items()}
        return dataclasses.replace(value, **changed)
    return value


class SplitPageStore(PageStore):
    """Pages whose layers are on several devices.

    Args:
        layout: layout of a page, all devices together.
        n_pages: number of pages.
        placement: placement of the model's layers.

    Raises:
        InvalidOption: a device has too little free memory.
    """

    def __init__(self, layout: PageLayout, n_pages: int, placement: Placement) -> None:
        self.layout = layout
        self._home = placement.home
        devices = [placement.layers[block] for block in layout.blocks]
        changes = [i for i, (a, b) in enumerate(pairwise(devices), 1) if a != b]
        self._bounds = [0, *changes, layout.n_layers]
        self._stores = [
            TorchPageStore(dataclasses.replace(layout, blocks=layout.blocks[start:stop]), n_pages, devices[start])
            for start, stop in pairwise(self._bounds)
        ]
        self.keys = self._stores[0].keys
        self.layers = [layer for store in self._stores for layer in store.layers]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """On each device."""
        for store in self._stores:
            store.copy(sources, targets)

    def read(self, pages: Sequence[int], positions: NDArray[np.intp]) -> list[Tensor]:
        """Gather on the first device."""
        parts = [store.read(pages, positions) for store in self._stores]
        return [
            torch.cat([to_device(plane, self._home) for plane in planes], dim=1) for planes in zip(*parts, strict=True)
        ]

    def read_plane(self, i: int, pages: Sequence[int], positions: NDArray[np.intp]) -> Tensor:
        """Gather on the first device."""
        parts = [store.read_plane(i, pages, positions) for store in self._stores]
        return torch.cat([to_device(part, self._home) for part in parts], dim=1)

    def write_plane(self, i: int, pages: Sequence[int], positions: NDArray[np.intp], plane: Tensor) -> None:
        """Write each device's layers on that device."""
        for store, (start, stop) in zip(self._stores, pairwise(self._bounds), strict=True):
            store.write_plane(i, pages, positions, to_device(plane[:, start:stop], store.device))

    def packed(self, n_pages: int, tokens: Planes) -> list[Tensor]:
        """Pack each device's layers on that device."""
        return [
            store.packed(n_pages, [to_device(plane[:, start:stop], store.device) for plane in tokens])
            for store, (start, stop) in zip(self._stores, pairwise(self._bounds), strict=True)
        ]

    def put(self, pages: Sequence[int], packed: Sequence[Tensor]) -> None:
        """On each device."""
        for store, part in zip(self._stores, packed, strict=True):
            store.put(pages, part)

    def to_host(self, plane: Tensor) -> NDArray[Any]:
        """Copy from the first device."""
        return self._stores[0].to_host(plane)

    def from_host(self, plane: NDArray[Any]) -> Tensor:
        """Copy to the first device."""
        return self._stores[0].from_host(plane)
