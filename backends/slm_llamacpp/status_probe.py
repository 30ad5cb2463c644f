"""The version and devices of llama.cpp, probed in a subprocess."""

from __future__ import annotations

import functools
import json
import sys

from slm_core import subprocess_probe
from slm_core.types import BackendStatus, DeviceStatus
from slm_llamacpp import BACKEND, devices, library


@functools.cache
def status() -> BackendStatus:
    """The status of llama.cpp on this machine, probed once.

    Raises:
        BackendUnavailable: it is not installed, or its library cannot be loaded.
    """
    package = library.version()
    report = json.loads(
        subprocess_probe.run("llama.cpp", "from slm_llamacpp import status_probe; status_probe.print_status()")
    )
    return BackendStatus(
        BACKEND,
        installed=True,
        version=f"{package} (llama.cpp {report['version']})",
        devices=[DeviceStatus(label, True, detail, untried) for label, detail, untried in report["devices"]],
        reason=f"device auto: {report['auto']}",
    )


def print_status() -> None:
    """Print the version and devices of llama.cpp in this process as JSON."""
    listed = devices.all_devices()
    choice = devices.choose("auto", listed)
    chosen_first = sorted(devices.choosable(listed), key=lambda device: device not in choice.gpus)
    report = {
        "version": library.load().llama_version().decode(),
        "devices": [(device.label, device.description, device.untried) for device in chosen_first],
        "auto": choice.label,
    }
    sys.stdout.write(json.dumps(report))
