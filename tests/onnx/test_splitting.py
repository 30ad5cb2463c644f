"""Split batches, for devices whose attention is correct only for few tokens; the oracle is the whole batch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_core.errors import BackendUnavailable, InvalidOption
from slm_core.types import ContextOptions, Pos
from slm_onnx import attentioncheck, providers, runtime, selfcheck

FLOAT32 = 1e-5  # relative; matrices with fewer rows sum in another order


@pytest.fixture
def limited_device(monkeypatch) -> None:
    """The CPU as a device that is correct up to 7 tokens."""
    monkeypatch.setattr(providers.Device, "is_cpu", property(lambda device: False))
    cpu = runtime.Place([("CPUExecutionProvider", {})], runtime.Threads(1, spinning=False))
    monkeypatch.setattr(providers.Device, "session_place", lambda device, options, threads: cpu)
    monkeypatch.setattr(selfcheck, "require", lambda device, options, of_directory: None)
    monkeypatch.setattr(attentioncheck, "most_rows", lambda place, dtype: 7)


def with_a_row(run, inputs, output="logits"):
    """Run a part of a batch; graphs on such devices need a row of logits."""
    assert len(inputs["logits_rows"]) > 0
    return run(inputs, output)


def run_session(context, feed, tokens):
    """Logits of a prompt, of a batch with output rows in only some of its parts, and of a batch without any."""
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
def test_split_batches_give_the_same_logits(
    tmp_path, load, feed, random_tokens, assert_close, limited_device, family, monkeypatch
) -> None:
    model, rows = load(family_model(tmp_path, family)), []
    for most_rows in (7, None):
        context = model.new_context(ContextOptions(n_ctx=128, n_seq_max=3, n_batch=64))
        inner = context._decoders.feed._feed
        if most_rows is None:
            context._decoders.feed = inner
        else:
            monkeypatch.setattr(inner, "run", partial(with_a_row, inner.run))
        rows.append(run_session(context, feed, random_tokens(60)))
    for actual, expected in zip(*rows, strict=True):
        assert_close(actual, expected, FLOAT32)


def test_buckets_are_refused_on_such_devices(tmp_path, load, limited_device) -> None:
    with pytest.raises(InvalidOption, match="right up to 7 tokens"):
        load(family_model(tmp_path, "qwen3"), buckets=True)


@pytest.mark.parametrize(("wrong", "expected"), [((), None), ((64,), 31)])
def test_the_check_finds_the_largest_correct_number_of_tokens(monkeypatch, wrong, expected) -> None:
    assert most_rows(monkeypatch, wrong) == expected


def test_a_device_with_wrong_attention_is_refused(monkeypatch) -> None:
    with pytest.raises(BackendUnavailable, match="computes attention wrong"):
        most_rows(monkeypatch, (64, 31))


def most_rows(monkeypatch, wrong) -> int | None:
    """The result of the check on the CPU, if one row is wrong for the numbers of tokens in ``wrong``."""
    real = runtime.session

    class WrongSession:
        def __init__(self, session) -> None:
            self._session = session

        def run(self, names, inputs):
            (output,) = self._session.run(names, inputs)
            if len(output[0]) in wrong:
                output[0, -1] = np.nan if len(output[0]) == 64 else -output[0, -1]
            return [output]

    monkeypatch.setattr(runtime, "session", lambda *args: WrongSession(real(*args)))
    place = runtime.Place([("CPUExecutionProvider", {})], runtime.Threads(1, spinning=False))
    return attentioncheck.most_rows(place, "float32")
