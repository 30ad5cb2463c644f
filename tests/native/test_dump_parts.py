"""Memory of a dump in parts: a few parts, for a sequence of any length."""

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
MAX_PEAK = 3.5 * PART_BYTES
"""The caller's part, two copies of the next part while it is assembled, and buffers of 1 MiB."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Tiny weights with a KV cache of 112 KiB per token, the size of a model of 0.6 billion parameters."""
    shapes = dict(factories.SHAPES)
    factories.SHAPES["qwen3"] = ModelShape("qwen3", 28, 64, 96, 16, 8, 128, 1e6, 1e-6, tied=True)
    try:
        path = make_tiny_model("qwen3", "f16").write(tmp_path_factory.mktemp("wide") / "wide.gguf")
    finally:
        factories.SHAPES.update(shapes)
    with NativeBackend().load(path, ModelOptions()) as model:
        yield model


def peak_of(call: Callable[[], object]) -> int:
    """The peak of bytes that a call allocates."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_a_dump_in_parts_takes_a_few_parts_of_memory(model, tmp_path):
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

        assert peak_of(write) < MAX_PEAK
        assert path.stat().st_size > 9 * PART_BYTES
        assert peak_of(read) < MAX_PEAK
        assert peak_of(read) < MAX_PEAK, "restoring over a sequence takes more, although there is room for both"
        data = path.read_bytes()
        assert other.dump(1) == context.dump(0) == data
        assert peak_of(lambda: other.restore(0, data)) < MAX_PEAK, "restore copies the bytes of the dump"
        assert other.tokens(0) == other.tokens(1) == context.tokens(0)


@pytest.mark.parametrize("seed", range(6))
def test_a_restored_context_shares_pages_as_before(tmp_path, seed):
    """After random forks, cuts and truncations: each sequence has the same dump, and as many positions are free."""
    rng = np.random.default_rng(seed)
    path = make_tiny_model("llama", "f32").write(tmp_path / "m.gguf")
    options = ContextOptions(700, 5, 128, KvType.F16, KvType.F16)
    with NativeBackend().load(path, ModelOptions()) as model, model.new_context(options) as context:
        for _ in range(30):
            seq_id = int(rng.integers(5))
            length = context.length(seq_id)
            cut_points = sorted(rng.integers(length + 1, size=2).tolist())
            empty = [i for i in range(5) if not context.length(i)]
            match int(rng.integers(5)):
                case 0 | 1 if context.n_free > 100:
                    batch = context.new_batch()
                    batch.extend(rng.integers(200, size=int(rng.integers(1, 90))), Pos(seq_id, length))
                    context.decode(batch)
                case 2 if empty and length:
                    context.fork(seq_id, empty[0], cut_points[1])
                case 3 if context.n_free > 200:
                    context.cut(Pos(seq_id, cut_points[0]), Pos(seq_id, cut_points[1]))
                case 4:
                    context.truncate(Pos(seq_id, cut_points[1]))
        with model.new_context(options) as other:
            other.restore_context(context.dump_context(1000))
            assert other.n_free == context.n_free
            for seq_id in range(5):
                assert other.dump(seq_id) == context.dump(seq_id)
                assert other.n_exclusive(seq_id) == context.n_exclusive(seq_id)
