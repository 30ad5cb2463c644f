"""These tests run torch with one thread: idle torch threads spin, which takes cores from other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
