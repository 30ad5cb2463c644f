"""The KV cache on WebGPU: it stays on the device, and every node runs there. The oracle for logits is the CPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
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

FLOAT32 = 1e-4  # clause 9; both sides compute in float32, in another order
N_LAYERS, PLANES, KV_HEADS, WIDTH = 2, 2, 2, 8  # of small_llama
ROW = PLANES * N_LAYERS * KV_HEADS * WIDTH * 4  # bytes of keys and values for a token


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_tiny_model("small_llama").write(tmp_path / "m.gguf")


class Crossing:
    """Counts the bytes that a run copies between host and device: what is bound on the host, and what nodes copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.n_bytes = 0
        self._folder, self._sessions = folder, []
        options, run = runtime._options, runtime.run

        def profiled(place: runtime.Place) -> Any:
            made = options(place)
            made.enable_profiling = True
            made.profile_file_prefix = str(folder / f"profile-{len(self._sessions)}")
            made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            return made

        def counted(session: Any, binding: Any, *args: Any) -> None:
            run(session, binding, *args)
            bound = [*binding._bound_inputs.items(), *binding._bound_outputs.items()]
            on_device = {name for name, value in bound if value is not None and value._is_webgpu_buffer}
            self.n_bytes += sum(a.nbytes for name, a in binding._numpy_obj_references.items() if name not in on_device)
            named = zip([port.name for port in bound_outputs(session, binding)], binding.get_outputs(), strict=True)
            self.n_bytes += sum(v.tensor_size_in_bytes() for name, v in named if name not in on_device)
            if session not in self._sessions:
                self._sessions.append(session)

        monkeypatch.setattr(runtime, "_options", profiled)
        monkeypatch.setattr(runtime, "run", counted)

    def nodes(self) -> list[dict[str, Any]]:
        """What ran, node by node; ends the profiles."""
        events = [event for s in self._sessions for event in json.loads(Path(s.end_profiling()).read_text())]
        return [event["args"] for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]


def bound_outputs(session: Any, binding: Any) -> list[Any]:
    """The outputs in the order in which they were bound."""
    by_name = {port.name: port for port in session.get_outputs()}
    return [by_name[name] for name in binding._bound_outputs]


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Crossing:
    return Crossing(monkeypatch, tmp_path)


@pytest.fixture
def cost(crossing: Crossing) -> Callable[[Callable[[], Any]], int]:
    """The bytes that a call moves."""

    def of(call: Callable[[], Any]) -> int:
        before = crossing.n_bytes
        call()
        return crossing.n_bytes - before

    return of


def test_a_step_moves_no_keys_and_no_values(small, load, feed, crossing, cost) -> None:
    """Two caches, one 16 times as long: a step costs the same, and less than the cells that it reads."""
    model, costs = load(small, "webgpu"), []
    for n_ctx in (256, 4096):
        with model.new_context(ContextOptions(n_ctx=n_ctx, n_seq_max=2)) as context:
            feed(context, list(range(100)))
            costs.append(cost(functools.partial(feed, context, [7])))
    n_vocab, n_embd = model.info.n_vocab, model.info.n_embd
    positions, bias, sizes = 2 * (WIDTH // 2) * 4 + 8, 101 * 4, 4 + 4 + 8
    assert costs == [4 * n_embd + positions + bias + sizes + 4 * n_vocab] * 2
    assert costs[0] < 101 * ROW / 4
    assert {node["op_name"] for node in crossing.nodes() if "Memcpy" in node["op_name"]} == set()


def test_edits_move_no_keys_and_no_values(small, load, feed, cost) -> None:
    """What crosses are indices and angles: of a cut, a fork that is cut, and of cells that are compacted."""
    with load(small, "webgpu").new_context(ContextOptions(n_ctx=300, n_seq_max=3)) as context:
        feed(context, list(range(90)))
        assert cost(lambda: context.fork(0, 1)) == 0
        assert cost(lambda: context.truncate(Pos(1, 80))) == 0
        turned = 40 * (KV_HEADS * 3 + 1) * 8 + 40 * 2 * (WIDTH // 2) * 4  # places and sources; cosines and sines
        assert cost(lambda: context.cut(Pos(1, 30), Pos(1, 40))) == turned
        assert cost(lambda: context.drop(0)) == 0


def test_a_dump_moves_its_own_rows(small, load, feed, cost) -> None:
    with load(small, "webgpu").new_context(ContextOptions(n_ctx=1000, n_seq_max=3)) as context:
        feed(context, list(range(90)))
        feed(context, list(range(50)), 1)
        data: list[bytes] = []
        assert cost(lambda: data.append(context.dump(1))) == 50 * (ROW + 8)
        assert cost(lambda: context.restore(2, data[0])) == 50 * (ROW + KV_HEADS * 3 * 8)


@pytest.mark.parametrize("family", ["small_llama", "qwen3", "gemma3", "bloom", "mistral3"])
def test_logits_and_edits_are_those_of_the_cpu(tmp_path, load, feed, random_tokens, assert_close, family) -> None:
    """Windows, ALiBi, soft-caps and norms of heads; more tokens than one run takes where the device is software."""
    if family == "small_llama":
        path = make_tiny_model(family).write(tmp_path / "m.gguf")
    else:
        path = family_model(tmp_path, family)
    tokens, found = random_tokens(70), []
    for device in ("cpu", "webgpu"):
        with load(path, device).new_context(ContextOptions(n_ctx=100, n_seq_max=2)) as context:
            rows = [feed(context, tokens[:58])]
            context.cut(Pos(0, 5), Pos(0, 14))
            rows.append(feed(context, tokens[58:61]))
            context.fork(0, 1, 30)
            context.restore(0, context.dump(0))
            rows += [feed(context, tokens[61:65], 1), feed(context, tokens[65:67])]
        found.append(rows)
    for expected, ours in zip(*found, strict=True):
        assert_close(ours, expected, FLOAT32)


@pytest.mark.parametrize("weights", ["f16", "q8_0"])
def test_weights_are_multiplied_in_float32(tmp_path, load, feed, random_tokens, assert_close, weights) -> None:
    """The CPU does so at accuracy_level 0, WebGPU always."""
    path = make_tiny_model("qwen3", weights).write(tmp_path / "m.gguf")
    expected = feed(load(path, "cpu", accuracy_level=0).new_context(ContextOptions(n_ctx=64)), random_tokens(20))
    assert_close(feed(load(path, "webgpu").new_context(ContextOptions(n_ctx=64)), random_tokens(20)), expected, FLOAT32)


def test_every_node_runs_on_the_device(small, load, feed, crossing) -> None:
    with load(small, "webgpu").new_context(ContextOptions(n_ctx=300, n_seq_max=2)) as context:
        feed(context, list(range(40)))
        context.fork(0, 1)
        context.cut(Pos(1, 3), Pos(1, 9))
        context.drop(1)
        context.restore(1, context.dump(0))
    nodes = crossing.nodes()
    assert {"GroupQueryAttention", "ScatterND", "Gather", "RotaryEmbedding"} <= {node["op_name"] for node in nodes}
    assert {node["provider"] for node in nodes} == {"WebGpuExecutionProvider"}


def test_more_memory_than_the_device_has_is_an_error(small, load, feed, random_tokens) -> None:
    """WebGPU hands out such buffers, and fails when they are used."""
    model = load(small, "webgpu")
    for n_ctx in (1 << 27, 1 << 28):
        with pytest.raises(InvalidOption, match="smaller n_ctx"):
            model.new_context(ContextOptions(n_ctx=n_ctx))
    with model.new_context(ContextOptions(n_ctx=64)) as context:
        assert np.isfinite(feed(context, random_tokens(5))).all()


def test_auto_leaves_out_a_device_that_has_run_in_software_only(small, load) -> None:
    assert load(small, "auto").info.device == "cpu"
    assert "webgpu is taken by name only" in devices.report().auto


def test_there_is_one_device(small, load) -> None:
    assert load(small, "webgpu").info.device == "webgpu"
    with pytest.raises(BackendUnavailable, match="there is one"):
        load(small, "webgpu:1")


def test_directories_keep_their_caches_there(tmp_path, load, feed, random_tokens, assert_close) -> None:
    convert(make_tiny_model("qwen3", "f32").write(tmp_path / "m.gguf"), tmp_path / "dir", lambda share: None)
    tokens, found = random_tokens(60), []
    for device in ("cpu", "webgpu"):
        context = load(tmp_path / "dir", device).new_context(ContextOptions(n_ctx=100, n_seq_max=2))
        rows = [feed(context, tokens[:40]), feed(context, tokens[40:41])]
        context.cut(Pos(0, 3), Pos(0, 7))
        context.fork(0, 1, 20)
        context.restore(0, context.dump(0))
        found.append([*rows, feed(context, tokens[41:43]), feed(context, tokens[43:45], 1)])
    for expected, ours in zip(*found, strict=True):
        assert_close(ours, expected, FLOAT32)
