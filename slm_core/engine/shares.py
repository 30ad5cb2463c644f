"""Fair shares: the tokens that were computed for each key."""

from __future__ import annotations


class FairShares:
    """Counts the computed tokens of keys that have requests; the key with the fewest comes first.

    When a key without requests gets a request, its count is raised to the lowest count of the keys with requests. If no
    key has requests, it is raised to the count of the key whose request ended last. So no key saves up tokens while it
    has no requests, and no key pays for tokens that it got while it was alone.

    Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._keys: dict[int, str] = {}  # by request id, of the requests that are not over
        self._floor = 0.0  # the lowest count of a key that gets its first request

    def __len__(self) -> int:
        """The number of remembered keys: keys with requests, and keys with a higher count than all of these."""
        return len(self._served)

    def begin(self, request_id: int, key: str) -> None:
        """Record a new request of a key."""
        if key not in self._keys.values():
            self._raise_floor()
            self._served[key] = max(self._served.get(key, 0.0), self._floor)
        self._keys[request_id] = key

    def end(self, request_id: int) -> None:
        """Record that a request is over; without effect if it did not begin."""
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
