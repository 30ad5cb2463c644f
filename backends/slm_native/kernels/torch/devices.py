"""Torch's devices: list, choice, number format and free memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from slm_core.errors import InvalidOption
from slm_native import torch_devices

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """One device.

    Attributes:
        name: torch's name of it ("cuda:0", "cpu").
        detail: name of the hardware, and the number format of products.
        free_bytes: its free memory; None if unknown.
        total_bytes: its memory; None if unknown.
    """

    name: str
    detail: str
    free_bytes: int | None
    total_bytes: int | None


def devices() -> list[TorchDevice]:
    """All devices of this build of torch on this machine, best first."""
    names = [f"{kind}:{i}" for kind in ("cuda", "xpu") for i in range(_count(kind))]
    if torch.backends.mps.is_available():
        names.append("mps")
    return [_describe(torch.device(name)) for name in (*names, "cpu")]


def print_devices() -> None:
    """Print the devices and torch's version as JSON to stdout, for the parent process."""
    print(json.dumps([torch.__version__, [asdict(device) for device in devices()]]))  # noqa: T201


def choose_device(asked: str) -> torch.device:
    """The device with a name; "auto" is the best one.

    Raises:
        BackendUnavailable: torch has no such device on this machine.
    """
    names = [device.name for device in devices()]
    return torch.device(torch_devices.spelled(asked, names, torch.__version__))


def best_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU, otherwise float16: as fast as bfloat16, whose 8 bits of precision miss the contract's bound."""
    return torch.float32 if device.type == "cpu" else torch.float16


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """The number format of products.

    Raises:
        InvalidOption: an unknown format.
    """
    if asked == "auto":
        return best_dtype(device)
    if asked not in DTYPES:
        raise InvalidOption(f"unknown dtype {asked!r} (accepted: auto, {', '.join(DTYPES)})")
    return DTYPES[asked]


def memory(device: torch.device) -> tuple[int | None, int | None]:
    """Free and total bytes of device memory; None if the device uses the system's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + _cached(device), total
    if device.type == "xpu":
        free, total = torch.xpu.mem_get_info(device)
        return free, total
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.current_allocated_memory(), total
    return None, None


def spelled(dtype: torch.dtype) -> str:
    """The name of a number format in options."""
    return str(dtype).removeprefix("torch.")


def _cached(device: torch.device) -> int:
    """Bytes that torch caches and nothing uses; they count as free."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _count(kind: str) -> int:
    return torch.cuda.device_count() if kind == "cuda" else torch.xpu.device_count()


def _describe(device: torch.device) -> TorchDevice:
    free, total = memory(device)
    usage = "" if free is None or total is None else f", {free >> 20} of {total >> 20} MiB free"
    return TorchDevice(str(device), f"{_label(device)}, products in {spelled(best_dtype(device))}{usage}", free, total)


def _label(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    if device.type == "xpu":
        return str(torch.xpu.get_device_name(device))
    return f"torch {torch.__version__}"
