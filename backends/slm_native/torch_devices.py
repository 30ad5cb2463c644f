"""Lists torch's devices in a subprocess, because importing torch takes seconds."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass

from slm_core import subprocess_probe
from slm_core.errors import BackendUnavailable
from slm_core.types import DeviceStatus

_KINDS = ("cuda", "xpu", "mps", "cpu")
_TRIED = frozenset({"cpu"})
"""The devices on which the conformance suite has passed."""
INSTALL_HINT = "pip install 'slm-core[torch]'"


@dataclass(frozen=True, slots=True)
class TorchStatus:
    """An installation of torch.

    Attributes:
        version: version of torch.
        devices: its devices, best first.
    """

    version: str
    devices: tuple[DeviceStatus, ...]

    def named(self, asked: str) -> str:
        """Torch's name of a device.

        Raises:
            BackendUnavailable: see ``spelled``.
        """
        return spelled(asked, [device.name for device in self.devices if device.available], self.version)


def spelled(asked: str, names: Sequence[str], version: str) -> str:
    """Torch's name of a device; "auto" is the first device.

    Raises:
        BackendUnavailable: torch has no such device on this machine.
    """
    if asked == "auto":
        return names[0]
    name = f"{asked}:0" if asked in ("cuda", "xpu") else asked
    if name not in names:
        raise BackendUnavailable(
            f"torch {version} has no device {asked!r} on this machine (it has: {', '.join(names)})"
        )
    return name


def why_missing() -> str | None:
    """Why there is no torch tier; None if torch is installed. Imports nothing."""
    if importlib.util.find_spec("torch") is not None:
        return None
    return f"torch is not installed (to get it: {INSTALL_HINT})"


@functools.cache
def ask() -> TorchStatus:
    """Torch's version and devices.

    Raises:
        BackendUnavailable: torch cannot be imported.
    """
    output = subprocess_probe.run("torch", "from slm_native.kernels.torch import devices; devices.print_devices()")
    version, devices = json.loads(output)
    present = [
        DeviceStatus(device["name"], True, f"tier torch: {device['detail']}", untried=device["name"] not in _TRIED)
        for device in devices
    ]
    kinds = {device.name.partition(":")[0] for device in present}
    return TorchStatus(version, (*present, *_absent(kinds, f"torch {version} finds none on this machine")))


def missing_devices(reason: str) -> tuple[DeviceStatus, ...]:
    """Every kind of device but the CPU, unavailable for the same reason."""
    return _absent({"cpu"}, reason)


def _absent(kinds: set[str], reason: str) -> tuple[DeviceStatus, ...]:
    return tuple(DeviceStatus(kind, False, reason, kind not in _TRIED) for kind in _KINDS if kind not in kinds)
