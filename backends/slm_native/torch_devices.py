"""Torch's devices, listed by another process, because importing torch takes seconds."""

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
"""The devices that the conformance suite has passed on."""
INSTALL_HINT = "pip install 'slm-core[torch]'"


@dataclass(frozen=True, slots=True)
class TorchStatus:
    """What an installation of torch offers.

    Attributes:
        version: of torch.
        devices: best first.
    """

    version: str
    devices: tuple[DeviceStatus, ...]

    def named(self, asked: str) -> str:
        """The device of a name, as torch spells it.

        Raises:
            BackendUnavailable: see ``spelled``.
        """
        return spelled(asked, [device.name for device in self.devices if device.available], self.version)


def spelled(asked: str, names: Sequence[str], version: str) -> str:
    """The one of torch's devices that is meant; "auto" is the first.

    Raises:
        BackendUnavailable: torch knows no such device, or this machine has none.
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
        BackendUnavailable: torch does not load.
    """
    output = subprocess_probe.run("torch", "from slm_native.kernels.torch import devices; devices.print_devices()")
    version, devices = json.loads(output)
    there = [
        DeviceStatus(each["name"], True, f"tier torch: {each['detail']}", untried=each["name"] not in _TRIED)
        for each in devices
    ]
    kinds = {device.name.partition(":")[0] for device in there}
    return TorchStatus(version, (*there, *_absent(kinds, f"torch {version} finds none on this machine")))


def missing_devices(reason: str) -> tuple[DeviceStatus, ...]:
    """Every kind of device but the CPU, for the same reason not there."""
    return _absent({"cpu"}, reason)


def _absent(kinds: set[str], reason: str) -> tuple[DeviceStatus, ...]:
    return tuple(DeviceStatus(kind, False, reason, kind not in _TRIED) for kind in _KINDS if kind not in kinds)
