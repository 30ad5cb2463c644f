"""Chooses a device that ONNX Runtime offers and that passes the self-check."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from slm_core.errors import BackendUnavailable
from slm_core.types import DeviceStatus
from slm_onnx import providers, selfcheck
from slm_onnx.options import LoadOptions
from slm_onnx.providers import PROVIDERS, Device

_log = logging.getLogger(__name__)
_DEFAULTS = LoadOptions()


class Report(NamedTuple):
    """The devices in ``Backend.status()``.

    Attributes:
        devices: all devices, usable ones first.
        auto: the device of ``device="auto"``, and the reasons against the others.
    """

    devices: list[DeviceStatus]
    auto: str


def choose(wanted: str, options: LoadOptions = _DEFAULTS, *, of_directory: bool = False) -> Device:
    """The device with a name, after it has passed the self-check.

    "auto" is the best device that has passed the conformance suite and passes the self-check on this machine.

    Raises:
        BackendUnavailable: no such device, this build of ONNX Runtime lacks it, or it fails the self-check.
    """
    if wanted != "auto":
        device = providers.find(wanted)
        _check(device, options, of_directory=of_directory)
        return device

    def problem(label: str) -> str | None:
        problem = _problem(label, options, of_directory=of_directory)
        if problem is not None:
            _log.warning('device="auto" does not take %s: %s', label, problem)
        return problem

    return _best(problem)


def report() -> Report:
    """All devices, after the self-check.

    Raises:
        BackendUnavailable: ONNX Runtime is not installed, or cannot be loaded.
    """
    providers.installed()
    problems = {label: _problem(label, _DEFAULTS) for label in PROVIDERS}
    statuses = [
        DeviceStatus(label, problems[label] is None, problems[label] or provider.name, provider.untried)
        for label, provider in PROVIDERS.items()
    ]
    best_first = sorted(statuses, key=lambda device: (not device.available, device.untried))
    return Report(best_first, _best(problems.__getitem__).reason)


def _problem(label: str, options: LoadOptions, *, of_directory: bool = False) -> str | None:
    """Why a device cannot be used; None if it can be used."""
    try:
        _check(providers.find(label), options, of_directory=of_directory)
    except BackendUnavailable as error:
        return str(error)
    return None


def _check(device: Device, options: LoadOptions, *, of_directory: bool) -> None:
    if not device.is_cpu:  # the CPU is the reference of the self-check
        selfcheck.require(device, options, of_directory=of_directory)


def _best(problem: Callable[[str], str | None]) -> Device:
    """The device of "auto". The CPU is always available, and comes last.

    Args:
        problem: returns why a device cannot be used; None if it can be used.
    """
    installed = providers.installed()
    passed_over = []
    for label, provider in PROVIDERS.items():
        if provider.name not in installed:
            continue
        if provider.untried:
            passed_over.append(f"{label} is untried: ask for it by name")
        elif provider.by_name_only:
            passed_over.append(f"{label} is taken by name only: {provider.by_name_only}")
        elif problem(label) is not None:
            passed_over.append(f"{label} cannot be used")
        else:
            device = providers.find(label)
            return Device(device.label, provider, device.device_id, "; ".join([f"device auto: {label}", *passed_over]))
    raise BackendUnavailable(f"this build of ONNX Runtime has no CPU provider (it has: {', '.join(installed)})")
