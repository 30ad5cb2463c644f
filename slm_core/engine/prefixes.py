"""Sequences of answered requests, kept for prompts that begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_SHARED = 8
"""Tokens of a common prefix that are worth a fork."""


class Match(NamedTuple):
    """The sequence that holds the longest common prefix, and its length; (None, 0) for none."""

    seq_id: int | None
    n_shared: int


NO_MATCH = Match(None, 0)


@dataclass(slots=True)
class _Kept:
    tokens: NDArray[np.int32]
    salt: str
    last_used: int


class PrefixCache:
    """The token histories that sequences hold, least recently used first out.

    A history is compared whole with each kept one: there are at most ``n_seq_max`` of them, and comparing 32,768 tokens
    takes about 10 microseconds. Requests of different salts share nothing.

    Args:
        whole: whether a history is of use only to prompts that begin with all of it: its sequence cannot be cut back.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._kept: dict[int, _Kept] = {}
        self._clock = 0

    def __len__(self) -> int:
        """Sequences that are kept."""
        return len(self._kept)

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is kept."""
        return seq_id in self._kept

    @property
    def seq_ids(self) -> Sequence[int]:
        """The sequences that are kept, least recently used first."""
        return sorted(self._kept, key=lambda seq_id: self._kept[seq_id].last_used)

    def keep(self, seq_id: int, tokens: NDArray[np.int32], salt: str) -> list[int]:
        """Keep a sequence; returns those that are of use for nothing that it is not, which are kept no longer."""
        covered = [
            other
            for other, kept in self._kept.items()
            if kept.salt == salt
            and n_common(kept.tokens, tokens) == len(kept.tokens)
            and (not self._whole or len(kept.tokens) == len(tokens))
        ]
        for other in covered:
            del self._kept[other]
        self._kept[seq_id] = _Kept(tokens, salt, self._tick())
        return covered

    def match(self, tokens: NDArray[np.int32], salt: str) -> Match:
        """The kept sequence that shares most with ``tokens``, short of the last one, whose logits are wanted."""
        of_salt = ((seq_id, kept.tokens) for seq_id, kept in self._kept.items() if kept.salt == salt)
        best = longest(of_salt, tokens, whole=self._whole)
        if best.seq_id is not None:
            self._kept[best.seq_id].last_used = self._tick()
        return best

    def forget(self, seq_id: int) -> None:
        """Keep a sequence no longer."""
        del self._kept[seq_id]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def longest(
    histories: Iterable[tuple[int, NDArray[np.int32]]], tokens: NDArray[np.int32], *, whole: bool = False
) -> Match:
    """The longest prefix of ``tokens`` without the last that a history begins with, if it is worth a fork.

    Args:
        histories: numbers and tokens.
        tokens: int32 [T].
        whole: whether the prefix has to be a whole history.
    """
    best = Match(None, LEAST_SHARED - 1)
    for seq_id, history in histories:
        n = min(n_common(history, tokens), len(tokens) - 1)
        if n > best.n_shared and (not whole or n == len(history)):
            best = Match(seq_id, n)
    return best if best.seq_id is not None else NO_MATCH


def n_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Tokens that both begin with."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
