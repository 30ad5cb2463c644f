"""Contexts whose layers keep a state: edits, sharing, and what a state costs.

The oracle is a context that never held what was forgotten; families against other engines are in architectures/.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import DecodeFailed, InvalidSnapshot, UnsupportedEdit
from slm_core.types import ContextOptions, EditLevel, Pos
from slm_native import _extension
from slm_native.kernels import select_kernels
from slm_native.kernels.cpu import CpuKernels
from slm_native.states import N_CHECKPOINTS

BOUND = 1e-5  # float32 sums in another order: a chunk's products are made by other paths of BLAS
FAMILIES = ("mamba", "lfm2", "rwkv7")
N = 150  # tokens: two whole pages and a part


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path, load):
    return load(family_model(tmp_path, request.param))


@pytest.fixture
def open_context(model):
    return lambda n_seq_max=4: model.new_context(ContextOptions(n_ctx=1024, n_seq_max=n_seq_max))


@pytest.fixture
def count_tokens(monkeypatch):
    """How many tokens a context's forward passes have taken, from here on."""

    def count(context):
        taken, forward = [], context._transformer.forward

        def counted(batch, **named):
            taken.append(len(batch))
            return forward(batch, **named)

        monkeypatch.setattr(context._transformer, "forward", counted)
        return lambda: sum(taken)

    return count


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100, 149, 150])
def test_truncate_forgets_at_any_place(open_context, feed, random_tokens, assert_close, length):
    tokens, more = random_tokens(N), random_tokens(9, seed=1)
    context, fresh = open_context(), open_context()
    feed(context, tokens[:90])
    feed(context, tokens[90:], chunk=1)
    context.truncate(Pos(0, length))
    if length:
        feed(fresh, tokens[:length])
    assert_close(feed(context, more), feed(fresh, more), BOUND)


def test_checkpoints_bound_what_forgetting_costs(open_context, feed, random_tokens, count_tokens):
    context, tokens = open_context(), random_tokens(400)
    feed(context, tokens, chunk=1)
    held = context._memory._states._held[0]
    assert len(held) == N_CHECKPOINTS + 1, "a state more with each token would grow with depth"
    taken = count_tokens(context)
    for forgotten in (1, 2, 8, 30, 100):
        before, length = taken(), context.length(0) - forgotten
        context.truncate(Pos(0, length))
        assert taken() - before <= 5 * forgotten, f"to forget {forgotten} tokens took {taken() - before}"


def test_a_part_of_the_last_batch_is_taken_back_from_before_it(open_context, feed, random_tokens, count_tokens):
    """As speculation does."""
    context = open_context()
    feed(context, random_tokens(300), chunk=1)
    for _ in range(5):
        start = context.length(0)
        feed(context, random_tokens(8))
        taken = count_tokens(context)
        context.truncate(Pos(0, start + 3))
        assert taken() == 3


def test_a_fork_of_a_part_shares_pages_and_changes_none(open_context, feed, random_tokens, assert_close):
    tokens, more = random_tokens(N), random_tokens(9, seed=1)
    context, fresh = open_context(), open_context()
    feed(context, tokens)
    pages = context._memory._pages
    before = list(pages.export(0, N))
    context.fork(0, 1, 77)
    assert list(pages.export(0, N)) == before, "computing a state again wrote on pages that a sequence holds"
    assert pages.tables[1] == pages.tables[0][:2]
    feed(fresh, tokens[:77])
    assert_close(feed(context, more, seq_id=1), feed(fresh, more), BOUND)
    feed(fresh, tokens, seq_id=1)
    assert_close(feed(context, more), feed(fresh, more, seq_id=1), BOUND)


WANTS = {  # of token i of n
    "all": lambda i, n: True,
    "last": lambda i, n: i == n - 1,
    "some": lambda i, n: n > 1 and i % 3 == 0,
    "of some": lambda i, n: n == 1,
    "none": lambda i, n: False,
}


@pytest.mark.parametrize("wants", WANTS.values(), ids=WANTS)
def test_sequences_of_several_lengths_in_one_batch_do_not_mix(open_context, random_tokens, feed, assert_close, wants):
    """Three bring a token each, one brings seven, one eleven; tokens lie mixed, and the rows of some are wanted."""
    counts = {0: 1, 1: 7, 2: 1, 3: 1, 4: 11}
    context, alone = open_context(5), open_context(5)
    for seq_id in counts:
        for each in (context, alone):
            feed(each, random_tokens(5 + seq_id, seed=seq_id), seq_id=seq_id)
    new = {seq_id: random_tokens(n, seed=9 + seq_id) for seq_id, n in counts.items()}
    order = [seq_id for i in range(11) for seq_id, n in counts.items() if i < n]
    batch, asked, given = context.new_batch(), [], dict.fromkeys(counts, 0)
    for seq_id in order:
        i = given[seq_id]
        batch.add(new[seq_id][i], Pos(seq_id, 5 + seq_id + i), logits=wants(i, counts[seq_id]))
        given[seq_id] += 1
        if wants(i, counts[seq_id]):
            asked.append((seq_id, i))
    logits = context.decode(batch).copy()
    assert len(logits) == len(asked)
    for seq_id in counts:
        wanted, of = (
            feed(alone, new[seq_id], seq_id=seq_id),
            [row for row, (other, _) in enumerate(asked) if other == seq_id],
        )
        if of:
            assert_close(logits[of], wanted[[asked[row][1] for row in of]], BOUND)
        assert_close(feed(context, [5], seq_id=seq_id), feed(alone, [5], seq_id=seq_id), BOUND)


@pytest.mark.parametrize("edit", [lambda c: c.truncate(Pos(0, 30)), lambda c: c.fork(0, 1, 30)])
def test_a_device_that_fails_while_a_state_is_computed_again_changes_nothing(
    open_context, feed, random_tokens, assert_close, monkeypatch, edit
):
    context, fresh, tokens = open_context(), open_context(), random_tokens(N)
    feed(context, tokens)
    feed(fresh, tokens)
    with monkeypatch.context() as patch:
        patch.setattr(type(context._transformer), "failures", (ZeroDivisionError,))
        patch.setattr(context._transformer, "forward", lambda *_, **__: 1 // 0)
        with pytest.raises(DecodeFailed):
            edit(context)
    assert (context.length(0), context.length(1)) == (N, 0)
    assert_close(feed(context, [5, 6]), feed(fresh, [5, 6]), BOUND)


def test_nothing_is_cut_out_of_a_state(open_context, feed, random_tokens):
    context = open_context()
    feed(context, random_tokens(20))
    assert context.edit_level is EditLevel.TRUNCATE
    with pytest.raises(UnsupportedEdit, match="truncate"):
        context.cut(Pos(0, 2), Pos(0, 5))


def test_the_sizes_of_dumps_are_those_that_info_names(model, open_context, feed, random_tokens):
    context = open_context()
    sizes = []
    for _ in range(2):
        feed(context, random_tokens(30))
        sizes.append(len(SequenceSnapshot.from_bytes(context.dump(0)).payload))
    assert sizes[1] - sizes[0] == 30 * model.info.state_bytes_per_token
    assert sizes[0] == 30 * model.info.state_bytes_per_token + model.info.state_bytes_per_sequence > 0
    is_pure = model.info.architecture != "lfm2"
    assert (model.info.state_bytes_per_token == 0) is is_pure, "a state does not grow with depth"


@pytest.mark.parametrize("damage", [lambda p: p[:-4], lambda p: p[:100], lambda p: p[:-4] + b"\xff\xff\xff\x7f"])
def test_a_dump_with_a_damaged_state_changes_nothing(open_context, feed, random_tokens, assert_close, damage):
    context, fresh, tokens = open_context(), open_context(), random_tokens(30)
    feed(context, tokens)
    feed(fresh, tokens)
    found = SequenceSnapshot.from_bytes(context.dump(0))
    payload = damage(found.payload)
    hostile = SequenceSnapshot(
        found.backend, found.payload_format, found.fingerprint, found.tokens, found.edits, payload
    )
    with pytest.raises(InvalidSnapshot):
        context.restore(0, hostile.to_bytes())
    assert_close(feed(context, [5]), feed(fresh, [5]), BOUND)


def test_a_state_that_was_restored_can_be_truncated(open_context, feed, random_tokens, assert_close):
    context, other, tokens = open_context(), open_context(), random_tokens(N)
    feed(context, tokens)
    other.restore(2, context.dump(0))
    other.truncate(Pos(2, 40))
    context.truncate(Pos(0, 40))
    assert_close(feed(other, [5, 6], seq_id=2), feed(context, [5, 6]), BOUND)


def test_closing_frees_the_states(open_context, feed, random_tokens):
    context = open_context()
    feed(context, random_tokens(8))
    state = weakref.ref(context._memory._states._held[0][-1].state[0][0])
    context.close()
    assert state() is None


def test_a_scan_equals_its_formula_on_every_tier(tier):
    check_scan(select_kernels(tier).kernels)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx_vnni", "avx512", "neon", "neon_i8mm"])
def test_a_scan_equals_its_formula_on_every_instruction_set(isa):
    if (missing := _extension.why_missing()) is not None:
        pytest.skip(f"the cpu tier is not tested, as the C++ extension is missing: {missing}")
    if isa not in _extension.load().available_isas():
        pytest.skip(f"this machine or this build has no {isa}")
    check_scan(CpuKernels(isa, 2, 0))


def check_scan(kernels):
    """In float64, a channel at a time: heads that share b and c, one rate for each head or for each number.

    21 numbers are whole vectors and a rest on every instruction set.
    """
    rng, n_state = np.random.default_rng(5), 21
    for n_groups, n_rates in ((1, n_state), (3, 1)):
        n_seqs, n_tokens, n_heads, width = 2, 7, 6, 4
        x = rng.standard_normal((n_seqs, n_tokens, n_heads, width))
        steps = 3 * rng.standard_normal((n_seqs, n_tokens, n_heads))
        a = -np.exp(rng.standard_normal((n_heads, n_rates)))
        b, c = rng.standard_normal((2, n_seqs, n_tokens, n_groups, n_state))
        state = rng.standard_normal((n_seqs, n_heads, width, n_state))
        wanted, after = np.empty_like(x), state.copy()
        for s, h, p in np.ndindex(n_seqs, n_heads, width):
            group = h // (n_heads // n_groups)
            for t in range(n_tokens):
                step = np.log1p(np.exp(steps[s, t, h]))
                after[s, h, p] = np.exp(step * a[h]) * after[s, h, p] + step * x[s, t, h, p] * b[s, t, group]
                wanted[s, t, h, p] = after[s, h, p] @ c[s, t, group]
        given = [array.astype(np.float32) for array in (x, steps, a, b, c, state)]
        y, held = kernels.selective_scan(*map(kernels.from_host, given))
        np.testing.assert_allclose(kernels.to_host(y), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(kernels.to_host(held), after, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(given[-1], state.astype(np.float32), "a step changed its argument")


def test_scans_that_do_not_fit_are_refused_by_the_extension():
    if (missing := _extension.why_missing()) is not None:
        pytest.skip(f"the cpu tier is not tested, as the C++ extension is missing: {missing}")
    native = _extension.load().StateKernels("scalar", 1)

    def given(**shapes):
        sizes = {"x": (1, 3, 6, 2), "steps": (1, 3, 6), "a": (6, 1), "b": (1, 3, 2, 5), "c": (1, 3, 2, 5)}
        sizes |= {"state": (1, 6, 2, 5)} | shapes
        return {name: np.zeros(shape, np.float32) for name, shape in sizes.items()}

    native.selective_scan(**given())
    for wrong in (
        {"steps": (1, 3, 5)},
        {"a": (6, 2)},
        {"a": (5, 1)},
        {"b": (1, 3, 4, 5)},
        {"b": (1, 3, 0, 5)},
        {"c": (1, 3, 2, 4)},
        {"state": (1, 6, 3, 5)},
        {"state": (6, 2, 5)},
        {"x": (3, 6, 2)},
    ):
        with pytest.raises(ValueError):
            native.selective_scan(**given(**wrong))
    with pytest.raises(TypeError, match="float32"):
        native.selective_scan(**(given() | {"steps": np.zeros((1, 3, 6))}))


def test_the_delta_rule_equals_its_formula_on_every_tier(tier):
    """In float64, a head at a time."""
    kernels, rng = select_kernels(tier).kernels, np.random.default_rng(6)
    n_seqs, n_tokens, n_heads, width = 2, 7, 3, 5
    r, log_decay, k, v, a, b = rng.standard_normal((6, n_seqs, n_tokens, n_heads, width))
    log_decay, state = -np.abs(log_decay), rng.standard_normal((n_seqs, n_heads, width, width))
    a, b = a / 3, b / 3
    wanted, after = np.empty_like(v), state.copy()
    for s, t, h in np.ndindex(n_seqs, n_tokens, n_heads):
        at, held = (s, t, h), after[s, h]
        held = held @ (np.diag(np.exp(log_decay[at])) + np.outer(a[at], b[at])) + np.outer(v[at], k[at])
        after[s, h], wanted[at] = held, held @ r[at]
    arguments = (kernels.from_host(array.astype(np.float32)) for array in (r, log_decay, k, v, a, b, state))
    y, held = kernels.delta_scan(*arguments)
    np.testing.assert_allclose(kernels.to_host(y), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(kernels.to_host(held), after, rtol=1e-4, atol=1e-4)


def test_fork_cost_counts_from_the_last_state_that_is_kept(open_context, feed, random_tokens):
    context, tokens = open_context(), random_tokens(N)
    for start in (0, 30, 60):
        feed(context, tokens[start : start + 30])
    assert [context.fork_cost(0, end) for end in (90, 89, 61, 60, 45, 30, 7)] == [0, 29, 1, 0, 15, 0, 7]
    assert context.tokens(0) == tuple(tokens[:90])
