"""Streams of random numbers whose state is two integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

MASK64 = 2**64 - 1


class UniformStream:
    """Random numbers in [0, 1) that depend only on seed, stream and the number of draws.

    Args:
        seed: the seed.
        stream: the number of the stream.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self.start = split_mix(split_mix(seed & MASK64) ^ (stream & MASK64))
        self.n_draws = 0

    def take(self) -> float:
        """The next number."""
        self.n_draws += 1
        return _unit(self.start + self.n_draws)

    def aside(self) -> Callable[[], float]:
        """A second stream for the present number of draws; it does not advance this stream."""
        return _aside(self.start + self.n_draws).__next__


def split_mix(value: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): maps a 64-bit integer to a pseudorandom one.

    With it, the state of a stream is two integers (seed, counter), and numbers are the same on every machine.
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
