"""Offloaded layers: the same logits as resident layers, within the memory limit."""

from __future__ import annotations

import dataclasses
import threading
import weakref

import numpy as np
import pytest

from slm_conformance.oracle.factories import SHAPES, make_tiny_model
from slm_core.errors import DecodeFailed, InvalidOption, ModelClosed, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import ContextOptions, ModelOptions
from slm_native import weights
from slm_native.backend import NativeBackend
from slm_native.offload import Offload, OffloadedLayers, choose_pinned

N_LAYERS = 7


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A llama model of seven layers, so that some are pinned and some are streamed."""
    shape = dataclasses.replace(SHAPES["llama"], n_layers=N_LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "llama", shape)
        return make_tiny_model("llama", "q8_0").write(tmp_path_factory.mktemp("offload") / "seven.gguf")


@pytest.fixture(scope="module")
def layer_bytes(path) -> int:
    with GgufFile.open(path) as file:
        return sum(info.n_bytes for name, info in file.tensors.items() if name.startswith("blk.0."))


def logits_of(model, feed, random_tokens) -> np.ndarray:
    """Logits of a prompt in two chunks and of single-token steps."""
    with model.new_context(ContextOptions(n_ctx=128, n_batch=20)) as context:
        return np.concatenate([feed(context, random_tokens(30)), feed(context, random_tokens(5, seed=1), chunk=1)])


@pytest.mark.parametrize("n_layers_allowed", [2, 3, 5])
def test_offloaded_logits_equal_those_of_a_resident_model(
    load, path, tier, layer_bytes, n_layers_allowed, feed, random_tokens
):
    """Bit for bit: the same steps run on the same weights."""
    resident = load(path, tier, expanded_bytes=0)
    offloaded = load(path, tier, resident_bytes=n_layers_allowed * layer_bytes)
    assert resident.offload is None
    for _ in range(2):
        np.testing.assert_array_equal(
            logits_of(offloaded, feed, random_tokens), logits_of(resident, feed, random_tokens), "layers were mixed up"
        )
    assert len(offloaded.offload.pinned_layers) == n_layers_allowed - 2


def test_every_pass_loads_only_the_layers_that_are_not_pinned(load, path, tier, layer_bytes, feed, random_tokens):
    model = load(path, tier, resident_bytes=4 * layer_bytes, pinned_layers=[0, 3])
    context, n_streamed = model.new_context(ContextOptions(n_ctx=64)), N_LAYERS - 2
    for n_passes in (1, 2, 3):
        feed(context, [n_passes])
        stats = model.offload
        assert stats.pinned_layers == (0, 3)
        assert stats.loads == n_passes * n_streamed + 2, "two layers of the next pass are prefetched"
        assert stats.loaded_bytes == stats.loads * layer_bytes
        assert stats.hits + stats.stalls == n_passes * N_LAYERS
        assert stats.hits >= 2 * n_passes, "the pass waited for a pinned layer"
        assert stats.held_bytes == stats.most_held_bytes == 4 * layer_bytes
    assert (stats.stalls > 0) == (stats.stalled_seconds > 0)


def test_a_budget_for_all_layers_streams_none(load, path, tier, layer_bytes, feed, random_tokens):
    model = load(path, tier, resident_bytes=N_LAYERS * layer_bytes)
    logits_of(model, feed, random_tokens)
    assert (model.offload.loads, model.offload.stalls) == (0, 0)
    assert model.offload.pinned_layers == tuple(range(N_LAYERS))


def test_memory_stays_within_resident_bytes(load, path, tier, layer_bytes, monkeypatch, feed, random_tokens):
    """Bytes are counted by the tensors themselves when they are created and freed, not by the code under test."""
    current, peak, lock = [0], [0], threading.Lock()

    def count(n_bytes: int) -> None:
        with lock:
            current[0] += n_bytes
            peak[0] = max(peak[0], current[0])

    class Counted(weights.QuantizedTensor):
        def __init__(self, name, shape, ggml_type, data) -> None:
            super().__init__(name, shape, ggml_type, data)
            if data.base is None:  # owns its memory: not a view, nor the mapped file
                count(data.nbytes)
                weakref.finalize(data, count, -data.nbytes)

    monkeypatch.setattr(weights, "QuantizedTensor", Counted)
    model = load(path, tier, resident_bytes=3 * layer_bytes)
    for _ in range(3):
        logits_of(model, feed, random_tokens)
        assert current[0] <= 3 * layer_bytes
    assert 2 * layer_bytes < peak[0] <= 3 * layer_bytes
    model.close()
    assert current[0] == 0, "close did not free the layers"


@pytest.mark.parametrize("closed", [True, False])
def test_the_loader_thread_ends_with_the_model(path, layer_bytes, feed, closed):
    before = set(threading.enumerate())
    model = NativeBackend().load(
        path, ModelOptions(backend_options={"tier": "reference", "resident_bytes": 2 * layer_bytes})
    )
    with model.new_context(ContextOptions(n_ctx=64)) as context:
        feed(context, [1, 2])
    (thread,) = set(threading.enumerate()) - before
    if closed:
        model.close()
        assert not thread.is_alive()
        with pytest.raises(ModelClosed):
            model.offload  # noqa: B018
    del model, context  # also for a model that was not closed
    thread.join(10)
    assert not thread.is_alive()


def test_a_failed_layer_load_is_reported_and_changes_nothing(load, path, layer_bytes, monkeypatch, feed, random_tokens):
    model = load(path, resident_bytes=2 * layer_bytes)
    context, untouched = (model.new_context(ContextOptions(n_ctx=64)) for _ in range(2))
    for each in (context, untouched):
        feed(each, random_tokens(10))
    prepare = model._transformer._kernels.prepare

    def fail(tensor):
        if tensor.name == "blk.5.ffn_up.weight":
            raise OSError("the disk is gone")
        return prepare(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(model._transformer._kernels, "prepare", fail)
        for _ in range(2):
            with pytest.raises(DecodeFailed, match="layer 5 could not be loaded: OSError: the disk is gone"):
                feed(context, random_tokens(4, seed=1))
    assert context.length(0) == 10
    more = random_tokens(20, seed=2)
    np.testing.assert_array_equal(feed(context, more), feed(untouched, more))
    assert model.offload.most_held_bytes == 2 * layer_bytes


def test_a_failed_step_leaves_the_layers_in_order(load, path, layer_bytes, monkeypatch, feed):
    model, calls = load(path, resident_bytes=3 * layer_bytes), []
    context = model.new_context(ContextOptions(n_ctx=64))
    expected = feed(context, [1, 2, 3])
    context.clear()
    kernels = model._transformer._kernels
    attention = kernels.attention_over_runs

    def fail(*args, **named):
        calls.append(args)
        if len(calls) == 4:
            raise ZeroDivisionError
        return attention(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "attention_over_runs", fail)
        with pytest.raises(ZeroDivisionError):
            feed(context, [1, 2, 3])
    np.testing.assert_array_equal(feed(context, [1, 2, 3]), expected)
    assert model.offload.held_bytes <= model.offload.most_held_bytes <= 3 * layer_bytes


def test_concurrent_threads_get_the_same_logits(load, path, layer_bytes, feed, random_tokens):
    model = load(path, resident_bytes=3 * layer_bytes)
    expected = logits_of(load(path, expanded_bytes=0), feed, random_tokens)
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(logits_of(model, feed, random_tokens))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for each in results:
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"resident_bytes": 1000},
            r"resident_bytes is 1000, and at least \d+ are needed: two .* \(all 7 layers take",
        ),
        ({"resident_bytes": -1}, "at least"),
        ({"resident_bytes": 1 << 30, "pinned_layers": [7]}, r"pinned_layers has 7 \(accepted: 0 to 6\)"),
        ({"resident_bytes": 1 << 30, "pinned_layers": "01"}, "list of layers"),
        ({"resident_bytes": 1 << 30, "pinned_layers": [True]}, "list of layers"),
        ({"pinned_layers": [1]}, "give both"),
        ({"resident_bytes": 1 << 30, "expanded_bytes": 5}, "accepted: one of them"),
        ({"resident_bytes": "much"}, "memory that the layers' weights may take"),
    ],
)
def test_impossible_options_are_refused(load, path, options, message):
    with pytest.raises(InvalidOption, match=message):
        load(path, **options)


def test_types_without_a_kernel_are_refused_at_load(load, path, layer_bytes, monkeypatch):
    def refuse(n_bytes, ggml_type, shape):
        raise UnsupportedModel("no such type")

    monkeypatch.setattr(weights, "check_size", refuse)
    with pytest.raises(UnsupportedModel, match="no such type"):
        load(path, resident_bytes=2 * layer_bytes)


def test_pinned_layers_alternate_with_streamed_ones():
    sizes = [10] * 12
    assert choose_pinned(sizes, Offload(120)) == list(range(12))
    assert choose_pinned(sizes, Offload(80)) == [1, 3, 5, 7, 9, 11], "six pinned layers and two buffers"
    assert choose_pinned(sizes, Offload(29)) == []
    uneven = [10, 30, 10, 10, 50, 10]
    pinned = choose_pinned(uneven, Offload(100))
    assert sum(uneven[i] for i in pinned) + 80 <= 100, "the two largest streamed layers fit into the rest"


def test_the_next_layer_is_prefetched_while_one_computes():
    """By the order of events, without a clock: layer i + 1 is requested before the pass needs it."""
    requested = [threading.Event() for _ in range(6)]

    def load(i: int):
        requested[i].set()
        return []

    layers = OffloadedLayers(load, [1] * 6, Offload(2), lambda: None, lambda share: None)
    with layers.walk() as steps_at:
        for i in range(5):
            steps_at(i)
            assert requested[i + 1].wait(10), f"layer {i + 1} is not loaded while {i} computes"
    layers.close()
