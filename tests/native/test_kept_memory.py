"""Memory of large arrays that is taken again: never while somebody holds it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slm_native import _extension

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

N = 1 << 16  # numbers of an array: more than are taken from the heap


def large(n_tokens: int, number: float) -> np.ndarray:
    """An array [1, n_tokens, N] of one number, which C++ has made: x times 1."""
    x = np.full((1, n_tokens, N), number, np.float32)
    projected = np.concatenate([x, np.ones_like(x), np.ones_like(x)], axis=2)
    native = _extension.load().StateKernels("scalar", 1)
    y, _ = native.gated_convolution(projected, np.zeros((1, 0, N), np.float32), np.ones((1, N), np.float32))
    return y


def test_memory_is_taken_again_once_it_is_free() -> None:
    places = set()
    for number in range(20):
        y = large(2, number)
        assert (y == number).all()
        places.add(y.ctypes.data)
        del y
    assert len(places) < 10


def test_arrays_that_are_held_keep_their_numbers() -> None:
    """Of arrays of many sizes every second one is let go of at once, and all views but of what is left."""
    held = {}
    for number in range(40):
        y = large(1 + number % 3, number)
        if number % 2:
            held[number] = y[:, -1]
    for number in range(100, 120):
        large(1 + number % 3, number)
    for number, y in held.items():
        assert (y == number).all(), f"the array of {number} was written on"


def test_threads_do_not_share_arrays() -> None:
    def run(number: int) -> bool:
        return all((large(1, number + 10 * i) == number + 10 * i).all() for i in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(4)))
