"""What is expensive to make and can be made again, on disk: one folder an entry.

An entry is made in a folder aside and renamed into place, and it carries the size, the time of the last change and the
checksum of each of its files: what is incomplete or damaged is not used, and made again. A file that nobody has written
to since is not read for its checksum: a gigabyte would take a second. Where nothing can be written, callers go on
without.
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

CACHE_VARIABLE = "SLM_CACHE_DIR"
_MANIFEST = "manifest.json"
_CHUNK = 1 << 22
_TICK = 0.02  # seconds; of the clocks that file systems take times from
_ASIDE = ".making-"
_ABANDONED_S = 24 * 3600.0
"""An entry that is being made and was not written to for so long has lost its maker: no build takes a day."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One entry.

    Attributes:
        kind: who made it.
        key: its name.
        about: what it is of, for people.
        n_bytes: of its files.
        path: its folder.
    """

    kind: str
    key: str
    about: str
    n_bytes: int
    path: Path


def cache_root() -> Path:
    """Where entries lie: ``SLM_CACHE_DIR``, or the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("slm-core"))


def entries() -> list[CacheEntry]:
    """Every sound entry of every kind, by kind and name."""
    sound = []
    for manifest in sorted(cache_root().glob(f"*/*/{_MANIFEST}")):
        if manifest.parent.name.startswith(_ASIDE):
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            about = str(json.loads(manifest.read_text())["about"])
            n_bytes = sum(file.stat().st_size for file in manifest.parent.iterdir())
            sound.append(CacheEntry(manifest.parent.parent.name, manifest.parent.name, about, n_bytes, manifest.parent))
    return sound


def remove(entry: CacheEntry) -> None:
    """Take an entry away.

    Raises:
        InvalidOption: the system does not let us.
    """
    try:
        shutil.rmtree(entry.path)
    except OSError as error:
        raise InvalidOption(f"cannot remove the cache entry {entry.path}: {error}") from error


def sweep() -> None:
    """Remove what processes that were killed left half made."""
    for folder in cache_root().glob(f"*/{_ASIDE}*"):
        with contextlib.suppress(OSError):
            written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - written > _ABANDONED_S:
                shutil.rmtree(folder)


class DiskCache:
    """The entries of one kind.

    Args:
        kind: a folder's name.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def get(self, key: str) -> Path | None:
        """The folder of an entry whose files are what they were when it was made; None where there is none."""
        folder = cache_root() / self._kind / key
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
            files = manifest["files"].items()
            if all(_is_sound(folder / name, *expected) for name, expected in files):
                return folder
            _log.warning("the cache entry %s is damaged: it is made again", folder)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("the cache entry %s cannot be read, and is made again: %s", folder, error)
        return None

    def put(self, key: str, about: str, make: Callable[[Path], None]) -> Path | None:
        """Make an entry; None, with a warning, where it cannot be written.

        Args:
            key: its name.
            about: what it is of, for people.
            make: fills an empty folder with files; what it raises is raised, an ``OSError`` excepted.
        """
        try:
            with self._aside() as folder:
                make(folder)
                files = {file.name: _record(file) for file in folder.iterdir()}
                time.sleep(_TICK)  # whoever writes from now on leaves another time
                (folder / _MANIFEST).write_text(json.dumps({"about": about, "files": files}))
                target = cache_root() / self._kind / key
                if target.exists():
                    shutil.rmtree(target)
                folder.rename(target)
                return target
        except OSError as error:  # a full disk, a read-only one, another process that was faster
            _log.warning("nothing is kept in the cache %s: %s", cache_root(), error)
            return self.get(key)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[Path]:
        parent = cache_root() / self._kind
        parent.mkdir(parents=True, exist_ok=True)
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_sound(file: Path, size: int, crc: int, changed: int) -> bool:
    """Whether a file is what ``_record`` found."""
    status = file.stat()
    return status.st_size == size and (status.st_mtime_ns == changed or _checksum(file) == crc)


def _record(file: Path) -> tuple[int, int, int]:
    """Size, checksum and time of the last change of a file, once it is safe from a loss of power."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
    status = file.stat()
    return status.st_size, _checksum(file), status.st_mtime_ns


def _checksum(file: Path) -> int:
    """CRC-32: against damage, not against malice; whoever can write the cache can write its manifest."""
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
