"""Resources of a process: memory, file descriptors, threads, files in its cache folders."""

from __future__ import annotations

import gc
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that must not grow.

    Attributes:
        name: name in reports.
        unit: unit in reports.
        allowed: growth over a run, after the warm-up, that still counts as flat: for counts less than one, for memory
            the normal variation of allocators.
    """

    name: str
    unit: str
    allowed: float


RESOURCES = (
    Resource("resident memory", "MiB", 16.0),
    Resource("file descriptors", "", 0.5),
    Resource("threads", "", 0.5),
    Resource("cache files", "", 0.5),
)


def measure(cache: Path, worker_cache: Path) -> list[float]:
    """The amount of each of ``RESOURCES`` now, after a garbage collection.

    Args:
        cache: the cache folder of this process; all its files are counted.
        worker_cache: the cache folder of killed workers; only files outside complete entries are counted.
    """
    gc.collect()
    resident = int((PROC / "statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20
    n_descriptors = len(os.listdir(PROC / "fd")) - 1  # noqa: PTH208  (without the descriptor of listdir)
    n_threads = len(os.listdir(PROC / "task"))  # noqa: PTH208
    return [resident, n_descriptors, n_threads, _n_files(cache) + _n_files(worker_cache, left_over=True)]


def _n_files(cache: Path, *, left_over: bool = False) -> int:
    """Files and folders below a folder; with ``left_over``, only those outside complete cache entries."""
    paths = list(cache.rglob("*"))
    entries = {path.parent for path in paths if path.name == "manifest.json"} if left_over else set()
    kinds = {path.parent for path in entries}
    return sum(1 for path in paths if path not in kinds and entries.isdisjoint((path, *path.parents)))
