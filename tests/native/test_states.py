"""Contexts of recurrent models: edits, shared pages, and the cost of states.

The oracle is a context that never decoded the removed tokens. Tests against other engines are in architectures/.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_core.adapters import write_control_vector
from slm_core.container import pack, unpack
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import DecodeFailed, InvalidSnapshot, UnsupportedEdit
from slm_core.types import ContextOptions, EditLevel, Pos
from slm_native import _extension
from slm_native.kernels.cpu import CpuKernels
from slm_native.kernels.select import select_kernels
from slm_native.states import N_CHECKPOINTS

BOUND = 1e-5  # relative; float32 sums in another order: BLAS uses other kernels for other batch sizes
FAMILIES = ("mamba", "lfm2", "rwkv7")
N = 150  # tokens: two full pages and a partial page


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path, load):
    return load(family_model(tmp_path, request.param))


@pytest.fixture
def open_context(model):
    return lambda n_seq_max=4: model.new_context(ContextOptions(n_ctx=1024, n_seq_max=n_seq_max))


@pytest.fixture
def count_tokens(monkeypatch):
    """A function that starts counting the tokens of a context's forward passes, and returns a reader of the count."""

    def count(context):
        counts, forward = [], context._transformer.forward

        def counting_forward(batch, **named):
            counts.append(len(batch))
            return forward(batch, **named)

        monkeypatch.setattr(context._transformer, "forward", counting_forward)
        return lambda: sum(counts)

    return count


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100, 149, 150])
def test_truncate_at_any_position(open_context, feed, random_tokens, assert_close, length):
    tokens, more = random_tokens(N), random_tokens(9, seed=1)
    context, fresh = open_context(), open_context()
    feed(context, tokens[:90])
    feed(context, tokens[90:], chunk=1)
    context.truncate(Pos(0, length))
    if length:
        feed(fresh, tokens[:length])
    assert_close(feed(context, more), feed(fresh, more), BOUND)


def test_checkpoints_bound_the_cost_of_truncate(open_context, feed, random_tokens, count_tokens):
    context, tokens = open_context(), random_tokens(400)
    feed(context, tokens, chunk=1)
    checkpoints = context._memory._states._held[0]
    assert len(checkpoints) == N_CHECKPOINTS + 1, "the number of checkpoints must not grow with the length"
    count = count_tokens(context)
    for n_removed in (1, 2, 8, 30, 100):
        before, length = count(), context.length(0) - n_removed
        context.truncate(Pos(0, length))
        assert count() - before <= 5 * n_removed, f"truncating {n_removed} tokens decoded {count() - before} again"


def test_truncating_the_last_batch_decodes_only_its_remaining_tokens(open_context, feed, random_tokens, count_tokens):
    """As speculative decoding does."""
    context = open_context()
    feed(context, random_tokens(300), chunk=1)
    for _ in range(5):
        start = context.length(0)
        feed(context, random_tokens(8))
        count = count_tokens(context)
        context.truncate(Pos(0, start + 3))
        assert count() == 3


def test_a_partial_fork_shares_pages_and_changes_none(open_context, feed, random_tokens, assert_close):
    tokens, more = random_tokens(N), random_tokens(9, seed=1)
    context, fresh = open_context(), open_context()
    feed(context, tokens)
    pages = context._memory._pages
    before = list(pages.export(0, N))
    context.fork(0, 1, 77)
    assert list(pages.export(0, N)) == before, "recomputing the state wrote to pages of the sequence"
    assert pages.tables[1] == pages.tables[0][:2]
    feed(fresh, tokens[:77])
    assert_close(feed(context, more, seq_id=1), feed(fresh, more), BOUND)
    feed(fresh, tokens, seq_id=1)
    assert_close(feed(context, more), feed(fresh, more, seq_id=1), BOUND)


OUTPUT_MASKS = {  # whether token i of n gets logits
    "all": lambda i, n: True,
    "last": lambda i, n: i == n - 1,
    "some": lambda i, n: n > 1 and i % 3 == 0,
    "of some": lambda i, n: n == 1,
    "none": lambda i, n: False,
}


@pytest.mark.parametrize("is_output", OUTPUT_MASKS.values(), ids=OUTPUT_MASKS)
def test_sequences_of_several_lengths_in_one_batch_do_not_mix(
    open_context, random_tokens, feed, assert_close, is_output
):
    """Sequences of one, seven and eleven tokens, interleaved in one batch that requests some rows of logits."""
    counts = {0: 1, 1: 7, 2: 1, 3: 1, 4: 11}
    context, alone = open_context(5), open_context(5)
    for seq_id in counts:
        for each in (context, alone):
            feed(each, random_tokens(5 + seq_id, seed=seq_id), seq_id=seq_id)
    new = {seq_id: random_tokens(n, seed=9 + seq_id) for seq_id, n in counts.items()}
    order = [seq_id for i in range(11) for seq_id, n in counts.items() if i < n]
    batch, output_tokens, n_added = context.new_batch(), [], dict.fromkeys(counts, 0)
    for seq_id in order:
        i = n_added[seq_id]
        batch.add(new[seq_id][i], Pos(seq_id, 5 + seq_id + i), logits=is_output(i, counts[seq_id]))
        n_added[seq_id] += 1
        if is_output(i, counts[seq_id]):
            output_tokens.append((seq_id, i))
    logits = context.decode(batch).copy()
    assert len(logits) == len(output_tokens)
    for seq_id in counts:
        expected, rows = (
            feed(alone, new[seq_id], seq_id=seq_id),
            [row for row, (other, _) in enumerate(output_tokens) if other == seq_id],
        )
        if rows:
            assert_close(logits[rows], expected[[output_tokens[row][1] for row in rows]], BOUND)
        assert_close(feed(context, [5], seq_id=seq_id), feed(alone, [5], seq_id=seq_id), BOUND)


@pytest.mark.parametrize("edit", [lambda c: c.truncate(Pos(0, 30)), lambda c: c.fork(0, 1, 30)])
def test_a_failure_while_a_state_is_recomputed_changes_nothing(
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


def test_cut_is_unsupported(open_context, feed, random_tokens):
    context = open_context()
    feed(context, random_tokens(20))
    assert context.edit_level is EditLevel.TRUNCATE
    with pytest.raises(UnsupportedEdit, match="truncate"):
        context.cut(Pos(0, 2), Pos(0, 5))


def test_dumps_have_the_sizes_in_model_info(model, open_context, feed, random_tokens):
    context = open_context()
    sizes = []
    for _ in range(2):
        feed(context, random_tokens(30))
        sizes.append(len(SequenceSnapshot.from_bytes(context.dump(0)).payload))
    assert sizes[1] - sizes[0] == 30 * model.info.state_bytes_per_token
    assert sizes[0] == 30 * model.info.state_bytes_per_token + model.info.state_bytes_per_sequence > 0
    is_pure = model.info.architecture != "lfm2"
    assert (model.info.state_bytes_per_token == 0) is is_pure, (
        "the state of a purely recurrent model does not grow with the length"
    )


@pytest.mark.parametrize("damage", [lambda p: p[:-4], lambda p: p[:100], lambda p: p[:-4] + b"\xff\xff\xff\x7f"])
def test_a_damaged_dump_is_refused_and_changes_nothing(open_context, feed, random_tokens, assert_close, damage):
    context, fresh, tokens = open_context(), open_context(), random_tokens(30)
    feed(context, tokens)
    feed(fresh, tokens)
    snapshot = SequenceSnapshot.from_bytes(context.dump(0))
    payload = damage(snapshot.payload)
    hostile = SequenceSnapshot(
        snapshot.backend, snapshot.payload_format, snapshot.fingerprint, snapshot.tokens, snapshot.edits, payload
    )
    with pytest.raises(InvalidSnapshot):
        context.restore(0, hostile.to_bytes())
    assert_close(feed(context, [5]), feed(fresh, [5]), BOUND)


def test_a_restored_sequence_can_be_truncated(open_context, feed, random_tokens, assert_close):
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
    """Against float64, one channel at a time: heads that share b and c; one rate per head or per element of the state.

    21 elements are full vectors and a remainder on every instruction set.
    """
    rng, n_state = np.random.default_rng(5), 21
    for n_groups, n_rates in ((1, n_state), (3, 1)):
        n_seqs, n_tokens, n_heads, width = 2, 7, 6, 4
        x = rng.standard_normal((n_seqs, n_tokens, n_heads, width))
        steps = 3 * rng.standard_normal((n_seqs, n_tokens, n_heads))
        a = -np.exp(rng.standard_normal((n_heads, n_rates)))
        b, c = rng.standard_normal((2, n_seqs, n_tokens, n_groups, n_state))
        state = rng.standard_normal((n_seqs, n_heads, width, n_state))
        expected, after = np.empty_like(x), state.copy()
        for s, h, p in np.ndindex(n_seqs, n_heads, width):
            group = h // (n_heads // n_groups)
            for t in range(n_tokens):
                step = np.log1p(np.exp(steps[s, t, h]))
                after[s, h, p] = np.exp(step * a[h]) * after[s, h, p] + step * x[s, t, h, p] * b[s, t, group]
                expected[s, t, h, p] = after[s, h, p] @ c[s, t, group]
        arguments = [array.astype(np.float32) for array in (x, steps, a, b, c, state)]
        y, final_state = kernels.selective_scan(*map(kernels.from_host, arguments))
        np.testing.assert_allclose(kernels.to_host(y), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(kernels.to_host(final_state), after, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(arguments[-1], state.astype(np.float32), "a step changed its argument")


def test_the_extension_refuses_mismatched_scans():
    if (missing := _extension.why_missing()) is not None:
        pytest.skip(f"the cpu tier is not tested, as the C++ extension is missing: {missing}")
    native = _extension.load().StateKernels("scalar", 1)

    def arguments(**shapes):
        sizes = {"x": (1, 3, 6, 2), "steps": (1, 3, 6), "a": (6, 1), "b": (1, 3, 2, 5), "c": (1, 3, 2, 5)}
        sizes |= {"state": (1, 6, 2, 5)} | shapes
        return {name: np.zeros(shape, np.float32) for name, shape in sizes.items()}

    native.selective_scan(**arguments())
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
            native.selective_scan(**arguments(**wrong))
    with pytest.raises(TypeError, match="float32"):
        native.selective_scan(**(arguments() | {"steps": np.zeros((1, 3, 6))}))


def test_the_delta_rule_equals_its_formula_on_every_tier(tier):
    """Against float64, one head at a time."""
    kernels, rng = select_kernels(tier).kernels, np.random.default_rng(6)
    n_seqs, n_tokens, n_heads, width = 2, 7, 3, 5
    r, log_decay, k, v, a, b = rng.standard_normal((6, n_seqs, n_tokens, n_heads, width))
    log_decay, state = -np.abs(log_decay), rng.standard_normal((n_seqs, n_heads, width, width))
    a, b = a / 3, b / 3
    expected, after = np.empty_like(v), state.copy()
    for s, t, h in np.ndindex(n_seqs, n_tokens, n_heads):
        at, matrix = (s, t, h), after[s, h]
        matrix = matrix @ (np.diag(np.exp(log_decay[at])) + np.outer(a[at], b[at])) + np.outer(v[at], k[at])
        after[s, h], expected[at] = matrix, matrix @ r[at]
    arguments = (kernels.from_host(array.astype(np.float32)) for array in (r, log_decay, k, v, a, b, state))
    y, matrix = kernels.delta_scan(*arguments)
    np.testing.assert_allclose(kernels.to_host(y), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(kernels.to_host(matrix), after, rtol=1e-4, atol=1e-4)


def test_fork_cost_counts_from_the_last_checkpoint(open_context, feed, random_tokens):
    context, tokens = open_context(), random_tokens(N)
    for start in (0, 30, 60):
        feed(context, tokens[start : start + 30])
    assert [context.fork_cost(0, end) for end in (90, 89, 61, 60, 45, 30, 7)] == [0, 29, 1, 0, 15, 0, 7]
    assert context.tokens(0) == tuple(tokens[:90])


def test_a_context_that_is_decoded_again_has_the_adapters_of_each_sequence(
    tmp_path, load, feed, random_tokens, assert_close
):
    """A fork of a part replays recurrent layers; the sequence that was filled last has other adapters."""
    model, tokens = load(family_model(tmp_path, "lfm2")), random_tokens(30)
    direction = np.random.default_rng(3).standard_normal(model.info.n_embd).astype(np.float32)
    write_control_vector({1: direction}, tmp_path / "vector.gguf")
    model.adapters.load(tmp_path / "vector.gguf", "vector")
    context, other = (model.new_context(ContextOptions(n_ctx=256, n_seq_max=3)) for _ in range(2))
    context.set_adapters(0, {"vector": 1.0})
    for seq_id in (0, 1):
        feed(context, tokens[:20], seq_id)
    context.fork(0, 2, 12)
    feed(context, tokens[12:20], 2)
    meta, sections = unpack("context", b"".join(context.dump_context()))
    for *_, of in meta["sequences"]:
        of["backend"] = "stranger"
    other.restore_context([pack("context", meta, sections)])
    assert other.n_free == context.n_free
    rows = [[feed(each, tokens[20:], seq_id) for seq_id in range(3)] for each in (context, other)]
    for expected, actual in zip(*rows, strict=True):
        assert_close(actual, expected, BOUND)
    assert np.abs(rows[0][0] - rows[0][1]).max() > 0.1, "the control vector changes nothing"
