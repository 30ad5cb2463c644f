"""A disk cache for data that is expensive to build and can be built again: one folder per entry.

An entry is built in a temporary folder and renamed into place. It stores the size, modification time and checksum of
each of its files; incomplete or damaged entries are built again. The checksum is not verified if the modification time
is unchanged, because this would take a second per gigabyte. If nothing can be written, callers continue without a
cache.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slm_core.errors import InvalidOption
from slm_core.user_paths import option_path

CACHE_VARIABLE = "SLM_CACHE_DIR"
_MANIFEST = "manifest.json"
_CHUNK = 1 << 22
_TICK = 0.02  # seconds; the resolution of file system clocks
_TEMPORARY_PREFIX = ".making-"
_ABANDONED_S = 24 * 3600.0
"""Seconds without a write after which a temporary folder is abandoned: no build takes a day."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One entry.

    Attributes:
        kind: the kind of the entry.
        key: its name.
        about: a description for users.
        n_bytes: the size of its files, in bytes.
        path: its folder.
    """

    kind: str
    key: str
    about: str
    n_bytes: int
    path: Path


def cache_root() -> Path:
    """The folder of the cache: ``SLM_CACHE_DIR``, or the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return option_path(CACHE_VARIABLE, named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("slm-core"))


def entries() -> list[CacheEntry]:
    """All valid entries, sorted by kind and name."""
    valid = []
    for manifest in sorted(cache_root().glob(f"*/*/{_MANIFEST}")):
        if manifest.parent.name.startswith(_TEMPORARY_PREFIX):
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            about = str(json.loads(manifest.read_text(encoding="utf-8"))["about"])
            n_bytes = sum(file.stat().st_size for file in manifest.parent.iterdir())
            valid.append(CacheEntry(manifest.parent.parent.name, manifest.parent.name, about, n_bytes, manifest.parent))
    return valid


def remove(entry: CacheEntry) -> None:
    """Remove an entry.

    Raises:
        InvalidOption: it cannot be removed.
    """
    try:
        shutil.rmtree(entry.path)
    except OSError as error:
        raise InvalidOption(f"cannot remove the cache entry {entry.path}: {error}") from error


def sweep() -> None:
    """Remove temporary folders of killed processes."""
    for folder in cache_root().glob(f"*/{_TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - written > _ABANDONED_S:
                shutil.rmtree(folder)


class DiskCache:
    """The entries of one kind.

    Args:
        kind: the name of their folder.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def get(self, key: str) -> Path | None:
        """The folder of an entry with unchanged files; None if there is none."""
        folder = cache_root() / self._kind / key
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            files = manifest["files"].items()
            if all(_is_unchanged(folder / name, *expected) for name, expected in files):
                return folder
            _log.warning("the cache entry %s is damaged: it is made again", folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("the cache entry %s cannot be read, and is made again: %s", folder, error)
        return None

    def put(self, key: str, about: str, make: Callable[[Path], None]) -> Path | None:
        """Build an entry and return its folder; None, with a warning, if it cannot be written.

        Args:
            key: its name.
            about: a description for users.
            make: writes files into an empty folder; its exceptions are raised, except ``OSError``.
        """
        try:
            with self._temporary_folder() as folder:
                make(folder)
                files = {file.name: _record(file) for file in folder.iterdir()}
                time.sleep(_TICK)  # later writes get another modification time
                (folder / _MANIFEST).write_text(json.dumps({"about": about, "files": files}), encoding="utf-8")
                target = cache_root() / self._kind / key
                if target.exists():
                    shutil.rmtree(target)
                folder.rename(target)
                return target
        except OSError as error:  # a full disk, a read-only one, another process that was faster
            _log.warning("nothing is kept in the cache %s: %s", cache_root(), error)
            return self.get(key)

    @contextlib.contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        parent = cache_root() / self._kind
        parent.mkdir(parents=True, exist_ok=True)
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_unchanged(file: Path, size: int, crc: int, changed: int) -> bool:
    """Whether a file is unchanged since ``_record``."""
    status = file.stat()
    return status.st_size == size and (status.st_mtime_ns == changed or _checksum(file) == crc)


def _record(file: Path) -> tuple[int, int, int]:
    """Size, checksum and modification time of a file, after flushing it to the disk."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
    status = file.stat()
    return status.st_size, _checksum(file), status.st_mtime_ns


def _checksum(file: Path) -> int:
    """CRC-32 detects damage, not malicious changes: a process that can write the cache can also write its manifest."""
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
