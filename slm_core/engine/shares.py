"""Fair shares: the tokens that were computed for each key."""

from __future__ import annotations


class FairShares:
    """Counts the computed tokens of keys that have requests; the key with the fewest comes first.

    A key whose first request comes is lifted to the least served key that has requests, or if none has, to the key
    whose request ended last. So no key saves up tokens while it has no requests, and none pays for tokens that it was
    served while it was alone.

    Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._keys: dict[int, str] = {}  # of the requests that are not over
        self._floor = 0.0  # a key that comes has at least this

    def __len__(self) -> int:
        """The number of remembered keys: keys with requests, and keys with a higher count than all of these."""
        return len(self._served)

    def begin(self, request_id: int, key: str) -> None:
        """A request of a key has come."""
        if key not in self._keys.values():
            self._raise_floor()
            self._served[key] = max(self._served.get(key, 0.0), self._floor)
        self._keys[request_id] = key

    def end(self, request_id: int) -> None:
        """A request is over; without effect if it did not begin."""
        key = self._keys.pop(request_id, None)
        if key is None or key in self._keys.values():
            return
        if not self._keys:
            self._floor = self._served[key]
        self._raise_floor()
        running = set(self._keys.values())
        self._served = {key: n for key, n in self._served.items() if n > self._floor or key in running}

    def add(self, key: str, n_tokens: int) -> None:
        """Count tokens that were computed for a key."""
        self._served[key] += n_tokens

    def served(self, key: str) -> float:
        """The tokens of a key that has requests."""
        return self._served[key]

    def _raise_floor(self) -> None:
        self._floor = min((self._served[key] for key in self._keys.values()), default=self._floor)
