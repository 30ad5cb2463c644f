"""Offloaded layers of an object that has the tensors: when it is read, from which thread, and what its errors do."""

from __future__ import annotations

import _thread
import dataclasses
import gc
import itertools
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from slm_conformance.oracle.factories import SHAPES, make_tiny_model
from slm_conformance.oracle.tensor_source import FileTensors
from slm_core.errors import DecodeFailed, InvalidModelFile
from slm_core.types import ContextOptions

N_LAYERS = 7


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = dataclasses.replace(SHAPES["llama"], n_layers=N_LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "llama", shape)
        return make_tiny_model("llama", "q8_0").write(tmp_path_factory.mktemp("offload") / "seven.gguf")


class RemoteTensors(FileTensors):
    """A source that counts the bytes of layers that are alive, notes its readers, and fails on demand.

    Attributes:
        held: bytes of layers that the source returned and that are still in memory.
        most_held: the largest ``held`` so far.
        readers: the threads that read tensors of layers.
        requested: set by the first read of a layer since it was cleared, for each layer.
        fails: whether a read raises, by the name of the tensor.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.held = self.most_held = 0
        self.readers: set[str] = set()
        self.requested = [threading.Event() for _ in range(N_LAYERS)]
        self.fails: Callable[[str], bool] = lambda name: False
        self._lock = threading.Lock()

    def tensor_data(self, name: str) -> np.ndarray:
        if name.startswith("blk."):
            self.readers.add(threading.current_thread().name)
            self.requested[layer_of(name)].set()
        if self.fails(name):
            raise ConnectionError("the network is down")
        data = np.frombuffer(super().tensor_data(name), np.uint8).copy()
        if name.startswith("blk."):
            self._count(data.nbytes)
            weakref.finalize(data, self._count, -data.nbytes)
        return data

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self.held += n_bytes
            self.most_held = max(self.most_held, self.held)


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


def bytes_of_a_layer(source: FileTensors) -> int:
    return sum(len(source.tensor_data(name)) for name in source.tensors if name.startswith("blk.0."))


def reads_of_layers(source: FileTensors) -> list[int]:
    """How often each layer was read; all tensors of a layer were read equally often."""
    counts: dict[int, Counter[int]] = {i: Counter() for i in range(N_LAYERS)}
    for name, n in source.reads.items():
        if name.startswith("blk."):
            counts[layer_of(name)][n] += 1
    assert all(len(of_layer) <= 1 for of_layer in counts.values()), f"tensors of one layer differ: {counts}"
    return [next(iter(of_layer), 0) for of_layer in counts.values()]


def forget_what_is_read_ahead(model) -> None:
    """So that the next pass reads each layer from its start."""
    model._transformer._layers._forget_until(None)


@pytest.fixture
def source(path: Path) -> RemoteTensors:
    return RemoteTensors(path)


@pytest.fixture
def layer_bytes(path: Path) -> int:
    return bytes_of_a_layer(FileTensors(path))


def test_layers_are_read_when_they_are_needed_and_freed(load, path, source, tier, layer_bytes, feed, random_tokens):
    """Two pinned layers are read once, five in each pass; two layers more are read ahead for the next pass."""
    resident = load(path, tier, expanded_bytes=0)
    model = load(source, tier, resident_bytes=4 * layer_bytes, pinned_layers=[0, 3])
    assert reads_of_layers(source) == [1, 0, 0, 1, 0, 0, 0], "loading reads only what stays"
    contexts = [each.new_context(ContextOptions(n_ctx=64)) for each in (model, resident)]
    for n_passes in (1, 2, 3):
        tokens = random_tokens(9 if n_passes == 1 else 1, seed=n_passes)
        logits, expected = (feed(context, tokens) for context in contexts)
        np.testing.assert_array_equal(logits, expected, "another layer's tensors were read")
        assert model._transformer._layers._ahead[-1][1].result(10) is not None  # the read ahead is done
        assert reads_of_layers(source) == [1, n_passes + 1, n_passes + 1, 1, n_passes, n_passes, n_passes]
    others = {name: n for name, n in source.reads.items() if not name.startswith("blk.")}
    assert others == dict.fromkeys(others, 1)
    assert 2 * layer_bytes < source.most_held <= 4 * layer_bytes
    contexts[0].close()
    model.close()
    assert source.held == 0, "close did not free the layers"


def test_a_layer_is_read_on_the_second_thread_while_the_one_before_computes(
    load, source, layer_bytes, monkeypatch, feed
):
    """By events, without a clock: attention of each layer waits until the next layer is requested."""
    model, layers = load(source, resident_bytes=2 * layer_bytes), itertools.count()
    kernels = model._transformer._kernels
    attention = kernels.attention_over_runs
    source.readers.clear()

    def wait(*args, **named):
        following = (next(layers) + 1) % N_LAYERS
        assert source.requested[following].wait(10), f"layer {following} is not read ahead"
        source.requested[following].clear()
        return attention(*args, **named)

    monkeypatch.setattr(kernels, "attention_over_runs", wait)
    context = model.new_context(ContextOptions(n_ctx=64))
    for event in source.requested:
        event.clear()
    feed(context, [1, 2, 3])
    feed(context, [4])
    assert next(layers) == 2 * N_LAYERS
    assert source.readers == {"slm-layers_0"}


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.4.ffn_up.weight", "blk.6.ffn_down.weight"])
def test_a_failed_read_changes_nothing_and_the_next_decode_works(
    load, source, layer_bytes, feed, random_tokens, name, path
):
    model, resident = load(source, resident_bytes=2 * layer_bytes), load(path, expanded_bytes=0)
    context, expected = (each.new_context(ContextOptions(n_ctx=64)) for each in (model, resident))
    prompt, more = random_tokens(10), random_tokens(4, seed=1)
    np.testing.assert_array_equal(feed(context, prompt), feed(expected, prompt))
    forget_what_is_read_ahead(model)
    source.fails = lambda each: each == name
    for _ in range(2):
        with pytest.raises(DecodeFailed, match=f"layer {layer_of(name)} could not be loaded: InvalidModelFile: ") as e:
            feed(context, more)
        assert "cannot be read: ConnectionError: the network is down" in str(e.value)
        assert "\n" not in str(e.value)
        assert context.length(0) == 10
        assert list(context.tokens(0)) == list(prompt)
    source.fails = lambda each: False
    np.testing.assert_array_equal(feed(context, more), feed(expected, more))
    assert source.most_held <= 2 * layer_bytes


def test_an_error_of_reading_ahead_is_forgotten_when_the_source_works_again(load, source, layer_bytes, feed):
    """The next pass's first layers are read ahead while the source is down: that fails no later call."""
    model = load(source, resident_bytes=2 * layer_bytes)
    context, expected = (model.new_context(ContextOptions(n_ctx=64)) for _ in range(2))
    feed(expected, [1, 2, 3])
    source.fails = lambda name: layer_of(name) < 2 and source.reads["blk.6.ffn_down.weight"] > 1
    feed(context, [1, 2, 3])
    for _, loading in list(model._transformer._layers._ahead):
        assert isinstance(loading.exception(10), InvalidModelFile), "the source is down while layers are read ahead"
    source.fails = lambda name: False
    np.testing.assert_array_equal(feed(context, [4]), feed(expected, [4]))
    assert source.most_held <= 2 * layer_bytes


def test_a_layer_whose_bytes_change_their_number_is_refused(load, path, layer_bytes, feed):
    grown = []
    source = FileTensors(path, lambda name, data: data + bytes(34) if grown and name == "blk.5.attn_q.weight" else data)
    model = load(source, resident_bytes=2 * layer_bytes)
    context = model.new_context(ContextOptions(n_ctx=64))
    feed(context, [1, 2])
    grown.append(True)
    with pytest.raises(DecodeFailed, match=r"layer 5 .* returned \d+ bytes \(accepted: \d+\)$"):
        feed(context, [3])
    grown.clear()
    assert context.length(0) == 2
    feed(context, [3])


def test_an_error_while_pinned_layers_are_read_ends_the_load(load, source, layer_bytes):
    source.fails = lambda name: name == "blk.3.attn_v.weight"
    before = set(threading.enumerate())
    with pytest.raises(InvalidModelFile, match=r"^<RemoteTensors>: tensor 'blk.3.attn_v.weight' cannot be read: Conn"):
        load(source, resident_bytes=4 * layer_bytes, pinned_layers=[0, 3])
    assert set(threading.enumerate()) == before


def test_an_interrupt_in_a_source_passes_and_the_next_decode_works(load, source, layer_bytes, feed):
    model = load(source, resident_bytes=2 * layer_bytes)
    context, expected = (model.new_context(ContextOptions(n_ctx=64)) for _ in range(2))
    feed(expected, [1, 2, 3])

    def interrupt(name: str) -> bool:
        if name == "blk.4.attn_q.weight":
            raise KeyboardInterrupt
        return False

    source.fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        feed(context, [1, 2, 3])
    source.fails = lambda name: False
    feed(context, [1, 2, 3])
    np.testing.assert_array_equal(feed(context, [4]), feed(expected, [4]))
    assert model.offload.most_held_bytes == 2 * layer_bytes, "the failed layer's bytes are counted no longer"


@pytest.mark.parametrize("during_the_wait", [True, False])
def test_ctrl_c_ends_the_wait_for_a_slow_source(load, source, layer_bytes, feed, no_collection, during_the_wait):
    """Also if the signal comes just before the wait begins: interrupt_main does not wake a thread that waits."""
    interrupt = interrupt_main_thread if during_the_wait else _thread.interrupt_main
    model = load(source, resident_bytes=2 * layer_bytes)
    context, expected = (model.new_context(ContextOptions(n_ctx=64)) for _ in range(2))
    feed(expected, [1, 2, 3])
    forget_what_is_read_ahead(model)
    answers, gave_up = threading.Event(), threading.Event()

    def stall(name: str) -> bool:
        if name == "blk.4.attn_q.weight":
            while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the main thread computes
                time.sleep(0.001)
            interrupt()
            if not answers.wait(60):
                gave_up.set()
        return False

    source.fails = stall
    with pytest.raises(KeyboardInterrupt):
        feed(context, [1, 2, 3])
    assert not gave_up.is_set(), "the wait ended with the source's answer, not with the interrupt"
    assert context.length(0) == 0
    source.fails = lambda name: False
    answers.set()
    feed(context, [1, 2, 3])
    np.testing.assert_array_equal(feed(context, [4]), feed(expected, [4]))
    assert source.most_held <= 2 * layer_bytes


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Layers are freed by their reference counts alone: a cycle of references would keep them."""
    gc.disable()
    yield
    gc.enable()


def interrupt_main_thread() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
