"""The disk as a second tier of the prefix cache: written behind, read where that is sooner than computing."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.closing import Closing
from slm_core.engine.store import PrefixStore, StoredPrefix, dump_key
from slm_core.engine.write_behind import WriteBehind
from slm_core.errors import InvalidOption
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos

_WEIGHT = 0.5
"""Of the newest measurement in a running mean."""

_log = logging.getLogger(__name__)


class DiskTier(Closing):
    """Kept sequences on disk.

    Args:
        context: whose sequences they are.
        store: the directory.

    Attributes:
        behind: writes them.
    """

    def __init__(self, context: Context, store: PrefixStore) -> None:
        self._context = context
        self._store = store
        self._found: dict[int, StoredPrefix | None] = {}  # by request id: the disk is asked once
        self._seconds_per_byte: float | None = None
        self.behind = WriteBehind(store, context.dump_parts)

    def find(self, request_id: int, tokens: NDArray[np.int32], salt: str) -> StoredPrefix | None:
        """The dump that shares most with the tokens of a request."""
        if request_id not in self._found:
            self._found[request_id] = self._store.find(tokens, salt)
        return self._found[request_id]

    def forget(self, request_id: int) -> None:
        """A request is over."""
        self._found.pop(request_id, None)

    def seconds(self, stored: StoredPrefix) -> float | None:
        """What reading and restoring a dump will take; None before the first one."""
        return None if self._seconds_per_byte is None else stored.n_bytes * self._seconds_per_byte

    def restore(self, stored: StoredPrefix, seq_id: int) -> int:
        """Fill an empty sequence with what a dump has in common with a prompt.

        Returns the number of tokens; 0 where the dump cannot be read, which is reported.
        """
        started = time.perf_counter()
        try:
            self._context.restore_parts(seq_id, self._store.read(stored))
            if stored.n_tokens > stored.n_shared:
                self._context.truncate(Pos(seq_id, stored.n_shared))
        except Exception as error:  # the prompt can be computed, whatever the engine makes of the dump
            _log.warning("a prefix on disk is computed again: %s", error)
            self._store.remove(stored)
            self._context.drop(seq_id)
            return 0
        seconds = (time.perf_counter() - started) / stored.n_bytes
        before = self._seconds_per_byte if self._seconds_per_byte is not None else seconds
        self._seconds_per_byte = (1 - _WEIGHT) * before + _WEIGHT * seconds
        return stored.n_shared

    def advance(self, *, wait: bool) -> bool:
        """Read a part of what is to be written; returns whether there is more."""
        if self.behind.is_reading:
            try:
                self.behind.advance(wait=wait)
            except Exception as error:  # what is kept can be computed again, whatever the engine makes of a dump
                _log.warning("a prefix is not written to disk: %s", error)
        return self.behind.is_reading

    def close(self) -> None:
        """Write what is to be written, and close the index. Twice is fine."""
        while self.advance(wait=True):
            pass
        self.behind.close()
        self._store.close()


def disk_tier(context: Context, directory: Path, budget_bytes: int) -> DiskTier:
    """A tier in a directory, for an empty context.

    Raises:
        InvalidOption: the directory cannot be used, or dumps of this context hold no keys and values.
    """
    if Capability.KV_PAYLOAD not in context.capabilities:
        raise InvalidOption("cache_dir: dumps of this backend hold no keys and values (leave it out)")
    whole = context.edit_level < EditLevel.TRUNCATE
    return DiskTier(context, PrefixStore(directory, dump_key(context, 0), budget_bytes, whole=whole))
