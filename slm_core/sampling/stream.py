"""Streams of random numbers whose state is two integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

MASK64 = 2**64 - 1


class UniformStream:
    """Random numbers in [0, 1), a function of the seed and of the number of draws.

    Args:
        seed: of a family of streams.
        stream: chooses one of the family.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self.start = split_mix(split_mix(seed & MASK64) ^ (stream & MASK64))
        self.n_draws = 0

    def take(self) -> float:
        """The next number."""
        self.n_draws += 1
        return _unit(self.start + self.n_draws)

    def aside(self) -> Callable[[], float]:
        """Numbers of a second stream, which depends on the number of draws; draws none itself."""
        return _aside(self.start + self.n_draws).__next__


def split_mix(value: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): a 64-bit integer to one that looks random.

    As a function of (seed, counter) it makes the state of a stream two integers, the same on every machine.
    """
    z = (value * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def _aside(start: int) -> Iterator[float]:
    offset = split_mix(start)
    for i in itertools.count(1):
        yield _unit(offset + i)


def _unit(value: int) -> float:
    return (split_mix(value) >> 11) / 2**53
