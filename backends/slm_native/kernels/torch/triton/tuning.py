"""Tunes launch parameters of kernels: measured once per device, and cached on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import triton
from triton.runtime.errors import OutOfResources

from slm_core.diskcache import DiskCache

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

W = TypeVar("W", bound="DataclassInstance")
Measure = Callable[[Callable[[], object]], float]

_REVISION = 2  # increased when changes of the kernels invalidate old measurements
_FILE = "way.json"


class Tuner:
    """Measures launch parameters on one device.

    A choice holds for the life of the process, and through the disk for later processes: the order of sums, and so the
    last bits of a product, may depend on it.

    Args:
        device: the device of the kernels.
        measure: duration of a call, in any unit.
    """

    def __init__(self, device: torch.device, measure: Measure | None = None) -> None:
        self._about = _described(device)
        self._measure = triton.testing.do_bench if measure is None else measure
        self._cache = DiskCache("triton")
        self._chosen: dict[str, Any] = {}

    def way(self, name: str, ways: Sequence[W], run: Callable[[W], object]) -> W:
        """The fastest launch parameters; the first choice while a graph is captured, when nothing can be measured.

        Args:
            name: name of the kernel, with the shapes of the launch.
            ways: the choices, as dataclasses.
            run: launches the kernel with given parameters; called many times.
        """
        if name not in self._chosen:
            choice = self._read(name, ways)
            if choice is None:
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    return ways[0]
                choice = self._fastest(name, ways, run)
            self._chosen[name] = choice
        chosen: W = self._chosen[name]
        return chosen

    def _fastest(self, name: str, ways: Sequence[W], run: Callable[[W], object]) -> W:
        times = [self._time(way, run) for way in ways]
        best = ways[times.index(min(times))]
        record = {"way": dataclasses.asdict(best), "times": dict(zip(map(str, ways), map(str, times), strict=True))}

        def write(folder: Path) -> None:
            (folder / _FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")

        self._cache.put(self._key(name), f"{name} on {self._about}", write)
        return best

    def _time(self, way: W, run: Callable[[W], object]) -> float:
        try:
            return self._measure(lambda: run(way))
        except OutOfResources:  # more registers or shared memory than this device has
            return math.inf

    def _read(self, name: str, ways: Sequence[W]) -> W | None:
        """The choice of an earlier process; None if there is none or it is not valid."""
        folder = self._cache.get(self._key(name))
        if folder is None:
            return None
        try:
            fields = json.loads((folder / _FILE).read_text(encoding="utf-8"))["way"]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return next((way for way in ways if dataclasses.asdict(way) == fields), None)

    def _key(self, name: str) -> str:
        return hashlib.sha256(f"{name}\n{self._about}\n{_REVISION}".encode()).hexdigest()[:32]


def _described(device: torch.device) -> str:
    """The key of measurements: device and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"
