"""What loading keeps on disk: the second load uses it, gives the same numbers, and survives its loss."""

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
            found = feed(context, random_tokens(40))
        assert np.ptp(found, axis=1).min() > 1, "the logits say nothing"
        return found

    return rows


def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the graphs that are built from now on."""
    from slm_onnx.decoder import DecoderGraph

    counted: list[int] = []
    build = DecoderGraph.build
    monkeypatch.setattr(DecoderGraph, "build", lambda self, progress: counted.append(1) or build(self, progress))
    return counted


def test_the_second_load_builds_nothing_and_gives_the_same_numbers(logits, monkeypatch) -> None:
    uncached = logits(cache=False)
    assert entries() == []
    counted = builds(monkeypatch)
    first, second = logits(cache=True), logits(cache=True)
    assert len(counted) == 1
    assert np.array_equal(first, uncached)
    assert np.array_equal(second, uncached)
    (entry,) = entries()
    assert (entry.kind, "m.gguf" in entry.about) == ("onnx", True)


def test_other_options_are_another_entry(logits) -> None:
    logits(cache=True)
    logits(cache=True, accuracy_level=0)
    assert len(entries()) == 2


@pytest.mark.parametrize("suffix", [".onnx", ".weights"])
def test_a_damaged_entry_is_made_again(logits, monkeypatch, suffix) -> None:
    expected = logits(cache=True)
    (file,) = (file for file in entries()[0].path.iterdir() if file.suffix == suffix)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)
    counted = builds(monkeypatch)
    assert np.array_equal(logits(cache=True), expected)
    assert np.array_equal(logits(cache=True), expected)
    assert len(counted) == 1


def test_a_disk_that_cannot_be_written_costs_the_cache_only(logits, root) -> None:
    root.write_text("a file where the folder should be")
    assert np.array_equal(logits(cache=True), logits(cache=False))


def test_small_models_are_not_kept_unless_asked(logits) -> None:
    logits()
    assert entries() == []


def files() -> set[str]:
    """What the one entry holds."""
    return {file.name for file in entries()[0].path.iterdir()}


def test_packed_weights_stay_in_the_file(quantized, load, feed, random_tokens) -> None:
    path, tokens = quantized("Q4_0"), random_tokens(20)
    rows = [feed(load(path, cache=cache).new_context(SIZES), tokens) for cache in (False, True, True)]
    assert files() == {"manifest.json", "packed.onnx", "packed.onnx.weights"}
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_weights_that_are_packed_wrongly_are_not_kept_so(logits, monkeypatch) -> None:
    """ONNX Runtime saves some packed weights as zeros: here all of them, whatever the version does."""
    save = runtime.save_packed

    def save_zeros(file: Path, save_to: Path, place: runtime.Place) -> None:
        save(file, save_to, place)
        weights = save_to.with_name(f"{save_to.name}.weights")
        weights.write_bytes(bytes(weights.stat().st_size))

    monkeypatch.setattr(runtime, "save_packed", save_zeros)
    assert np.array_equal(logits(cache=True), logits(cache=False))
    assert files() == {"manifest.json", "decoder.onnx", "decoder.onnx.weights"}


def test_another_processor_is_another_entry(logits, monkeypatch) -> None:
    logits(cache=True)
    monkeypatch.setattr(compiled, "processor", lambda: "another")
    logits(cache=True)
    assert len(entries()) == 2
