"""What llama.cpp says of itself, version and devices, asked in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from slm_core.errors import BackendUnavailable
from slm_core.types import BackendStatus, DeviceStatus
from slm_llamacpp import BACKEND, devices, library

_PATIENCE_S = 60.0


@functools.cache
def ask() -> BackendStatus:
    """The status of llama.cpp on this machine; found out once.

    Raises:
        BackendUnavailable: it is not installed, or its library does not load.
    """
    package = library.version()
    told = json.loads(output_of([sys.executable, "-P", "-c", "from slm_llamacpp import inquiry; inquiry.answer()"]))
    return BackendStatus(
        BACKEND,
        installed=True,
        version=f"{package} (llama.cpp {told['version']})",
        devices=[DeviceStatus(label, available=True, detail=detail) for label, detail in told["devices"]],
        reason=f"device auto: {told['auto']}",
    )


def output_of(command: Sequence[str]) -> str:
    """What a process prints that imports what this one can.

    Raises:
        BackendUnavailable: it fails, crashes, or does not end.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(  # noqa: S603  (our own code, in our own interpreter)
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"llama.cpp could not be asked for its devices: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendUnavailable(f"llama.cpp cannot be loaded (exit code {done.returncode}): {last}")
    return done.stdout


def answer() -> None:
    """Print what the llama.cpp of this process says, as JSON."""
    found = devices.all_devices()
    choice = devices.choose("auto", found)
    best_first = sorted(found, key=lambda device: device not in choice.gpus)
    told = {
        "version": library.load().llama_version().decode(),
        "devices": [(device.label, device.description) for device in best_first],
        "auto": choice.label,
    }
    sys.stdout.write(json.dumps(told))
