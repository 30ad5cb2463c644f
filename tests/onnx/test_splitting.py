"""Batches in parts, for devices whose attention is right for few tokens only; the oracle is the whole batch."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_core.errors import BackendUnavailable, InvalidOption
from slm_core.types import ContextOptions, Pos
from slm_onnx import attentioncheck, providers, runtime, selfcheck

FLOAT32 = 1e-5  # matrices of other heights are summed in another order


@pytest.fixture
def few(monkeypatch) -> None:
    """The CPU, taken for such a device."""
    monkeypatch.setattr(providers.Device, "is_cpu", property(lambda device: False))
    cpu = runtime.Place([("CPUExecutionProvider", {})], runtime.Threads(1, spinning=False))
    monkeypatch.setattr(providers.Device, "session_place", lambda device, options, threads: cpu)
    monkeypatch.setattr(selfcheck, "require", lambda device, options, of_directory: None)
    monkeypatch.setattr(attentioncheck, "most_rows", lambda place, dtype: 7)


def told(context, feed, tokens):
    """A prompt, and a batch of two sequences whose wanted rows are spread over parts, some of which have none."""
    rows = [feed(context, tokens[:20])]
    context.fork(0, 1, 10)
    batch = context.new_batch()
    batch.extend(tokens[20:40], Pos(0, 20), logits="last")
    batch.extend(tokens[40:53], Pos(1, 10), logits="last")
    batch.extend(tokens[53:56], Pos(2, 0), logits="all")
    rows.append(context.decode(batch).copy())
    batch = context.new_batch()
    batch.extend(tokens[:16], Pos(2, 3), logits="none")
    assert len(context.decode(batch)) == 0
    return [*rows, *(feed(context, tokens[56:58], seq_id) for seq_id in range(3))]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "bloom", "mistral3"])
def test_parts_give_what_the_whole_gives(tmp_path, load, feed, random_tokens, assert_close, few, family) -> None:
    model, found = load(family_model(tmp_path, family)), []
    for most_rows in (7, None):
        context = model.new_context(ContextOptions(n_ctx=128, n_seq_max=3, n_batch=64))
        if most_rows is None:
            context._feed = context._feed._feed
        found.append(told(context, feed, random_tokens(60)))
    for ours, expected in zip(*found, strict=True):
        assert_close(ours, expected, FLOAT32)


def test_padded_batches_are_refused_there(tmp_path, load, few) -> None:
    with pytest.raises(InvalidOption, match="right up to 7 tokens"):
        load(family_model(tmp_path, "qwen3"), buckets=True)


@pytest.mark.parametrize(("wrong", "expected"), [((), None), ((64,), 31)])
def test_a_device_is_asked_for_what_it_computes(monkeypatch, wrong, expected) -> None:
    assert most_rows(monkeypatch, wrong) == expected


def test_a_device_that_is_always_wrong_is_refused(monkeypatch) -> None:
    with pytest.raises(BackendUnavailable, match="computes attention wrong"):
        most_rows(monkeypatch, (64, 31))


def most_rows(monkeypatch, wrong) -> int | None:
    """What the check says of the CPU where its answers for some numbers of tokens are spoiled in one row."""
    real = runtime.session

    class Spoiled:
        def __init__(self, session) -> None:
            self._session = session

        def run(self, names, given):
            (found,) = self._session.run(names, given)
            if len(found[0]) in wrong:
                found[0, -1] = np.nan if len(found[0]) == 64 else -found[0, -1]
            return [found]

    monkeypatch.setattr(runtime, "session", lambda *args: Spoiled(real(*args)))
    place = runtime.Place([("CPUExecutionProvider", {})], runtime.Threads(1, spinning=False))
    return attentioncheck.most_rows(place, "float32")
