"""The number of usable cores, and the processor."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from slm_core.errors import InvalidOption
from slm_core.numerics import as_integer, shown

_MOST_THREADS = 512
_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The number of physical cores that this process may use, by its affinity and the CPU quota of its cgroup."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = count_cores(os.sched_getaffinity(0), _CPUS)
    quota = cpu_quota(_CGROUP, Path("/proc/self/cgroup"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def chosen_threads(asked: int | None) -> int:
    """The number of threads that was asked for; None for one per usable core.

    Raises:
        InvalidOption: not an integer from 1 to 512.
    """
    if asked is None:
        return usable_cores()
    n_threads = None if isinstance(asked, bool) else as_integer(asked)
    if n_threads is None or not 1 <= n_threads <= _MOST_THREADS:
        raise InvalidOption(f"n_threads={shown(asked)} (accepted: an integer from 1 to {_MOST_THREADS})")
    return n_threads


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
    """The CPU quota of this process's cgroup, in CPUs; None for no limit.

    The least quota of the group and the groups above it counts. In a container the file system may show only the
    process's own group, at its root.

    Args:
        root: the mount point of the cgroup file system.
        membership: the file with the groups of this process: ``0::/user.slice`` of version 2, and
            ``4:cpu,cpuacct:/user.slice`` of version 1.
    """
    quotas = []
    for line in _read(membership).splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            quotas += [_quota(_read(group / "cpu.max")) for group in _groups(root, path)]
        elif "cpu" in controllers.split(","):
            mounts = {root / "cpu", root / controllers}
            quotas += [_quota_of_version_1(group) for mount in mounts for group in _groups(mount, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path, path: str) -> list[Path]:
    """The folder of a group and the folders of the groups above it."""
    group = root / path.strip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]


def _quota_of_version_1(group: Path) -> float | None:
    return _quota(f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}")


def _quota(text: str) -> float | None:
    """The quota in CPUs: microseconds of CPU time in a period, divided by the microseconds of the period."""
    fields = text.split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or not int(fields[1]):
        return None
    return int(fields[0]) / int(fields[1])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
