"""Plans of batches: which stored tokens each token of a batch attends to, whole, in parts, in chunks and in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slm_native.kv import PAGE_TOKENS, BatchPlan, PagedKvCache, PageLayout, codec_of, in_blocks, in_chunks, part_of
from slm_native.kv.plan import Run

Place = tuple[int, int]
"""A page and a slot."""

batches = st.tuples(
    st.tuples(*[st.integers(0, 150)] * 3),  # length of each sequence before the batch
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70)), min_size=1, max_size=4),  # runs: sequence, tokens
    st.booleans(),  # whether the sequences take turns in the batch
)


def plan_of(batch) -> tuple[BatchPlan, list[list[Place]], list[Place]]:
    """A plan; the place of each position of each sequence; the sequence and the position of each token."""
    lengths, runs, interleaved = batch
    codec = codec_of("f32", 2)
    cache = PagedKvCache([PageLayout(range(1), 1, 2, codec, codec)], 30, 3)
    # Before the batch the sequences grow in turns of 50 tokens, so that their pages are not contiguous.
    for begin in range(0, 150, 50):
        for seq_id, length in enumerate(lengths):
            if length > begin:
                positions = np.arange(begin, min(length, begin + 50), dtype=np.int32)
                cache.commit(cache.plan(np.full(len(positions), seq_id, np.int32), positions))
    tokens = [(seq_id, i) for seq_id, n in runs for i in range(n)]
    if interleaved:
        tokens.sort(key=lambda token: token[1])
    now, of_batch = list(lengths), []
    for seq_id, _ in tokens:
        of_batch.append((seq_id, now[seq_id]))
        now[seq_id] += 1
    seq_ids, positions = (np.array(numbers, np.int32) for numbers in zip(*of_batch, strict=True))
    plan = cache.plan(seq_ids, positions)
    places = [
        [(page, slot) for page in plan.tables[seq_id] for slot in range(PAGE_TOKENS)][: now[seq_id]]
        for seq_id in range(3)
    ]
    assert len(set().union(*places)) == sum(map(len, places)), "two tokens have one place"
    return plan, places, of_batch


def seen_by(plan: BatchPlan) -> Iterator[tuple[int, list[Place], Place]]:
    """For each token of the batch: its index, the places that it attends to, in order, and its own place."""
    indices = np.arange(len(plan.pages))
    for run in plan.runs:
        pages = np.arange(run.pages.start, run.pages.stop) if isinstance(run.pages, slice) else run.pages
        places = [(int(page), slot) for page in pages for slot in range(PAGE_TOKENS)]
        rows = indices[run.rows]
        assert run.n_held == run.start + len(rows)
        assert len(pages) == -(-run.n_held // PAGE_TOKENS)
        for i, row in enumerate(rows.tolist()):
            end = run.n_held if run.bidirectional else run.start + i + 1
            yield row, places[:end], (int(plan.pages[row]), int(plan.slots[row]))


def check(plan: BatchPlan, expected: list[list[Place]], own_places: list[Place]) -> None:
    actual = {row: (places, place) for row, places, place in seen_by(plan)}
    assert sorted(actual) == list(range(len(expected))), "each token is in one run"
    for row, places in enumerate(expected):
        assert actual[row] == (places, own_places[row])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches, st.integers(0, 300), st.integers(0, 300))
def test_a_token_sees_its_sequence_up_to_itself_in_any_part_of_a_batch(batch, start, stop) -> None:
    plan, places, tokens = plan_of(batch)
    expected = [places[seq_id][: position + 1] for seq_id, position in tokens]
    own_places = [places[seq_id][position] for seq_id, position in tokens]
    check(plan, expected, own_places)
    start, stop = sorted((min(start, len(tokens)), min(stop, len(tokens))))
    check(part_of(plan, start, stop), expected[start:stop], own_places[start:stop])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches, st.sampled_from([64, 128]))
@example(((PAGE_TOKENS, 0, 0), [(0, 1)], False), PAGE_TOKENS)  # the first token of the second chunk
def test_a_token_sees_its_chunk_up_to_itself(batch, chunk) -> None:
    plan, places, tokens = plan_of(batch)
    expected = [places[seq_id][position // chunk * chunk : position + 1] for seq_id, position in tokens]
    chunked = in_chunks(plan, chunk)
    check(chunked, expected, [places[seq_id][position] for seq_id, position in tokens])
    assert (chunked is plan) == all(run.n_held <= chunk for run in plan.runs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches, st.lists(st.tuples(st.integers(0, 9), st.integers(2, 5)), max_size=8))
def test_a_token_sees_its_whole_block(batch, blocks) -> None:
    """Blocks are tokens of one sequence, one after another in the batch."""
    plan, places, tokens = plan_of((batch[0], batch[1], False))
    ahead, begin = np.zeros(len(tokens), np.int32), 0
    for n_before, n in blocks:
        begin += n_before
        inside = range(begin, begin + n - 1)
        if begin + n <= len(tokens) and all(tokens[i + 1] == (tokens[i][0], tokens[i][1] + 1) for i in inside):
            ahead[begin : begin + n] = np.arange(n)[::-1]
            begin += n
    expected = [
        places[seq_id][: position + 1 + int(n)] for (seq_id, position), n in zip(tokens, ahead.tolist(), strict=True)
    ]
    blocked = in_blocks(plan, ahead)
    check(blocked, expected, [places[seq_id][position] for seq_id, position in tokens])
    assert blocked.has_blocks == bool(ahead.any())


@given(st.integers(0, 4 * PAGE_TOKENS), st.integers(1, PAGE_TOKENS), st.integers(1, 2), st.integers(1, 5 * PAGE_TOKENS))
@settings(deadline=None)
def test_a_chunk_has_the_biases_of_its_keys(start: int, n: int, pages_in_chunk: int, n_biased: int) -> None:
    """The bias of a key is its position: the biases of a chunk are the positions of its keys that have a bias."""
    chunk, n_held = pages_in_chunk * PAGE_TOKENS, start + n
    bias = np.arange(min(n_biased, n_held), dtype=np.float32)
    pages = np.arange(-(-n_held // PAGE_TOKENS))
    codec = codec_of("f32", 2)
    tables = PagedKvCache([PageLayout(range(1), 1, 2, codec, codec)], 8, 1).tables
    plan = BatchPlan([Run(0, slice(0, n), start, n_held, pages, bias=bias)], pages[:0], pages[:0], tables)
    runs = in_chunks(plan, chunk).runs
    assert len(runs) == (n_held - 1) // chunk - start // chunk + 1
    for i, run in enumerate(runs):
        first = (start // chunk + i) * chunk
        assert run.bias.tolist() == bias[first : first + run.n_held].tolist()
