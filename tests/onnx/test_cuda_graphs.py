"""Graphs for CUDA: its attention is fused only without a bias, and accepts no bias before ONNX Runtime 1.29.

The CPU stands in for CUDA: it runs the same graphs.
"""

from __future__ import annotations

import dataclasses

import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.families import family_model
from slm_core.errors import InvalidOption
from slm_core.types import ContextOptions, Pos
from slm_onnx import providers, runtime

FLOAT32 = 1e-5  # relative; both runs are on the CPU, with or without masked cells in sums
CAPTURED = {"buckets": True, "provider_options": {"enable_cuda_graph": "1"}}


@pytest.fixture
def as_cuda(monkeypatch) -> None:
    """Build attention for the CPU as for CUDA."""
    cpu = dataclasses.replace(providers.PROVIDERS["cpu"], bias_since=providers.PROVIDERS["cuda"].bias_since)
    monkeypatch.setattr(providers, "PROVIDERS", {**providers.PROVIDERS, "cpu": cpu})


def inputs(context) -> set[str]:
    return {port.name for port in context._sessions.decoder.get_inputs()}


def run_session(context, feed, tokens):
    """Logits of one sequence, longer than the windows: two cuts, a truncation, a dump and a restore."""
    rows = [feed(context, tokens[:60])]
    context.cut(Pos(0, 20), Pos(0, 31))
    rows.append(feed(context, tokens[60:75]))
    context.cut(Pos(0, 0), Pos(0, 3))
    rows += [feed(context, tokens[75:76]), feed(context, tokens[76:82])]
    context.truncate(Pos(0, 55))
    context.restore(0, context.dump(0))
    return [*rows, feed(context, tokens[82:90])]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral3"])
def test_one_sequence_needs_no_bias(tmp_path, load, feed, random_tokens, assert_close, as_cuda, family) -> None:
    """Windows are attributes of attention. Cells are compacted after an edit, so that a row is a position."""
    model, tokens = load(family_model(tmp_path, family)), random_tokens(90)
    alone, several = (model.new_context(ContextOptions(n_ctx=96, n_seq_max=n)) for n in (1, 2))
    assert not {name for name in inputs(alone) if name.startswith("attention_bias")}
    assert {name for name in inputs(several) if name.startswith("attention_bias")}
    for actual, expected in zip(run_session(alone, feed, tokens), run_session(several, feed, tokens), strict=True):
        assert_close(actual, expected, FLOAT32)


def test_graphs_for_other_devices_have_a_bias(tmp_path, load) -> None:
    context = load(make_tiny_model("llama").write(tmp_path / "m.gguf")).new_context(ContextOptions(n_ctx=64))
    assert "attention_bias.0" in inputs(context)


def test_a_release_without_bias_has_contexts_of_one_sequence(tmp_path, load, as_cuda, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "version", lambda: "1.28.0")
    model = load(make_tiny_model("llama").write(tmp_path / "m.gguf"), cache=False)
    model.new_context(ContextOptions(n_ctx=64))
    with pytest.raises(InvalidOption, match=r"from ONNX Runtime 1\.29 on, this is 1\.28\.0: use n_seq_max=1"):
        model.new_context(ContextOptions(n_ctx=64, n_seq_max=2))
    with pytest.raises(InvalidOption, match="ALiBi"):
        load(family_model(tmp_path, "bloom"), cache=False)


@pytest.fixture
def sessions(monkeypatch) -> list[tuple[bool, bool]]:
    """For each new session, whether it is a decoder and whether it should capture; the CPU provider gets no options."""
    sessions_made: list[tuple[bool, bool]] = []
    real = runtime.session

    def session(model, weights, place, save_to=None):
        opened = real(model, weights, dataclasses.replace(place, providers=[("CPUExecutionProvider", {})]), save_to)
        is_decoder = "logits" in {port.name for port in opened.get_outputs()}
        sessions_made.append((is_decoder, "enable_cuda_graph" in place.providers[0][1]))
        return opened

    monkeypatch.setattr(runtime, "session", session)
    return sessions_made


def test_edits_are_never_captured(tmp_path, load, sessions) -> None:
    load(make_tiny_model("llama").write(tmp_path / "m.gguf"), cache=False, **CAPTURED)
    assert sorted(sessions) == [(False, False), (False, False), (True, True)]


def test_captured_runs_are_released_with_their_context(
    tmp_path, load, feed, random_tokens, sessions, monkeypatch
) -> None:
    released: list[int] = []
    model = load(make_tiny_model("llama").write(tmp_path / "m.gguf"), cache=False, **CAPTURED)
    first, second = (model.new_context(ContextOptions(n_ctx=64)) for _ in range(2))
    monkeypatch.setattr(first._sessions.decoder, "release_captured_graph", released.append)
    for context in (first, second):
        feed(context, random_tokens(3))
        feed(context, random_tokens(1))
    expected = sorted(bound.number for bound in first._decoders.feed._bound.values())
    first.close()
    assert (sorted(released), len(expected)) == (expected, 2)
    second.close()
    assert len(set(released)) == 4


def test_a_release_that_cannot_free_graphs_captures_nothing(tmp_path, load, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "version", lambda: "1.29.0")
    with pytest.raises(InvalidOption, match=r"needs ONNX Runtime 1\.30"):
        load(make_tiny_model("llama").write(tmp_path / "m.gguf"), **CAPTURED)
