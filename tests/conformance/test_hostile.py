"""The generator of hostile dumps: what it makes depends on its arguments only."""

from __future__ import annotations

from slm_conformance.suite.hostile import hostile_dumps
from slm_core.container import pack


def test_the_same_seed_makes_the_same_dumps_whatever_was_made_before() -> None:
    """Values that were put into one header and changed there must not be in the next one, nor in themselves."""
    sound = pack("sequence", {"edits": [], "backend": "toy"}, [b"12345678", b"", b"abcd"])
    first = list(hostile_dumps([sound], 3000, seed=5))
    for seed in range(5):
        list(hostile_dumps([sound], 2000, seed=seed))
    assert list(hostile_dumps([sound], 3000, seed=5)) == first
