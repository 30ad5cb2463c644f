"""Prefixes on disk: dumps of sequences for later prompts with the same prefix, in this process and in later ones.

Each dump is one file, which is written, renamed into place, and then entered into the index, an SQLite database in the
same directory. So every dump in the index is complete, even after a crash. Each dump contains a checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.atomic_write import atomic_file
from slm_core.closing import Closing
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.engine.prefixes import LEAST_SHARED, n_common
from slm_core.errors import InvalidOption
from slm_core.protocols import Context

_INDEX = "index.sqlite"
PART_BYTES = 1 << 20
"""Bytes of a part that is restored: it takes a few milliseconds, and other requests are decoded between parts."""
_ORPHAN_S = 3600.0
"""Seconds without a write after which a file that is not in the index is removed: its writer is dead."""
_SCHEMA = """
create table if not exists prefixes (
    file text primary key, model text not null, salt text not null, head blob not null, tokens blob not null,
    n_bytes integer not null, used real not null);
create index if not exists by_head on prefixes (model, salt, head);
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A dump on disk.

    Attributes:
        file: the name of the file.
        n_tokens: tokens of the dump.
        n_shared: the length of the common prefix with the prompt, in tokens.
        n_bytes: the size of the file, in bytes.
    """

    file: str
    n_tokens: int
    n_shared: int
    n_bytes: int


class PrefixStore(Closing):
    """A directory of dumps with a budget in bytes; eviction is least recently used first. Threads may share it.

    Processes may share a directory. A dump that cannot be read or written gives a warning, not an error, because
    prefixes can be computed again.

    Args:
        directory: created if it does not exist, readable only by this user.
        model: the model, engine and layout of dumps; see ``dump_key``.
        budget_bytes: the largest number of bytes of all dumps in the directory, including dumps of other models.
        whole: whether a prompt must begin with all tokens of a dump to use it, because its sequence cannot be
            truncated.

    Raises:
        InvalidOption: the directory cannot be used.
    """

    def __init__(self, directory: Path, model: str, budget_bytes: int, *, whole: bool = False) -> None:
        self._directory = directory
        self._model = model
        self._budget = budget_bytes
        self._whole = whole
        self._lock = threading.Lock()
        index: sqlite3.Connection | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            index = sqlite3.connect(directory / _INDEX, timeout=30, check_same_thread=False, isolation_level=None)
            index.executescript(_SCHEMA)
            self._index = index
            self._clean()
        except (OSError, sqlite3.Error) as error:
            if index is not None:
                index.close()
            raise InvalidOption(f"the directory {directory} cannot hold prefixes: {error}") from error

    @property
    def n_bytes(self) -> int:
        """The size of all dumps, in bytes."""
        with self._lock:
            return self._total()

    def find(self, tokens: NDArray[np.int32], salt: str) -> StoredPrefix | None:
        """The dump with the longest common prefix; None for none. The last token of ``tokens`` never counts."""
        if len(tokens) <= LEAST_SHARED:
            return None
        best = None
        with self._lock, self._reported("find"):
            rows = self._index.execute(
                "select file, tokens, n_bytes from prefixes where model = ? and salt = ? and head = ?",
                (self._model, _digest(salt), _head(tokens)),
            ).fetchall()
            for file, blob, n_bytes in rows:
                history = np.frombuffer(blob, "<i4")
                n_shared = min(n_common(history, tokens), len(tokens) - 1)
                useful = not self._whole or n_shared == len(history)
                if useful and (best is None or (n_shared, -len(history)) > (best.n_shared, -best.n_tokens)):
                    best = StoredPrefix(file, len(history), n_shared, n_bytes)
        return best

    def read(self, stored: StoredPrefix) -> Iterator[bytes]:
        """The parts of a dump.

        Raises:
            OSError: a part cannot be read.
        """
        with self._lock, self._reported("mark as used"):
            self._index.execute("update prefixes set used = ? where file = ?", (time.time(), stored.file))
        with (self._directory / stored.file).open("rb") as file:
            while part := file.read(PART_BYTES):
                yield part

    def remove(self, stored: StoredPrefix) -> None:
        """Remove a dump, for example a damaged one."""
        with self._lock, self._reported("remove"):
            self._remove(stored.file)

    def add(self, tokens: NDArray[np.int32], salt: str, parts: Iterable[bytes]) -> bool:
        """Write the dump of a sequence with the tokens ``tokens``; returns whether it is on disk now.

        If ``parts`` raises, nothing is written.
        """
        if len(tokens) < LEAST_SHARED:
            return False
        file = f"{secrets.token_hex(16)}.dump"
        with self._reported("write"):
            n_bytes = 0
            with atomic_file(self._directory / file, mode=0o600) as out:
                for part in parts:
                    n_bytes += len(part)
                    if n_bytes > self._budget:
                        raise OSError(f"it takes more than the {self._budget:,} bytes that all prefixes may take")
                    self._make_room(n_bytes)
                    out.write(part)
            self._enter(file, tokens, salt, n_bytes)
            return True
        return False

    def close(self) -> None:
        """Close the index. A second call does nothing."""
        with self._lock:
            self._index.close()

    def _enter(self, file: str, tokens: NDArray[np.int32], salt: str, n_bytes: int) -> None:
        row = (file, self._model, _digest(salt), _head(tokens), tokens.astype("<i4").tobytes(), n_bytes, time.time())
        with self._lock:
            covered = self._covered(tokens, salt)
            self._index.execute("insert into prefixes values (?, ?, ?, ?, ?, ?, ?)", row)
            for other in covered:
                self._remove(other)
            while self._total() > self._budget:
                self._remove(self._oldest())

    def _covered(self, tokens: NDArray[np.int32], salt: str) -> list[str]:
        """The files of dumps that a dump of ``tokens`` makes redundant."""
        rows = self._index.execute(
            "select file, tokens from prefixes where model = ? and salt = ? and head = ?",
            (self._model, _digest(salt), _head(tokens)),
        )
        histories = [(file, np.frombuffer(blob, "<i4")) for file, blob in rows]
        return [
            file
            for file, history in histories
            if n_common(history, tokens) == len(history) and (not self._whole or len(history) == len(tokens))
        ]

    def _make_room(self, n_bytes: int) -> None:
        with self._lock:
            while self._total() + n_bytes > self._budget:
                self._remove(self._oldest())

    def _total(self) -> int:
        return int(self._index.execute("select coalesce(sum(n_bytes), 0) from prefixes").fetchone()[0])

    def _oldest(self) -> str:
        return str(self._index.execute("select file from prefixes order by used limit 1").fetchone()[0])

    def _remove(self, file: str) -> None:
        self._index.execute("delete from prefixes where file = ?", (file,))
        (self._directory / file).unlink(missing_ok=True)

    def _clean(self) -> None:
        """Remove index entries without a file, and abandoned files without an index entry."""
        indexed = {file for (file,) in self._index.execute("select file from prefixes")}
        files = {path.name: path for path in self._directory.iterdir() if path.name.endswith((".dump", ".part"))}
        for file in indexed - set(files):
            self._index.execute("delete from prefixes where file = ?", (file,))
        for name in set(files) - indexed:
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                if time.time() - files[name].stat().st_mtime > _ORPHAN_S:
                    files[name].unlink()

    @contextlib.contextmanager
    def _reported(self, action: str) -> Iterator[None]:
        """Log errors of the file system and of SQLite as warnings."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            _log.warning("cannot %s a prefix in %s: %s", action, self._directory, error)


def dump_key(context: Context, empty: int) -> str:
    """The key of dumps that this context can restore without decoding: model, engine and layout.

    Args:
        context: the context.
        empty: an empty sequence of the context.
    """
    snapshot = SequenceSnapshot.from_bytes(context.dump(empty))
    return f"{snapshot.fingerprint} {snapshot.backend} {snapshot.payload_format}"


def _head(tokens: NDArray[np.int32]) -> bytes:
    return tokens[:LEAST_SHARED].astype("<i4").tobytes()


def _digest(salt: str) -> str:
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
