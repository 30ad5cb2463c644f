"""What is expensive to make and can be made again, on disk: one folder an entry.

An entry is made in a folder aside and renamed into place, and it carries the size and checksum of each of its files:
what is incomplete or damaged is not used, and made again. Where nothing can be written, callers go on without.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slm_core.errors import InvalidOption

CACHE_VARIABLE = "SLM_CACHE_DIR"
_MANIFEST = "manifest.json"
_CHUNK = 1 << 22
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
    found = []
    for manifest in sorted(cache_root().glob(f"*/*/{_MANIFEST}")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            about = str(json.loads(manifest.read_text())["about"])
            n_bytes = sum(file.stat().st_size for file in manifest.parent.iterdir())
            found.append(CacheEntry(manifest.parent.parent.name, manifest.parent.name, about, n_bytes, manifest.parent))
    return found


def remove(entry: CacheEntry) -> None:
    """Take an entry away.

    Raises:
        InvalidOption: the system does not let us.
    """
    try:
        shutil.rmtree(entry.path)
    except OSError as error:
        raise InvalidOption(f"cannot remove the cache entry {entry.path}: {error}") from error


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
            if all(_checksum(folder / name) == tuple(expected) for name, expected in files):
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
                files = {file.name: _checksum(file) for file in folder.iterdir()}
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
        folder = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32: against damage, not against malice; whoever can write the cache can write its manifest."""
    crc = size = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return size, crc
