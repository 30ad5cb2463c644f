"""The generator of hostile dumps: its output depends only on its arguments."""

from __future__ import annotations

from slm_conformance.suite.hostile import hostile_dumps
from slm_core.container import pack


def test_a_seed_gives_the_same_dumps_in_any_order() -> None:
    """Values inserted and changed in one header must not be in the next header, nor contain themselves."""
    sound = pack("sequence", {"edits": [], "backend": "toy"}, [b"12345678", b"", b"abcd"])
    first = list(hostile_dumps([sound], 3000, seed=5))
    for seed in range(5):
        list(hostile_dumps([sound], 2000, seed=seed))
    assert list(hostile_dumps([sound], 3000, seed=5)) == first
