"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from measured_engine import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.engine:
        yield bench
        bench.context.held = False
        bench.context.permits.release(1000)
