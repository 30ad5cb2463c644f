"""Layers that keep only what their window sees: numbers as where all is kept, and memory that does not grow.

The oracle is a context of the same model whose layers keep all positions, or one that never held what was forgotten.
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

BOUND = 1e-5  # float32 sums in another order: a chunk's products are made by other paths of BLAS
WINDOW = 48
FAMILIES = ("gemma4", "phi3_window")  # layers with and without a window, keys that layers share; windows everywhere
TOKENS = [(7 * i * i + 3 * i) % 251 for i in range(400)]
OPTIONS = exact(n_ctx=1024, n_seq_max=3, n_batch=200)


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """The model as it keeps its windows alone, and as it keeps all."""
    path, backend = family_model(tmp_path_factory.mktemp("family"), request.param), NativeBackend()
    found = [
        backend.load(path, ModelOptions(backend_options={"tier": "reference", "swa_full": swa_full}))
        for swa_full in (False, True)
    ]
    yield found
    for model in found:
        model.close()


def payload(context, seq_id: int) -> bytes:
    """What a dump holds of keys and values."""
    return SequenceSnapshot.from_bytes(context.dump(seq_id)).payload


def windows(context) -> list:
    return list(context._memory._windows.values())


def test_logits_are_those_of_a_context_that_keeps_all(models, tier, load, feed, assert_close):
    rows = []
    for model in (load(models[0].info.path, tier, swa_full=False), models[1]):
        with model.new_context(OPTIONS) as context:
            found = feed(context, TOKENS[:300])
            for token in TOKENS[300:320]:
                batch = context.new_batch()
                batch.add(token, Pos(0, context.length(0)), logits=True)
                context.decode(batch)
            rows.append((found, feed(context, TOKENS[320:350])))
    for found, wanted in zip(*rows, strict=True):
        assert_close(found, wanted, 1e-4)


def test_what_layers_with_a_window_hold_does_not_grow(models, feed):
    pages = []
    with models[0].new_context(ContextOptions(n_ctx=4096, n_seq_max=2, n_batch=200)) as context:
        for _ in range(4):
            feed(context, TOKENS[:200])
            pages.append([cache.n_held(0) for cache in windows(context)])
        length = context.length(0)
        info, exported = models[0].info, len(payload(context, 0))
    assert pages[0] == pages[-1] == [3], "a window of 48, 64 tokens to take back, in whole pages"
    fixed = exported - length * info.state_bytes_per_token
    assert info.state_bytes_per_sequence <= fixed < 3 * info.state_bytes_per_sequence, "a dump has whole pages"
    assert info.state_bytes_per_token < models[1].info.state_bytes_per_token


def test_memory_of_windows_does_not_depend_on_n_ctx(models):
    sizes = []
    for n_ctx in (1 << 12, 1 << 16):
        with models[0].new_context(exact(n_ctx=n_ctx, n_batch=200)) as context:
            sizes.append(([cache.n_bytes for cache in windows(context)], context._memory.n_bytes))
    (small, _), (large, whole) = sizes
    assert small == large
    with models[1].new_context(exact(n_ctx=1 << 16, n_batch=200)) as context:
        assert whole < context._memory.n_bytes * 0.7


@pytest.mark.parametrize("length", [0, 1, 64, 130, 150, 320, 328, 335, 336, 337, 399, 400])
def test_truncate_forgets_at_any_place(models, feed, assert_close, length):
    """A few tokens are taken back as they are; before what is held, it is computed again."""
    with models[0].new_context(OPTIONS) as context, models[1].new_context(OPTIONS) as fresh:
        feed(context, TOKENS)
        context.truncate(Pos(0, length))
        if length:
            feed(fresh, TOKENS[:length])
        assert_close(feed(context, TOKENS[300:380]), feed(fresh, TOKENS[300:380]), BOUND)


def test_a_few_tokens_are_taken_back_without_computing(models, feed, monkeypatch):
    """As speculation does, again and again."""
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


def test_a_fork_of_a_part_changes_nothing_of_the_whole(models, feed, assert_close):
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


def test_a_dump_goes_on_as_the_sequence_would(models, feed, assert_close):
    with models[0].new_context(OPTIONS) as context, models[1].new_context(OPTIONS) as other:
        feed(context, TOKENS[:333])
        dump, exported = context.dump(0), payload(context, 0)
        after = feed(context, TOKENS[:50])
        context.restore(1, dump)
        assert payload(context, 1) == exported
        assert_close(feed(context, TOKENS[:50], seq_id=1), after, BOUND)
        other.restore(0, dump)  # of another format: by replay
        assert_close(feed(other, TOKENS[:50]), after, BOUND)


def test_what_is_declared(models):
    with models[0].new_context(OPTIONS) as context:
        assert context.edit_level is EditLevel.TRUNCATE
        with pytest.raises(UnsupportedEdit):
            context.cut(Pos(0, 0), Pos(0, 0))
    with models[0].new_context(exact(n_ctx=WINDOW)) as context:
        assert context.edit_level is EditLevel.CUT, "no position is ever behind the window"
    with models[1].new_context(OPTIONS) as context:
        assert context.edit_level is EditLevel.CUT


def test_a_failure_while_computing_again_changes_nothing(models, feed, monkeypatch, assert_close):
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


def test_without_windows_nothing_changes_and_beside_states_it_is_refused(tmp_path, load, monkeypatch):
    with load(tiny_model(tmp_path), swa_full=False).new_context(OPTIONS) as context:
        assert context.edit_level is EditLevel.CUT
    with pytest.raises(InvalidOption, match="swa_full='no'"):
        load(tiny_model(tmp_path), swa_full="no")
    monkeypatch.setattr(native_model, "read_spec", with_windows)
    with pytest.raises(InvalidOption, match="swa_full=False cannot be had where layers have states"):
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
def test_pages_always_suffice_and_numbers_stay_right(models, operations):
    """The bound on pages is the allocator's assertion; numbers are those of a context that keeps all."""
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
def test_fork_cost_is_what_a_fork_decodes_again(models, feed, end, monkeypatch):
    with models[0].new_context(OPTIONS) as context:
        feed(context, TOKENS[:300])
        again, forward = [], context._transformer.forward

        def counted(batch):
            again.append(len(batch.tokens))
            return forward(batch)

        monkeypatch.setattr(context._transformer, "forward", counted)
        cost = context.fork_cost(0, end)
        assert not again, "fork_cost has decoded something"
        context.fork(0, 1, end)
        assert sum(again) == cost
        assert (cost == 0) == (end >= 230), "the pages of the window, and of 64 tokens before it, are kept"
