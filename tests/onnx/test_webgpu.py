"""The KV cache on WebGPU stays on the device, and every node runs there. The oracle for logits is the CPU."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vulkan
from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.families import family_model
from slm_core.errors import BackendUnavailable, InvalidOption
from slm_core.types import ContextOptions, Pos
from slm_onnx import devices, runtime
from slm_onnx.convert import convert

vulkan.require()

FLOAT32 = 1e-4  # clause 9, relative; both sides sum in float32, in another order
N_LAYERS, PLANES, KV_HEADS, WIDTH = 2, 2, 2, 8  # of small_llama
ROW = PLANES * N_LAYERS * KV_HEADS * WIDTH * 4  # bytes of keys and values per token


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_tiny_model("small_llama").write(tmp_path / "m.gguf")


class TransferCounter:
    """Counts the bytes that runs copy between host and device, and profiles their nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.n_bytes = 0
        self._folder, self._sessions = folder, []
        options, run = runtime._options, runtime.run

        def profiled_options(place: runtime.Place) -> Any:
            session_options = options(place)
            session_options.enable_profiling = True
            session_options.profile_file_prefix = str(folder / f"profile-{len(self._sessions)}")
            session_options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            return session_options

        def counting_run(session: Any, binding: Any, *args: Any) -> None:
            run(session, binding, *args)
            bound = [*binding._bound_inputs.items(), *binding._bound_outputs.items()]
            on_device = {name for name, value in bound if value is not None and value._is_webgpu_buffer}
            self.n_bytes += sum(a.nbytes for name, a in binding._numpy_obj_references.items() if name not in on_device)
            named = zip([port.name for port in bound_outputs(session, binding)], binding.get_outputs(), strict=True)
            self.n_bytes += sum(v.tensor_size_in_bytes() for name, v in named if name not in on_device)
            if session not in self._sessions:
                self._sessions.append(session)

        monkeypatch.setattr(runtime, "_options", profiled_options)
        monkeypatch.setattr(runtime, "run", counting_run)

    def nodes(self) -> list[dict[str, Any]]:
        """The executed nodes; ends the profiles."""
        events = [event for s in self._sessions for event in json.loads(Path(s.end_profiling()).read_text())]
        return [event["args"] for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]


def bound_outputs(session: Any, binding: Any) -> list[Any]:
    """The outputs in the order of their binding."""
    by_name = {port.name: port for port in session.get_outputs()}
    return [by_name[name] for name in binding._bound_outputs]


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TransferCounter:
    return TransferCounter(monkeypatch, tmp_path)


@pytest.fixture
def transferred_bytes(transfers: TransferCounter) -> Callable[[Callable[[], Any]], int]:
    """A function that returns the bytes that a call copies between host and device."""

    def count(call: Callable[[], Any]) -> int:
        before = transfers.n_bytes
        call()
        return transfers.n_bytes - before

    return count


def test_a_step_copies_no_keys_and_values(small, load, feed, transfers, transferred_bytes) -> None:
    """A step copies equally many bytes for a cache 4 times as long, and fewer than the cells that it reads."""
    model, costs = load(small, "webgpu"), []
    for n_ctx in (256, 1024):
        with model.new_context(ContextOptions(n_ctx=n_ctx, n_seq_max=2)) as context:
            feed(context, list(range(100)))
            costs.append(transferred_bytes(functools.partial(feed, context, [7])))
    n_vocab, n_embd = model.info.n_vocab, model.info.n_embd
    positions, bias, sizes = 2 * (WIDTH // 2) * 4 + 8, 101 * 4, 4 + 4 + 8
    assert costs == [4 * n_embd + positions + bias + sizes + 4 * n_vocab] * 2
    assert costs[0] < 101 * ROW / 4
    assert {node["op_name"] for node in transfers.nodes() if "Memcpy" in node["op_name"]} == set()


def test_edits_copy_no_keys_and_values(small, load, feed, transferred_bytes) -> None:
    """Only indices and RoPE angles are copied: for a cut of a fork, none for other edits."""
    with load(small, "webgpu").new_context(ContextOptions(n_ctx=300, n_seq_max=3)) as context:
        feed(context, list(range(90)))
        assert transferred_bytes(lambda: context.fork(0, 1)) == 0
        assert transferred_bytes(lambda: context.truncate(Pos(1, 80))) == 0
        cut_bytes = (
            40 * (KV_HEADS * 3 + 1) * 8 + 40 * 2 * (WIDTH // 2) * 4
        )  # target and source indices; cosines and sines
        assert transferred_bytes(lambda: context.cut(Pos(1, 30), Pos(1, 40))) == cut_bytes
        assert transferred_bytes(lambda: context.drop(0)) == 0


def test_a_dump_copies_only_its_own_rows(small, load, feed, transferred_bytes) -> None:
    with load(small, "webgpu").new_context(ContextOptions(n_ctx=1000, n_seq_max=3)) as context:
        feed(context, list(range(90)))
        feed(context, list(range(50)), 1)
        data: list[bytes] = []
        assert transferred_bytes(lambda: data.append(context.dump(1))) == 50 * (ROW + 8)
        assert transferred_bytes(lambda: context.restore(2, data[0])) == 50 * (ROW + KV_HEADS * 3 * 8)


@pytest.mark.parametrize("family", ["small_llama", "qwen3", "gemma3", "bloom", "mistral3"])
def test_logits_and_edits_equal_the_cpu(tmp_path, load, feed, random_tokens, assert_close, family) -> None:
    """Windows, ALiBi, soft-caps and per-head norms; more tokens than one run of a software device takes."""
    if family == "small_llama":
        path = make_tiny_model(family).write(tmp_path / "m.gguf")
    else:
        path = family_model(tmp_path, family)
    tokens, results = random_tokens(70), []
    for device in ("cpu", "webgpu"):
        with load(path, device).new_context(ContextOptions(n_ctx=100, n_seq_max=2)) as context:
            rows = [feed(context, tokens[:58])]
            context.cut(Pos(0, 5), Pos(0, 14))
            rows.append(feed(context, tokens[58:61]))
            context.fork(0, 1, 30)
            context.restore(0, context.dump(0))
            rows += [feed(context, tokens[61:65], 1), feed(context, tokens[65:67])]
        results.append(rows)
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected, FLOAT32)


@pytest.mark.parametrize("weights", ["f16", "q8_0"])
def test_weights_are_multiplied_in_float32(tmp_path, load, feed, random_tokens, assert_close, weights) -> None:
    """WebGPU always does; the CPU does at accuracy_level 0."""
    path = make_tiny_model("qwen3", weights).write(tmp_path / "m.gguf")
    expected = feed(load(path, "cpu", accuracy_level=0).new_context(ContextOptions(n_ctx=64)), random_tokens(20))
    assert_close(feed(load(path, "webgpu").new_context(ContextOptions(n_ctx=64)), random_tokens(20)), expected, FLOAT32)


def test_every_node_runs_on_the_device(small, load, feed, transfers) -> None:
    with load(small, "webgpu").new_context(ContextOptions(n_ctx=300, n_seq_max=2)) as context:
        feed(context, list(range(40)))
        context.fork(0, 1)
        context.cut(Pos(1, 3), Pos(1, 9))
        context.drop(1)
        context.restore(1, context.dump(0))
    nodes = transfers.nodes()
    assert {"GroupQueryAttention", "ScatterND", "Gather", "RotaryEmbedding"} <= {node["op_name"] for node in nodes}
    assert {node["provider"] for node in nodes} == {"WebGpuExecutionProvider"}


def test_two_threads_never_use_the_device_at_the_same_time(small, load, feed, random_tokens, monkeypatch) -> None:
    """ONNX Runtime crashes the process when two sessions run at the same time (microsoft/onnxruntime#32561)."""
    model, run, alone, overlaps = load(small, "webgpu"), runtime.run, threading.Lock(), list[str]()

    def watched_run(*args: Any) -> None:
        if not alone.acquire(blocking=False):
            overlaps.append("a run began inside another one")
            alone.acquire()  # the process must not crash before the test can say so
        try:
            time.sleep(0.01)  # the other thread gets here if it can
            run(*args)
        finally:
            alone.release()

    def use(seed: int) -> None:
        with model.new_context(ContextOptions(n_ctx=64, n_seq_max=2)) as context:
            feed(context, random_tokens(8, seed=seed))
            context.cut(Pos(0, 2), Pos(0, 4))
            feed(context, random_tokens(1, seed=seed))
            context.restore(1, context.dump(0))

    monkeypatch.setattr(runtime, "run", watched_run)
    with ThreadPoolExecutor(2) as threads:
        for job in [threads.submit(use, seed) for seed in range(4)]:
            job.result()
    assert overlaps == []


def test_a_cache_larger_than_device_memory_is_an_error(small, load, feed, random_tokens) -> None:
    """WebGPU creates such buffers without an error, and fails on their use."""
    model = load(small, "webgpu")
    for n_ctx in (1 << 27, 1 << 28):
        with pytest.raises(InvalidOption, match="smaller n_ctx"):
            model.new_context(ContextOptions(n_ctx=n_ctx))
    with model.new_context(ContextOptions(n_ctx=64)) as context:
        assert np.isfinite(feed(context, random_tokens(5))).all()


def test_auto_does_not_select_a_device_tested_only_in_software(small, load) -> None:
    assert load(small, "auto").info.device == "cpu"
    assert "webgpu is taken by name only" in devices.report().auto


def test_there_is_one_device(small, load) -> None:
    assert load(small, "webgpu").info.device == "webgpu"
    with pytest.raises(BackendUnavailable, match="there is one"):
        load(small, "webgpu:1")


def test_directories_keep_their_caches_on_the_device(tmp_path, load, feed, random_tokens, assert_close) -> None:
    convert(make_tiny_model("small_llama", "f32").write(tmp_path / "m.gguf"), tmp_path / "dir", lambda share: None)
    tokens, results = random_tokens(60), []
    for device in ("cpu", "webgpu"):
        context = load(tmp_path / "dir", device).new_context(ContextOptions(n_ctx=100, n_seq_max=2))
        rows = [feed(context, tokens[:40]), feed(context, tokens[40:41])]
        context.cut(Pos(0, 3), Pos(0, 7))
        context.fork(0, 1, 20)
        context.restore(0, context.dump(0))
        results.append([*rows, feed(context, tokens[41:43]), feed(context, tokens[43:45], 1)])
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected, FLOAT32)
