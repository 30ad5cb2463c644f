"""The disk tier of the prefix cache: written in the background, read if that is faster than computing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.closing import Closing
from slm_core.engine.restores import timed
from slm_core.engine.store import PrefixStore, StoredPrefix, dump_key
from slm_core.engine.write_behind import WriteBehind
from slm_core.errors import ContextFull, InvalidOption
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos

_WEIGHT = 0.5
"""The weight of the newest measurement in a running mean."""

_log = logging.getLogger(__name__)


class DiskTier(Closing):
    """Kept sequences on disk.

    Args:
        context: the context of the sequences.
        store: the dumps on disk.
        clock: a clock, in seconds.

    Attributes:
        behind: writes dumps in the background.
    """

    def __init__(self, context: Context, store: PrefixStore, clock: Callable[[], float] = time.perf_counter) -> None:
        self._context = context
        self._store = store
        self._clock = clock
        self._search_results: dict[int, StoredPrefix | None] = {}  # by request id, so that the index is searched once
        self._seconds_per_byte: float | None = None
        self.write_behind = WriteBehind(store, context.dump_parts)

    def find(self, request_id: int, tokens: NDArray[np.int32], salt: str) -> StoredPrefix | None:
        """The dump with the longest common prefix with the tokens of a request; None for none."""
        if request_id not in self._search_results:
            self._search_results[request_id] = self._store.find(tokens, salt)
        return self._search_results[request_id]

    def forget(self, request_id: int) -> None:
        """Forget the search result of a request that is over."""
        self._search_results.pop(request_id, None)

    def seconds(self, stored: StoredPrefix) -> float | None:
        """Expected seconds to read and restore a dump; None before the first dump was restored."""
        return None if self._seconds_per_byte is None else stored.n_bytes * self._seconds_per_byte

    def restore(self, stored: StoredPrefix, seq_id: int) -> Generator[None, None, int]:
        """The steps that fill an empty sequence with the common prefix of a dump and a prompt.

        The result is the number of tokens; 0 with a warning if the dump cannot be restored.
        """
        try:
            steps = self._context.restore_steps(seq_id, self._store.read(stored))
            seconds = (yield from timed(steps, self._clock)) / stored.n_bytes
            if stored.n_tokens > stored.n_shared:
                self._context.truncate(Pos(seq_id, stored.n_shared))
        except Exception as error:  # the prompt can be computed without the dump
            _log.warning("a prefix on disk is computed again: %s", error)
            if not isinstance(error, ContextFull):
                self._store.remove(stored)
            self._context.drop(seq_id)
            return 0
        mean = self._seconds_per_byte if self._seconds_per_byte is not None else seconds
        self._seconds_per_byte = (1 - _WEIGHT) * mean + _WEIGHT * seconds
        return stored.n_shared

    def advance(self, *, wait: bool) -> bool:
        """Dump one part of a sequence for the writer; returns whether there are more parts."""
        if self.write_behind.is_reading:
            try:
                self.write_behind.advance(wait=wait)
            except Exception as error:  # the sequence can be computed again without the dump
                _log.warning("a prefix is not written to disk: %s", error)
        return self.write_behind.is_reading

    def close(self) -> None:
        """Write all pending dumps, and close the index. A second call does nothing."""
        try:
            while self.advance(wait=True):
                pass
        finally:
            self.write_behind.close()
            self._store.close()


def disk_tier(context: Context, directory: Path, budget_bytes: int) -> DiskTier:
    """The disk tier in a directory, for an empty context.

    Raises:
        InvalidOption: the directory cannot be used, or dumps of this context contain no KV cache.
    """
    if Capability.KV_PAYLOAD not in context.capabilities:
        raise InvalidOption("cache_dir: dumps of this backend hold no keys and values (leave it out)")
    whole = context.edit_level < EditLevel.TRUNCATE
    return DiskTier(context, PrefixStore(directory, dump_key(context, 0), budget_bytes, whole=whole))
