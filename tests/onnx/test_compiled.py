"""The disk cache of compiled models: a second load uses it, gives the same numbers, and works without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.diskcache import entries
from slm_core.types import ContextOptions
from slm_onnx import compiled, runtime

SIZES = ContextOptions(n_ctx=64)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def logits(tmp_path, load, feed, random_tokens) -> Callable[..., np.ndarray]:
    path = make_tiny_model("qwen3", "q8_0").write(tmp_path / "m.gguf")

    def rows(**options: object) -> np.ndarray:
        with load(path, **options).new_context(SIZES) as context:
            logits = feed(context, random_tokens(40))
        assert np.ptp(logits, axis=1).min() > 1, "the logits hardly differ"
        return logits

    return rows


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each graph that is built from now on."""
    from slm_onnx.decoder import DecoderGraph

    builds: list[int] = []
    build = DecoderGraph.build
    monkeypatch.setattr(DecoderGraph, "build", lambda self, progress: builds.append(1) or build(self, progress))
    return builds


def test_the_second_load_builds_nothing_and_gives_the_same_numbers(logits, monkeypatch) -> None:
    uncached = logits(cache=False)
    assert entries() == []
    builds = count_builds(monkeypatch)
    first, second = logits(cache=True), logits(cache=True)
    assert len(builds) == 1
    assert np.array_equal(first, uncached)
    assert np.array_equal(second, uncached)
    (entry,) = entries()
    assert (entry.kind, "m.gguf" in entry.about) == ("onnx", True)


def test_other_options_make_another_entry(logits) -> None:
    logits(cache=True)
    logits(cache=True, accuracy_level=0)
    assert len(entries()) == 2


@pytest.mark.parametrize("suffix", [".onnx", ".weights"])
def test_a_damaged_entry_is_built_again(logits, monkeypatch, suffix) -> None:
    expected = logits(cache=True)
    (file,) = (file for file in entries()[0].path.iterdir() if file.suffix == suffix)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)
    builds = count_builds(monkeypatch)
    assert np.array_equal(logits(cache=True), expected)
    assert np.array_equal(logits(cache=True), expected)
    assert len(builds) == 1


def test_models_load_without_a_writable_cache(logits, root) -> None:
    root.write_text("a file where the folder should be")
    assert np.array_equal(logits(cache=True), logits(cache=False))


def test_small_models_are_not_cached_by_default(logits) -> None:
    logits()
    assert entries() == []


def files() -> set[str]:
    """The files of the only entry."""
    return {file.name for file in entries()[0].path.iterdir()}


def test_packed_weights_are_cached(quantized, load, feed, random_tokens) -> None:
    path, tokens = quantized("Q4_0"), random_tokens(20)
    rows = [feed(load(path, cache=cache).new_context(SIZES), tokens) for cache in (False, True, True)]
    assert files() == {"manifest.json", "packed.onnx", "packed.onnx.weights"}
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_wrongly_packed_weights_are_not_cached(logits, monkeypatch) -> None:
    """ONNX Runtime saves some packed weights as zeros; here all are zeros, in any version."""
    save = runtime.save_packed

    def save_zeros(file: Path, save_to: Path, place: runtime.Place) -> None:
        save(file, save_to, place)
        weights = save_to.with_name(f"{save_to.name}.weights")
        weights.write_bytes(bytes(weights.stat().st_size))

    monkeypatch.setattr(runtime, "save_packed", save_zeros)
    assert np.array_equal(logits(cache=True), logits(cache=False))
    assert files() == {"manifest.json", "decoder.onnx", "decoder.onnx.weights"}


def test_another_processor_makes_another_entry(logits, monkeypatch) -> None:
    logits(cache=True)
    monkeypatch.setattr(compiled, "processor", lambda: "another")
    logits(cache=True)
    assert len(entries()) == 2
