"""The number of usable cores, and the processor."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The number of physical cores that this process may use, by its affinity and the CPU quota of its cgroup."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = count_cores(os.sched_getaffinity(0), _CPUS)
    quota = cpu_quota(_CGROUP, Path("/proc/self/cgroup"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def processor() -> str:
    """The model and the instruction sets of the processor, if the system provides them."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    fields = {line.partition(":")[0].strip(): line for line in reversed(lines)}  # the first core
    lines_used = [
        fields[key] for key in ("model name", "flags", "CPU implementer", "CPU part", "Features") if key in fields
    ]
    return "\n".join([platform.machine(), *(lines_used or [platform.processor()])])


def count_cores(cpus: Iterable[int], topology: Path) -> int:
    """The number of physical cores of ``cpus``; hardware threads of one core count once.

    Args:
        cpus: numbers of logical CPUs.
        topology: the folder with ``cpu0``, ``cpu1``, ...; a CPU without a folder counts as one core.
    """
    siblings = (_read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus)
    return max(1, len(set(siblings)))


def cpu_quota(root: Path, membership: Path) -> float | None:
    """The CPU quota of this process's cgroup (v2), in CPUs; None for no limit.

    Args:
        root: the mount point of the cgroup file system.
        membership: the file with the group of this process, as in ``0::/user.slice``.
    """
    path = next((line[3:] for line in _read(membership).splitlines() if line.startswith("0::")), "/").strip("/")
    group = root / path
    quotas = [_quota(folder / "cpu.max") for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(file: Path) -> float | None:
    fields = _read(file).split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    return int(fields[0]) / int(fields[1])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
