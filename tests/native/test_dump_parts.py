"""What a dump in parts takes: a few parts of memory, however long the sequence is."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from slm_conformance.oracle import factories
from slm_conformance.oracle.factories import ModelShape, make_tiny_model
from slm_core.container import PART_BYTES
from slm_core.types import ContextOptions, KvType, ModelOptions, Pos
from slm_native.backend import NativeBackend

N = 700
MOST = 3.5 * PART_BYTES
"""The part that the caller has, the next one twice while it is put together, and pieces of 1 MiB on the way."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights of no size, and keys and values of 112 KiB a token, as a model of 0.6 billion parameters has."""
    shapes = dict(factories.SHAPES)
    factories.SHAPES["qwen3"] = ModelShape("qwen3", 28, 64, 96, 16, 8, 128, 1e6, 1e-6, tied=True)
    try:
        path = make_tiny_model("qwen3", "f16").write(tmp_path_factory.mktemp("wide") / "wide.gguf")
    finally:
        factories.SHAPES.update(shapes)
    with NativeBackend().load(path, ModelOptions()) as model:
        yield model


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that a call takes at once, besides what it leaves."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_parts_take_a_few_parts_of_memory(model, tmp_path):
    options = ContextOptions(2 * N, 2, 256, KvType.F16, KvType.F16)
    with model.new_context(options) as context, model.new_context(options) as other:
        for first in range(0, N, 256):
            batch = context.new_batch()
            batch.extend(np.arange(min(256, N - first)) % 200, Pos(0, first))
            context.decode(batch)
        path = tmp_path / "dump"

        def write() -> None:
            with path.open("wb") as file:
                file.writelines(context.dump_parts(0))

        def read() -> None:
            with path.open("rb") as file:
                other.restore_parts(1, iter(lambda: file.read(PART_BYTES), b""))

        assert peak_of(write) < MOST
        assert path.stat().st_size > 9 * PART_BYTES
        assert peak_of(read) < MOST
        assert peak_of(read) < MOST, "over what the sequence holds, where there is room for both"
        data = path.read_bytes()
        assert other.dump(1) == context.dump(0) == data
        assert peak_of(lambda: other.restore(0, data)) < MOST, "the bytes of a dump are not copied"
        assert other.tokens(0) == other.tokens(1) == context.tokens(0)
