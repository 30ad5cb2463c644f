"""The buffer pool of large arrays: a buffer is reused only after all its views are gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slm_native import _extension

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

N = 1 << 16  # numbers per row: large enough for the buffer pool


def large_array(n_tokens: int, number: float) -> np.ndarray:
    """An array [1, n_tokens, N] filled with one number, allocated by C++: the convolution multiplies x by 1."""
    x = np.full((1, n_tokens, N), number, np.float32)
    projected = np.concatenate([x, np.ones_like(x), np.ones_like(x)], axis=2)
    native = _extension.load().StateKernels("scalar", 1)
    y, _ = native.gated_convolution(projected, np.zeros((1, 0, N), np.float32), np.ones((1, N), np.float32))
    return y


def test_free_buffers_are_reused() -> None:
    addresses = set()
    for number in range(20):
        y = large_array(2, number)
        assert (y == number).all()
        addresses.add(y.ctypes.data)
        del y
    assert len(addresses) < 10


def test_buffers_with_live_views_are_not_reused() -> None:
    """Arrays of three sizes: half of them are freed at once, the others are kept alive by a view of their last row."""
    views = {}
    for number in range(40):
        y = large_array(1 + number % 3, number)
        if number % 2:
            views[number] = y[:, -1]
    for number in range(100, 120):
        large_array(1 + number % 3, number)
    for number, y in views.items():
        assert (y == number).all(), f"the array of {number} was overwritten"


def test_threads_do_not_share_arrays() -> None:
    def run(number: int) -> bool:
        return all((large_array(1, number + 10 * i) == number + 10 * i).all() for i in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(4)))
