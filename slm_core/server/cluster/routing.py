"""Chooses the replica for a request: the one with most of its prompt cached, unless others have less to do.

The rule is pure: it knows replicas by name, prompts as text, and its earlier choices. A prompt's tokens are counted in
characters here: only their share is needed, and the front has no vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

BLOCK = 64
"""Characters of a block, the unit in which prefixes are compared."""


class PrefixIndex:
    """The prefixes of prompts that replicas have computed lately, in blocks.

    A block is known by the hash of all text up to its end. A replica that has a block also has the blocks before it:
    blocks are forgotten from the end.

    Args:
        n_chars: the characters that a replica is expected to keep; the least recently used blocks are forgotten.
    """

    def __init__(self, n_chars: int) -> None:
        self._most_blocks = max(1, n_chars // BLOCK)
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}  # by replica, least recently used blocks first

    def add(self, replica: str, text: str) -> None:
        """Note that a replica computes a prompt."""
        known = self._blocks.setdefault(replica, OrderedDict())
        blocks = list(_hashes(text))[: self._most_blocks]
        for block in reversed(blocks):  # the last block becomes the least recently used one
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._most_blocks:
            known.popitem(last=False)

    def matched(self, replicas: Iterable[str], text: str) -> dict[str, float]:
        """The share of a prompt that each replica has computed: 0 to 1."""
        blocks = list(_hashes(text))
        return {replica: self._n_matched(replica, blocks) / max(1, len(blocks)) for replica in replicas}

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        self._blocks = {name: self._blocks[name] for name in replicas if name in self._blocks}

    def _n_matched(self, replica: str, blocks: list[bytes]) -> int:
        """The number of first blocks that a replica has, by bisection."""
        known = self._blocks.get(replica)
        if not known or not blocks or blocks[0] not in known:  # most replicas
            return 0
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low


class Routing:
    """Chooses a replica for each request, and counts the requests that each one has.

    The score of a replica is the share of the prompt that it has computed, less ``beta`` times its relative load: its
    requests over the mean of all replicas, or over ``n_parallel`` if the mean is less. So a replica that is chosen has
    at most the mean load plus ``max(mean, n_parallel) / beta`` requests, however many prompts begin alike.

    Args:
        n_parallel: the requests that a replica computes together.
        n_chars: the characters that a replica is expected to keep.
        beta: how much load counts; positive.
    """

    def __init__(self, n_parallel: int, n_chars: int, beta: float = 1.0) -> None:
        self._n_parallel = n_parallel
        self._beta = beta
        self._index = PrefixIndex(n_chars)
        self._loads: dict[str, int] = {}
        self._n_begun: dict[str, int] = {}

    @property
    def loads(self) -> Mapping[str, int]:
        """The requests of each replica that were routed and have not ended."""
        return self._loads

    def keep(self, replicas: Iterable[str]) -> None:
        """Set the present replicas. New replicas begin without requests."""
        self._loads = {name: self._loads.get(name, 0) for name in replicas}
        least = min((self._n_begun[name] for name in self._loads if name in self._n_begun), default=0)
        self._n_begun = {name: self._n_begun.get(name, least) for name in self._loads}
        self._index.keep(self._loads)

    def choose(self, text: str) -> str:
        """The replica for a prompt; among equally good replicas, the least often chosen one.

        Raises:
            ValueError: there are no replicas.
        """
        mean = sum(self._loads.values()) / max(1, len(self._loads))
        unit = max(mean, self._n_parallel)
        matched = self._index.matched(self._loads, text)

        def score(replica: str) -> tuple[float, int]:
            load = self._loads[replica]
            return matched[replica] - self._beta * load / unit, -self._n_begun[replica]

        return max(self._loads, key=score)

    def begin(self, replica: str, text: str) -> None:
        """Count a request that was routed to a replica."""
        if replica in self._loads:
            self._loads[replica] += 1
            self._n_begun[replica] += 1
            self._index.add(replica, text)

    def end(self, replica: str) -> None:
        """Count the end of a request."""
        if replica in self._loads:
            self._loads[replica] = max(0, self._loads[replica] - 1)


def _hashes(text: str) -> Iterator[bytes]:
    """For each whole block, the hash of the text up to its end; a shorter text is one block."""
    data = hashlib.blake2b(digest_size=16)
    for end in range(min(BLOCK, max(1, len(text))), len(text) + 1, BLOCK):
        data.update(text[max(0, end - BLOCK) : end].encode("utf-8", "surrogatepass"))
        yield data.digest()
