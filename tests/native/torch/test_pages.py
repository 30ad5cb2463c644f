"""KV pages in torch against those in NumPy: the same bytes after any operation."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.context.payload import SectionWriter
from slm_core.errors import InvalidOption
from slm_native.kv import HostPageStore, PagedKvCache, PageLayout, codec_of

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.torch import pages as torch_pages  # noqa: E402
from slm_native.kernels.torch.codecs import device_codec  # noqa: E402
from slm_native.kernels.torch.pages import TorchPageStore, place  # noqa: E402

CPU = torch.device("cpu")
KV_TYPES = ["f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0", "f8_e4m3"]


def new_store(layout, n_pages):
    return TorchPageStore(layout, n_pages, CPU)


def double_keys(keys, delta: int, blocks):
    """A stand-in for RoPE that is exact in every KV type."""
    return keys * 2


def layout(keys: str, values: str) -> PageLayout:
    return PageLayout(range(2), 3, 64, codec_of(keys, 64), codec_of(values, 64))


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_codecs_write_the_same_bits(kv_type):
    x = np.random.default_rng(1).standard_normal((5, 3, 64)).astype(np.float32)
    x[0, 0, :32], x[1, 1, 5], x[2, 0, 40] = 0, 1e6, -3e-8  # a block of zeros; above the range of f16; subnormal in f16
    x[3, 0, :32] *= 1e-35
    x[4, 0] = np.ldexp(x[4, 0], np.random.default_rng(2).integers(-20, 12, 64))  # all exponents of f8_e4m3
    x[4, 1, :4] = 500, -1e9, 464.1, 2.0**-10  # above the range of f8_e4m3; a tie below its smallest number
    x[4, 2, 3], x[4, 2, 5] = 3, -3  # equal magnitudes with different signs: the first one sets the scale
    host = codec_of(kv_type, 64)
    device = device_codec(host)
    expected, actual = host.encode(x), device.encode(torch.from_numpy(x.copy()))
    for actual_plane, expected_plane in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(actual_plane.numpy().view(expected_plane.dtype), expected_plane)
    np.testing.assert_array_equal(device.decode(actual).numpy(), host.decode(expected))


@pytest.mark.parametrize(
    ("keys", "values"), [*zip(KV_TYPES, KV_TYPES[1:] + KV_TYPES[:1], strict=True), ("q8_0", "q8_0")]
)
def test_edits_leave_the_same_bytes(keys, values):
    """Writes, a fork, cuts in shared and exclusive pages, dumps and restores: payloads stay equal."""
    caches = [
        PagedKvCache([layout(keys, values)], PagedKvCache.n_pages_for(512, 3), 3, new)
        for new in (HostPageStore, new_store)
    ]
    arrays = (np.asarray, lambda x: torch.from_numpy(np.array(x)))
    rng, length = np.random.default_rng(2), 0
    for n_tokens in (100, 1, 39):
        k, v = (rng.standard_normal((2, n_tokens, 3, 64)).astype(np.float32) for _ in range(2))
        for cache, array in zip(caches, arrays, strict=True):
            plan = cache.plan(np.zeros(n_tokens, np.int32), np.arange(length, length + n_tokens, dtype=np.int32))
            placed = plan if array is np.asarray else place(plan)
            for i, layer in enumerate(cache.layers):
                layer.write(placed.pages, placed.slots, array(k[i]), array(v[i]))
            cache.commit(plan)
        length += n_tokens
    for cache in caches:
        cache.fork(0, 1, 130)
        cache.cut(
            0, 10, 75, length, lambda keys, delta, blocks: keys * 2
        )  # a stand-in for RoPE that is exact in every KV type
        cache.cut(1, 3, 5, 130, lambda keys, delta, blocks: keys * 2)
    payloads = [[b"".join(cache.export(*held)) for held in ((0, length - 65), (1, 128))] for cache in caches]
    assert payloads[0] == payloads[1]
    for cache, other in zip(caches, reversed(payloads), strict=True):
        pages = cache.free(128)
        SectionWriter(cache.sections(pages, 128)).write(memoryview(other[1]))
        cache.put(2, pages, 0)
        assert b"".join(cache.export(2, 128)) == other[1]


def test_reads_equal_those_of_numpy():
    """torch reads a group of page tables at once, NumPy one table at a time."""
    page_layout = layout("q8_0", "f16")
    stores = [new(page_layout, 7) for new in (HostPageStore, new_store)]
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((448, 3, 64)).astype(np.float32) for _ in range(2))
    pages, slots = np.repeat(np.arange(7), 64), np.tile(np.arange(64), 7)
    stores[0].layers[1].write(pages, slots, k, v)
    stores[1].layers[1].write(*(torch.from_numpy(each) for each in (pages, slots, k, v)))
    tables = np.array([[3, 1, 0], [6, 2, 5]])
    for read in ("keys", "values"):
        expected = [getattr(stores[0].layers[1], read)(table, 150) for table in tables]
        actual = getattr(stores[1].layers[1], read)(torch.from_numpy(tables), 150)
        np.testing.assert_array_equal(actual.numpy(), np.stack(expected))


def test_caches_beyond_free_memory_are_refused_with_sizes(monkeypatch):
    page_layout = layout("f32", "f32")
    monkeypatch.setattr(torch_pages, "memory", lambda device: (1 << 20, 1 << 30))
    with pytest.raises(InvalidOption, match=r"a KV cache of 37 MiB is more than the 1 MiB that are free on cpu"):
        new_store(page_layout, 200)
    monkeypatch.setattr(torch_pages, "memory", lambda device: (None, None))
    with pytest.raises(InvalidOption, match="more than this machine can reserve: use a smaller n_ctx"):
        new_store(page_layout, 1 << 50)
