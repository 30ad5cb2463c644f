"""What is built for CUDA, whose attention is fused without a bias, and took none before ONNX Runtime 1.29.

The CPU stands in for the device: it runs the same graphs.
"""

from __future__ import annotations

import dataclasses

import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.families import family_model
from slm_core.errors import InvalidOption
from slm_core.types import ContextOptions, Pos
from slm_onnx import providers, runtime

FLOAT32 = 1e-5  # both runs are on the CPU; masked cells are summed or left out
CAPTURED = {"buckets": True, "provider_options": {"enable_cuda_graph": "1"}}


@pytest.fixture
def as_cuda(monkeypatch) -> None:
    """Attention on the CPU as it is on CUDA."""
    cpu = dataclasses.replace(providers.PROVIDERS["cpu"], bias_since=providers.PROVIDERS["cuda"].bias_since)
    monkeypatch.setattr(providers, "PROVIDERS", {**providers.PROVIDERS, "cpu": cpu})


def inputs(context) -> set[str]:
    return {port.name for port in context._sessions.decoder.get_inputs()}


def told(context, feed, tokens):
    """All logits of one sequence, longer than windows, that is cut twice, cut short, dumped and restored."""
    found = [feed(context, tokens[:60])]
    context.cut(Pos(0, 20), Pos(0, 31))
    found.append(feed(context, tokens[60:75]))
    context.cut(Pos(0, 0), Pos(0, 3))
    found += [feed(context, tokens[75:76]), feed(context, tokens[76:82])]
    context.truncate(Pos(0, 55))
    context.restore(0, context.dump(0))
    return [*found, feed(context, tokens[82:90])]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral3"])
def test_one_sequence_needs_no_bias(tmp_path, load, feed, random_tokens, assert_close, as_cuda, family) -> None:
    """Windows are attributes of attention; cells behind an edit are compacted, so that a row is a position."""
    model, tokens = load(family_model(tmp_path, family)), random_tokens(90)
    alone, several = (model.new_context(ContextOptions(n_ctx=96, n_seq_max=n)) for n in (1, 2))
    assert not {name for name in inputs(alone) if name.startswith("attention_bias")}
    assert {name for name in inputs(several) if name.startswith("attention_bias")}
    for ours, expected in zip(told(alone, feed, tokens), told(several, feed, tokens), strict=True):
        assert_close(ours, expected, FLOAT32)


def test_elsewhere_a_bias_costs_nothing(tmp_path, load) -> None:
    context = load(make_tiny_model("llama").write(tmp_path / "m.gguf")).new_context(ContextOptions(n_ctx=64))
    assert "attention_bias.0" in inputs(context)


def test_a_release_that_takes_no_bias_has_contexts_of_one_sequence(tmp_path, load, as_cuda, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "version", lambda: "1.28.0")
    model = load(make_tiny_model("llama").write(tmp_path / "m.gguf"), cache=False)
    model.new_context(ContextOptions(n_ctx=64))
    with pytest.raises(InvalidOption, match=r"from ONNX Runtime 1\.29 on, this is 1\.28\.0: use n_seq_max=1"):
        model.new_context(ContextOptions(n_ctx=64, n_seq_max=2))
    with pytest.raises(InvalidOption, match="ALiBi"):
        load(family_model(tmp_path, "bloom"), cache=False)


@pytest.fixture
def given(monkeypatch) -> list[tuple[bool, bool]]:
    """Of each session that is made: whether it decodes, and whether its provider is to capture; the CPU is not told."""
    made: list[tuple[bool, bool]] = []
    real = runtime.session

    def session(model, weights, place, save_to=None):
        found = real(model, weights, dataclasses.replace(place, providers=[("CPUExecutionProvider", {})]), save_to)
        decodes = "logits" in {port.name for port in found.get_outputs()}
        made.append((decodes, "enable_cuda_graph" in place.providers[0][1]))
        return found

    monkeypatch.setattr(runtime, "session", session)
    return made


def test_edits_are_never_captured(tmp_path, load, given) -> None:
    load(make_tiny_model("llama").write(tmp_path / "m.gguf"), cache=False, **CAPTURED)
    assert sorted(given) == [(False, False), (False, False), (True, True)]


def test_captured_runs_end_with_their_context(tmp_path, load, feed, random_tokens, given, monkeypatch) -> None:
    released: list[int] = []
    model = load(make_tiny_model("llama").write(tmp_path / "m.gguf"), cache=False, **CAPTURED)
    first, second = (model.new_context(ContextOptions(n_ctx=64)) for _ in range(2))
    monkeypatch.setattr(first._sessions.decoder, "release_captured_graph", released.append)
    for context in (first, second):
        feed(context, random_tokens(3))
        feed(context, random_tokens(1))
    expected = sorted(bound.number for bound in first._feed._bound.values())
    first.close()
    assert (sorted(released), len(expected)) == (expected, 2)
    second.close()
    assert len(set(released)) == 4


def test_a_release_that_cannot_release_captures_nothing(tmp_path, load, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "version", lambda: "1.29.0")
    with pytest.raises(InvalidOption, match=r"needs ONNX Runtime 1\.30"):
        load(make_tiny_model("llama").write(tmp_path / "m.gguf"), **CAPTURED)
