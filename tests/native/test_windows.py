"""Layers that keep only their sliding window: the same logits as with all positions, in memory that does not grow.

The oracle is a context of the same model with ``swa_full``, or a context that never decoded the removed tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.exact import exact
from slm_conformance.oracle.factories import tiny_model
from slm_conformance.oracle.families import family_model
from slm_core.architectures import ModelSpec, read_spec
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import DecodeFailed, InvalidOption, UnsupportedEdit
from slm_core.types import ContextOptions, EditLevel, ModelOptions, Pos
from slm_native import model as native_model
from slm_native.backend import NativeBackend

BOUND = 1e-5  # relative; float32 sums in another order: BLAS uses other kernels for other batch sizes
WINDOW = 48
FAMILIES = ("gemma4", "phi3_window")  # with and without windows and shared KV layers; windows in all layers
TOKENS = [(7 * i * i + 3 * i) % 251 for i in range(400)]
OPTIONS = exact(n_ctx=1024, n_seq_max=3, n_batch=200)


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """The model with windowed caches, and with ``swa_full``."""
    path, backend = family_model(tmp_path_factory.mktemp("family"), request.param), NativeBackend()
    models = [
        backend.load(path, ModelOptions(backend_options={"tier": "reference", "swa_full": swa_full}))
        for swa_full in (False, True)
    ]
    yield models
    for model in models:
        model.close()


def payload(context, seq_id: int) -> bytes:
    """The KV payload of a dump."""
    return SequenceSnapshot.from_bytes(context.dump(seq_id)).payload


def windows(context) -> list:
    return list(context._memory._windows.values())


def test_logits_equal_those_of_full_caches(models, tier, load, feed, assert_close):
    rows = []
    for model in (load(models[0].info.path, tier, swa_full=False), models[1]):
        with model.new_context(OPTIONS) as context:
            prompt_logits = feed(context, TOKENS[:300])
            for token in TOKENS[300:320]:
                batch = context.new_batch()
                batch.add(token, Pos(0, context.length(0)), logits=True)
                context.decode(batch)
            rows.append((prompt_logits, feed(context, TOKENS[320:350])))
    for actual, expected in zip(*rows, strict=True):
        assert_close(actual, expected, 1e-4)


def test_windowed_caches_do_not_grow(models, feed):
    pages = []
    with models[0].new_context(ContextOptions(n_ctx=4096, n_seq_max=2, n_batch=200)) as context:
        for _ in range(4):
            feed(context, TOKENS[:200])
            pages.append([cache.n_held(0) for cache in windows(context)])
        length = context.length(0)
        info, exported = models[0].info, len(payload(context, 0))
    assert pages[0] == pages[-1] == [3], "a window of 48 tokens and 64 tokens for truncation, in whole pages"
    fixed = exported - length * info.state_bytes_per_token
    assert info.state_bytes_per_sequence <= fixed < 3 * info.state_bytes_per_sequence, "a dump contains whole pages"
    assert info.state_bytes_per_token < models[1].info.state_bytes_per_token


def test_the_memory_of_windowed_caches_does_not_depend_on_n_ctx(models):
    sizes = []
    for n_ctx in (1 << 12, 1 << 16):
        with models[0].new_context(exact(n_ctx=n_ctx, n_batch=200)) as context:
            sizes.append(([cache.n_bytes for cache in windows(context)], context._memory.n_bytes))
    (small, _), (large, whole) = sizes
    assert small == large
    with models[1].new_context(exact(n_ctx=1 << 16, n_batch=200)) as context:
        assert whole < context._memory.n_bytes * 0.7


@pytest.mark.parametrize("length", [0, 1, 64, 130, 150, 320, 328, 335, 336, 337, 399, 400])
def test_truncate_at_any_position(models, feed, assert_close, length):
    """Truncating a few tokens keeps the cache; before the cached positions, the window is decoded again."""
    with models[0].new_context(OPTIONS) as context, models[1].new_context(OPTIONS) as fresh:
        feed(context, TOKENS)
        context.truncate(Pos(0, length))
        if length:
            feed(fresh, TOKENS[:length])
        assert_close(feed(context, TOKENS[300:380]), feed(fresh, TOKENS[300:380]), BOUND)


def test_truncating_a_few_tokens_decodes_nothing(models, feed, monkeypatch):
    """As speculative decoding does, many times in a row."""
    with models[0].new_context(OPTIONS) as context:
        feed(context, TOKENS[:200])
        for start in range(0, 160, 8):
            feed(context, TOKENS[start : start + 8])
            with monkeypatch.context() as patch:
                patch.setattr(context._transformer, "forward", None)
                context.truncate(Pos(0, context.length(0) - 5))
        with monkeypatch.context() as patch:
            patch.setattr(context._transformer, "forward", None)
            context.truncate(Pos(0, context.length(0) - 56))


def test_a_partial_fork_does_not_change_the_source(models, feed, assert_close):
    with models[0].new_context(OPTIONS) as context, models[1].new_context(OPTIONS) as fresh:
        feed(context, TOKENS[:300])
        before = payload(context, 0)
        context.fork(0, 1, 100)
        context.fork(0, 2)
        assert payload(context, 0) == before
        assert context._memory._windows[WINDOW]._cache.tables[2] == context._memory._windows[WINDOW]._cache.tables[0]
        feed(fresh, TOKENS[:300])
        fresh.fork(0, 1, 100)
        fresh.fork(0, 2)
        for seq_id in (2, 1, 0):
            rows = [feed(each, TOKENS[seq_id : seq_id + 70], seq_id=seq_id) for each in (context, fresh)]
            assert_close(*rows, BOUND)


def test_a_restored_dump_continues_like_the_sequence(models, feed, assert_close):
    with models[0].new_context(OPTIONS) as context, models[1].new_context(OPTIONS) as other:
        feed(context, TOKENS[:333])
        dump, exported = context.dump(0), payload(context, 0)
        after = feed(context, TOKENS[:50])
        context.restore(1, dump)
        assert payload(context, 1) == exported
        assert_close(feed(context, TOKENS[:50], seq_id=1), after, BOUND)
        other.restore(0, dump)  # another payload format: restored by replay
        assert_close(feed(other, TOKENS[:50]), after, BOUND)


def test_declared_edit_levels(models):
    with models[0].new_context(OPTIONS) as context:
        assert context.edit_level is EditLevel.TRUNCATE
        with pytest.raises(UnsupportedEdit):
            context.cut(Pos(0, 0), Pos(0, 0))
    with models[0].new_context(exact(n_ctx=WINDOW)) as context:
        assert context.edit_level is EditLevel.CUT, "no position ever leaves the window"
    with models[1].new_context(OPTIONS) as context:
        assert context.edit_level is EditLevel.CUT


def test_a_failure_while_a_window_is_recomputed_changes_nothing(models, feed, monkeypatch, assert_close):
    with models[0].new_context(OPTIONS) as context, models[1].new_context(OPTIONS) as fresh:
        feed(context, TOKENS[:300])
        before, forward = payload(context, 0), context._transformer.forward

        def fail(*inputs, **named):
            forward(*inputs, **named)
            raise MemoryError("no room")

        monkeypatch.setattr(context._transformer, "forward", fail)
        monkeypatch.setattr(type(context._transformer), "failures", (MemoryError,))
        with pytest.raises(DecodeFailed):
            context.truncate(Pos(0, 100))
        monkeypatch.undo()
        assert context.length(0) == 300
        assert payload(context, 0) == before
        feed(fresh, TOKENS[:300])
        assert_close(feed(context, TOKENS[:50]), feed(fresh, TOKENS[:50]), BOUND)


def test_swa_full_is_neutral_without_windows_and_refused_for_recurrent_models(tmp_path, load, monkeypatch):
    with load(tiny_model(tmp_path), swa_full=False).new_context(OPTIONS) as context:
        assert context.edit_level is EditLevel.CUT
    with pytest.raises(InvalidOption, match="swa_full='no'"):
        load(tiny_model(tmp_path), swa_full="no")
    monkeypatch.setattr(native_model, "read_spec", with_windows)
    with pytest.raises(InvalidOption, match="swa_full=False is not supported if layers have states"):
        load(family_model(tmp_path, "lfm2"), swa_full=False)


def with_windows(file) -> ModelSpec:
    spec = read_spec(file)
    return replace(spec, layers=tuple(replace(layer, window=WINDOW) for layer in spec.layers))


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "append", "fork", "truncate", "drop"]), st.integers(0, 2), st.floats(0, 1)),
    max_size=14,
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(operations=OPERATIONS)
def test_pages_never_run_out_and_logits_stay_equal(models, operations):
    """The allocator asserts its number of pages; the logits equal those of a context with full caches."""
    contexts = [model.new_context(exact(n_ctx=600, n_seq_max=3, n_batch=70)) for model in models]
    lengths = [0, 0, 0]
    for name, seq_id, share in operations:
        length, other = lengths[seq_id], (seq_id + 1) % 3
        at = int(share * length)
        for context in contexts:
            if name == "append" and length < 190:
                batch = context.new_batch()
                batch.extend(TOKENS[length : length + 1 + int(share * 69)], Pos(seq_id, length), logits="none")
                context.decode(batch)
            elif name == "fork" and at and not lengths[other]:
                context.fork(seq_id, other, at)
            elif name == "truncate":
                context.truncate(Pos(seq_id, at))
            elif name == "drop" and length:
                context.drop(seq_id)
        lengths = [contexts[0].length(each) for each in range(3)]
    rows = []
    for context in contexts:
        batch = context.new_batch()
        for seq_id in range(3):
            batch.add(5, Pos(seq_id, lengths[seq_id]), logits=True)
        rows.append(context.decode(batch).copy())
        context.close()
    errors = abs(rows[0] - rows[1]).max() / abs(rows[1]).max()
    assert errors <= 10 * BOUND


@pytest.mark.parametrize("end", [300, 299, 230, 120, 40])
def test_fork_cost_is_the_number_of_tokens_a_fork_decodes(models, feed, end, monkeypatch):
    with models[0].new_context(OPTIONS) as context:
        feed(context, TOKENS[:300])
        counts, forward = [], context._transformer.forward

        def counting_forward(batch):
            counts.append(len(batch.tokens))
            return forward(batch)

        monkeypatch.setattr(context._transformer, "forward", counting_forward)
        cost = context.fork_cost(0, end)
        assert not counts, "fork_cost decoded tokens"
        context.fork(0, 1, end)
        assert sum(counts) == cost
        assert (cost == 0) == (end >= 230), "the pages of the window and of 64 tokens before it are cached"
