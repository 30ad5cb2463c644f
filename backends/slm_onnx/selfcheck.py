"""The self-check: every device but the CPU is compared with the CPU before its first model is loaded.

A subprocess runs the same decodes and edits of a tiny model on both, so that a crashing provider does no harm. A device
that passes is not checked again on this machine until ONNX Runtime, the graph, a driver or an option changes. A device
that fails is checked again at each load, as the cause may be fixed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slm_core import subprocess_probe
from slm_core.cpu import processor
from slm_core.diskcache import DiskCache
from slm_core.errors import BackendUnavailable, InvalidOption
from slm_onnx import build, plugins
from slm_onnx.options import LoadOptions
from slm_onnx.providers import Device

VERSION = 1
"""Version of the check; increased with every change."""
TOLERANCE = 0.05
"""The largest accepted error of logits (relative L2 norm). 8-bit activations, the coarsest format of a device, give
0.011 on the tiny model; keys and values that are lost, late or misplaced give at least 0.5."""

_KIND = "onnx-selfcheck"
_PATIENCE_S = 300.0  # a provider may compile the graph for each shape
_CODE = "import sys; from slm_onnx import comparing; comparing.answer(sys.argv[1])"
_DEVICE_VARIABLES = (
    "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER",
    "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
_MANIFESTS = (Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d"))
_NVIDIA = Path("/proc/driver/nvidia/version")
_PCI = Path("/sys/bus/pci/devices")
_DISPLAY = "0x03"  # the PCI class of GPUs


def require(device: Device, options: LoadOptions, *, of_directory: bool = False) -> None:
    """Check a device with the options that affect its graphs, unless it has passed before.

    Args:
        device: the device.
        options: load options.
        of_directory: whether it runs the graphs of a directory, which have other caches.

    Raises:
        BackendUnavailable: its logits differ from the CPU's, it cannot run the graphs, or the subprocess crashed.
        InvalidOption: an option does not fit the device.
    """
    probe_input = [device.label, _relevant_options(options), of_directory]
    cache, key = DiskCache(_KIND), _key(device, probe_input)
    if cache.get(key) is not None:
        return
    worst = _try(device, probe_input)
    about = f"{device.label} computes what the CPU computes{' from directories' if of_directory else ''}"
    cache.put(key, about, lambda folder: _write(folder / "verdict.json", worst))


def _try(device: Device, probe_input: Sequence[object]) -> float:
    """The largest error over all steps."""
    who = f"the self-check of device {device.label!r} ({device.provider.name})"
    output = subprocess_probe.run(who, _CODE, json.dumps(probe_input), patience_s=_PATIENCE_S)
    result = json.loads(output.strip().splitlines()[-1])
    if "option" in result:
        raise InvalidOption(result["option"])
    if "problem" in result:
        raise BackendUnavailable(f"device {device.label!r} cannot run a tiny model: {result['problem']}")
    for step, error in result["errors"].items():
        if error <= TOLERANCE:
            continue
        raise BackendUnavailable(
            f"device {device.label!r} gives wrong numbers on this machine: on a tiny model, the logits after {step}"
            f" differ from the CPU's by {error:.0%} (accepted: {TOLERANCE:.0%}): use device='cpu', or another ONNX"
            " Runtime or driver"
        )
    return float(max(result["errors"].values()))


def _relevant_options(options: LoadOptions) -> Mapping[str, object]:
    return {
        "accuracy_level": options.accuracy_level,
        "buckets": options.buckets,
        "provider_options": dict(sorted(options.provider_options.items())),
    }


def _write(file: Path, worst: float) -> None:
    file.write_text(json.dumps({"largest_error": worst}), encoding="utf-8")


def _key(device: Device, probe_input: Sequence[object]) -> str:
    """A cache key for everything that the verdict is known to depend on."""
    from slm_onnx.compiled import BUILDER_VERSION  # imports onnx

    runtime = build.find_build()
    stamp = [] if runtime is None else [runtime.package, runtime.version, *runtime.stamp()]
    parts = [
        VERSION,
        BUILDER_VERSION,
        device.provider.name,
        probe_input,
        stamp,
        plugins.versions(),
        processor(),
        *_graphics(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _graphics() -> Iterator[str]:
    """The GPUs and their drivers."""
    yield platform.platform()
    for name in _DEVICE_VARIABLES:
        yield f"{name}={os.environ.get(name, '')}"
    yield _read(_NVIDIA)
    for manifest in sorted(file for folder in _MANIFESTS for file in folder.glob("*.json")):
        yield f"{manifest} {manifest.stat().st_mtime_ns}"
    for gpu in sorted(_PCI.glob("*")):
        if _read(gpu / "class").startswith(_DISPLAY):
            yield f"{gpu.name} {_read(gpu / 'vendor')} {_read(gpu / 'device')}"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
