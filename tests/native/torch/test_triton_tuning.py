"""Launch configurations of kernels: all give the same product; the tuner picks the fastest and caches it on disk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from slm_core import diskcache
from slm_core.gguf import GgmlType

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
pytest.importorskip("triton", reason="kernels for CUDA are tested in Triton's interpreter: pip install triton")

from triton.runtime.errors import OutOfResources  # noqa: E402

from slm_core.quant import QuantizedTensor, dequantize  # noqa: E402
from slm_native.kernels.torch.triton import kernels as triton_kernels  # noqa: E402
from slm_native.kernels.torch.triton import products, tuning  # noqa: E402
from slm_native.kernels.torch.triton.formats import packed_format  # noqa: E402
from slm_native.kernels.torch.triton.kernels import TritonKernels  # noqa: E402
from slm_native.kernels.torch.triton.tuning import Tuner  # noqa: E402
from slm_native.profile import Profile  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(diskcache.CACHE_VARIABLE, str(tmp_path / "cache"))


@dataclass(frozen=True)
class Way:
    seconds: float
    name: str = ""


class Stopwatch:
    """Records calls; the measured time of a call is the one that its configuration names."""

    def __init__(self) -> None:
        self.calls: list[Way] = []

    def run(self, way: Way) -> None:
        self.calls.append(way)
        if way.seconds < 0:
            raise OutOfResources(2, 1, "shared memory")

    def measure(self, call) -> float:
        call()
        return self.calls[-1].seconds


WAYS = [Way(3.0), Way(-1.0), Way(1.0, "b"), Way(2.0)]


def test_the_fastest_way_is_measured_once_and_cached():
    watch = Stopwatch()
    tuner = Tuner(CPU, watch.measure)
    for _ in range(2):
        assert tuner.way("k 4 x 5", WAYS, watch.run) == Way(1.0, "b")
    assert watch.calls == WAYS, "each way is measured once"
    assert Tuner(CPU, watch.measure).way("k 4 x 5", WAYS, watch.run) == Way(1.0, "b")
    assert watch.calls == WAYS, "a later process measured again"
    assert [(entry.kind, entry.about.partition(",")[0]) for entry in diskcache.entries()] == [
        ("triton", "k 4 x 5 on cpu")
    ]
    Tuner(CPU, watch.measure).way("k 4 x 6", WAYS, watch.run)
    assert len(watch.calls) == 2 * len(WAYS), "another shape is measured separately"


def test_removed_ways_and_damaged_entries_are_measured_again():
    watch = Stopwatch()
    Tuner(CPU, watch.measure).way("k", WAYS, watch.run)
    assert Tuner(CPU, watch.measure).way("k", WAYS[:1], watch.run) == WAYS[0]
    (entry,) = diskcache.entries()
    (entry.path / "way.json").write_text("{")
    n_calls = len(watch.calls)
    assert Tuner(CPU, watch.measure).way("k", WAYS, watch.run) == Way(1.0, "b")
    assert len(watch.calls) == n_calls + len(WAYS)


def test_another_device_is_measured_separately(monkeypatch):
    watch = Stopwatch()
    Tuner(CPU, watch.measure).way("k", WAYS, watch.run)
    monkeypatch.setattr(tuning, "_described", lambda device: "another")
    Tuner(CPU, watch.measure).way("k", WAYS, watch.run)
    assert len(watch.calls) == 2 * len(WAYS)


def test_the_tuner_works_without_a_writable_cache(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(diskcache.CACHE_VARIABLE, str(tmp_path / "file"))
    watch = Stopwatch()
    assert Tuner(CPU, watch.measure).way("k", WAYS, watch.run) == Way(1.0, "b")
    assert "nothing is kept" in caplog.text


def test_the_tuner_measures_nothing_during_a_capture(monkeypatch):
    watch = Stopwatch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert Tuner(CPU, watch.measure).way("k", WAYS, watch.run) == WAYS[0]
    assert watch.calls == []


@pytest.mark.parametrize(("ways", "n_rows"), [("FEW_ROWS", 3), ("MANY_ROWS", 20)])
def test_all_ways_compute_the_product(ways, n_rows):
    rng = np.random.default_rng(0)
    data, x = rng.integers(0, 90, (37, 4 * 34), np.uint8), rng.standard_normal((n_rows, 128), np.float32)
    data.reshape(-1, 34)[:, :2] = np.array([0.01], np.float16).view(np.uint8)
    product = products.few_rows if ways == "FEW_ROWS" else products.many_rows
    form = packed_format(GgmlType.Q8_0, 128)
    expected = x.astype(np.float64) @ dequantize(data.reshape(-1), GgmlType.Q8_0, (37, 128)).astype(np.float64).T
    for way in getattr(products, ways):
        actual = product(torch.from_numpy(x), torch.from_numpy(data), form, way=way)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-4, err_msg=str(way))


def test_products_launch_the_fastest_way(monkeypatch):
    """The last way is measured as the fastest, so each kernel is launched with it."""
    used = []

    def recorded(step):
        def call(*args, way=None, **named):
            used.append(args[-1] if way is None else way)
            return step(*args, **named) if way is None else step(*args, way=way, **named)

        return call

    for name in ("few_rows", "many_rows"):
        monkeypatch.setattr(triton_kernels, name, recorded(getattr(products, name)))
    times = iter(range(100, 0, -1))
    monkeypatch.setattr(tuning.triton.testing, "do_bench", lambda call: float(next(times)))
    kernels = TritonKernels("cpu", "float32", profile=Profile(tune=True))
    data = np.random.default_rng(0).integers(0, 90, 8 * 2 * 34, np.uint8)
    weight = kernels.prepare(QuantizedTensor("w", (8, 64), GgmlType.Q8_0, data))
    for n_rows in (1, 9):
        kernels.matmul(torch.ones(n_rows, 64), weight)
    assert used == [products.FEW_ROWS[-1], products.MANY_ROWS[-1]]
