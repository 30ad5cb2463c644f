"""What a process holds: memory, file descriptors, threads, files in its cache directories."""

from __future__ import annotations

import gc
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that must not grow.

    Attributes:
        name: for people.
        unit: likewise.
        allowed: growth over a run, after its warm-up, that still counts as flat. Of things that are counted, less
            than one; of memory, what allocators take more or less of from one moment to the next.
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
    """The amount of each of ``RESOURCES`` now; garbage is collected first.

    Args:
        cache: the process's own cache folder, all of whose files are counted.
        worker_cache: that of workers that are killed; whole entries come and go there, so that what is counted is
            what belongs to none.
    """
    gc.collect()
    resident = int((PROC / "statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20
    n_descriptors = len(os.listdir(PROC / "fd")) - 1  # noqa: PTH208  (less the one that lists them)
    n_threads = len(os.listdir(PROC / "task"))  # noqa: PTH208
    return [resident, n_descriptors, n_threads, _n_files(cache) + _n_files(worker_cache, left_over=True)]


def _n_files(cache: Path, *, left_over: bool = False) -> int:
    """Files and folders below a folder; with ``left_over``, those that are in no whole cache entry."""
    paths = list(cache.rglob("*"))
    entries = {path.parent for path in paths if path.name == "manifest.json"} if left_over else set()
    kinds = {path.parent for path in entries}
    return sum(1 for path in paths if path not in kinds and entries.isdisjoint((path, *path.parents)))
