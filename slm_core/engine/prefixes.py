"""The prefix cache: token histories of answered requests, kept for later prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_SHARED = 8
"""The shortest common prefix that is worth a fork, in tokens."""
LEAST_AFTER_GAP = 32
"""The shortest common range after a gap that is worth a cut, in tokens."""


class Match(NamedTuple):
    """The sequence that holds the longest common prefix.

    Attributes:
        seq_id: the sequence; None if there is no match.
        n_shared: tokens of the prompt that it holds.
        gaps: ranges of its positions that the prompt lacks, in ascending order; they have to be cut.
    """

    seq_id: int | None
    n_shared: int
    gaps: tuple[tuple[int, int], ...] = ()


NO_MATCH = Match(None, 0)


@dataclass(slots=True)
class _Kept:
    tokens: NDArray[np.int32]
    salt: str
    last_used: int


class PrefixCache:
    """The token histories of kept sequences; eviction is least recently used first.

    A prompt is compared with each kept history: there are at most ``n_seq_max``, and comparing 32,768 tokens takes
    about 10 microseconds. Requests with different salts share nothing.

    Args:
        whole: whether a prompt must begin with the whole history to use it, because its sequence cannot be truncated.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._kept: dict[int, _Kept] = {}
        self._clock = 0

    def __len__(self) -> int:
        """The number of kept sequences."""
        return len(self._kept)

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is kept."""
        return seq_id in self._kept

    @property
    def seq_ids(self) -> Sequence[int]:
        """The kept sequences, least recently used first."""
        return sorted(self._kept, key=lambda seq_id: self._kept[seq_id].last_used)

    def keep(self, seq_id: int, tokens: NDArray[np.int32], salt: str) -> list[int]:
        """Keep a sequence; removes and returns the sequences that it makes redundant."""
        covered = [
            other
            for other, prefix in self._kept.items()
            if prefix.salt == salt
            and n_common(prefix.tokens, tokens) == len(prefix.tokens)
            and (not self._whole or len(prefix.tokens) == len(tokens))
        ]
        for other in covered:
            del self._kept[other]
        self._kept[seq_id] = _Kept(tokens, salt, self._tick())
        return covered

    def matches(self, tokens: NDArray[np.int32], salt: str) -> list[Match]:
        """Kept sequences with a common prefix, longest first. The last token never counts: its logits are needed."""
        of_salt = [(seq_id, prefix.tokens) for seq_id, prefix in self._kept.items() if prefix.salt == salt]
        shared = [Match(seq_id, min(n_common(history, tokens), len(tokens) - 1)) for seq_id, history in of_salt]
        return sorted((m for m in shared if m.n_shared >= LEAST_SHARED), key=lambda m: m.n_shared, reverse=True)

    def match_with_gaps(self, tokens: NDArray[np.int32], salt: str) -> Match:
        """The kept sequence that shares most with ``tokens`` after ranges of it are cut."""
        aligned = (self._with_gaps(match, tokens) for match in self.matches(tokens, salt))
        return max(aligned, key=lambda match: match.n_shared, default=NO_MATCH)

    def used(self, seq_id: int) -> None:
        """Mark a sequence as used now."""
        self._kept[seq_id].last_used = self._tick()

    def forget(self, seq_id: int) -> None:
        """Remove a sequence from the cache."""
        del self._kept[seq_id]

    def _with_gaps(self, match: Match, tokens: NDArray[np.int32]) -> Match:
        assert match.seq_id is not None
        gaps, n_shared = gaps_between(self._kept[match.seq_id].tokens, tokens, match.n_shared)
        return Match(match.seq_id, n_shared, gaps)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def n_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """The length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def gaps_between(
    history: NDArray[np.int32], tokens: NDArray[np.int32], n_shared: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Ranges to cut out of ``history`` so that it shares more of ``tokens`` than the common prefix.

    A gap ends at the position with the longest common range after it; at least ``LEAST_AFTER_GAP`` tokens must match.

    Args:
        history: the tokens of a history, int32 [T].
        tokens: a prompt, int32 [T]; its last token is ignored.
        n_shared: the length of the common prefix.

    Returns:
        Ranges of ``history``, ascending, and the number of tokens of the prompt that ``history`` contains without them.
    """
    gaps, offset, prompt = list[tuple[int, int]](), n_shared, tokens[:-1]
    while len(prompt) - n_shared >= LEAST_AFTER_GAP:
        follows = prompt[n_shared:]
        ends = _occurrences(follows[:LEAST_AFTER_GAP], history[offset:])
        if not ends:
            break
        end = max((offset + end for end in ends), key=lambda end: n_common(history[end:], follows))
        n_more = n_common(history[end:], follows)
        gaps.append((offset, end))
        offset, n_shared = end + n_more, n_shared + n_more
    return tuple(gaps), n_shared


def _occurrences(needle: NDArray[np.int32], tokens: NDArray[np.int32]) -> list[int]:
    """The offsets at which ``needle`` occurs in ``tokens``."""
    n_offsets = len(tokens) - len(needle) + 1
    if n_offsets <= 0:
        return []
    matches = np.ones(n_offsets, np.bool_)
    for i, token in enumerate(needle):
        matches &= tokens[i : i + n_offsets] == token
    return [int(offset) for offset in np.flatnonzero(matches)]
