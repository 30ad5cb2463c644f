"""How many threads to compute with, and which processor that is."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Physical cores that this process may use: by its affinity, and by the CPU quota of its control group."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = count_cores(os.sched_getaffinity(0), _CPUS)
    quota = cpu_quota(_CGROUP, Path("/proc/self/cgroup"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def processor() -> str:
    """What code for this processor depends on: its model and its instructions, where the system tells them."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    fields = {line.partition(":")[0].strip(): line for line in reversed(lines)}  # of the first core
    known = [fields[key] for key in ("model name", "flags", "CPU implementer", "CPU part", "Features") if key in fields]
    return "\n".join([platform.machine(), *(known or [platform.processor()])])


def count_cores(cpus: Iterable[int], topology: Path) -> int:
    """How many cores ``cpus`` lie on; hardware threads of one core count once.

    Args:
        cpus: numbers of logical CPUs.
        topology: the folder with ``cpu0``, ``cpu1``, ...; a CPU that is not there counts as a core of its own.
    """
    siblings = (_read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus)
    return max(1, len(set(siblings)))


def cpu_quota(root: Path, membership: Path) -> float | None:
    """CPUs that the control group of this process may use at once (cgroup v2), None where it is not limited.

    Args:
        root: where the cgroup file system is mounted.
        membership: the file that names the group of this process, as in ``0::/user.slice``.
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
        return file.read_text().strip()
    except OSError:
        return ""
