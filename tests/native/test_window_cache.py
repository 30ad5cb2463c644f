"""The cache of sliding windows against lists of tokens: no engine, and pages of two numbers per token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_core.context.payload import SectionWriter
from slm_native.kv import PAGE_TOKENS, BatchPlan, Held, PageLayout, WindowCache, codec_of

N_SEQ = 3
SLACK = 64  # tokens that can be truncated without a replay


class Model:
    """A cache of one layer, and the expected tokens of every sequence. A token is a number: its key and its value.

    Truncations and forks recompute a window as contexts do: from the start of a page, ``n_replayed`` tokens at a time.
    """

    def __init__(self, window: int, n_batch: int, n_replayed: int) -> None:
        codec = codec_of("f32", 2)
        layout = PageLayout(range(1), 1, 2, codec, codec)
        self.cache = WindowCache([layout], window, n_batch, N_SEQ, n_replayed)
        self.window, self.n_batch, self.n_replayed = window, n_batch, n_replayed
        self.tokens: list[list[int]] = [[] for _ in range(N_SEQ)]
        self.next_token = 1

    def append(self, counts: dict[int, int], *, fail: bool = False) -> None:
        seq_ids = np.repeat(list(counts), list(counts.values())).astype(np.int32)
        positions = np.concatenate([len(self.tokens[s]) + np.arange(n) for s, n in counts.items()]).astype(np.int32)
        new = np.arange(self.next_token, self.next_token + len(seq_ids))
        self.next_token += len(new)
        plan = self.cache.plan(seq_ids, positions)
        self.write(plan, new)
        after = {seq_id: [*self.tokens[seq_id], *new[seq_ids == seq_id].tolist()] for seq_id in counts}
        for run in plan.runs:
            np.testing.assert_array_equal(np.arange(len(new))[run.rows], np.flatnonzero(seq_ids == run.seq_id))
            self.check_run(plan, run.seq_id, after[run.seq_id], len(self.tokens[run.seq_id]))
        if not fail:
            self.cache.commit(plan)
            for seq_id, tokens in after.items():
                self.tokens[seq_id] = tokens

    def past(self, seq_id: int, length: int) -> Held:
        """The pages after the first ``length`` tokens."""
        pages = self.cache.held(seq_id, length)
        if pages is not None:
            return pages
        first = max(0, self.cache.first_exported(length) - (self.window - 1)) // PAGE_TOKENS
        pages, position = Held(first, ()), first * PAGE_TOKENS
        while position < length:
            stop = min(length, position + self.n_replayed)
            plan, pages = self.cache.replay(seq_id, pages, position, stop)
            assert [run.rows for run in plan.runs] == [slice(0, stop - position)]
            self.write(plan, self.tokens[seq_id][position:stop])
            self.check_run(plan, seq_id, self.tokens[seq_id][:stop], position, first * PAGE_TOKENS)
            position = stop
        return pages

    def copy(self, src: int, dst: int) -> None:
        """Export a sequence, and import it into an empty one."""
        length = len(self.tokens[src])
        payload = b"".join(self.cache.export(src, length))
        pages = self.cache.free(length)
        assert pages is not None, "there is room for the window of an empty sequence"
        SectionWriter(self.cache.sections(None, length)).write(memoryview(payload))
        writer = SectionWriter(self.cache.sections(pages.pages, length))
        writer.write(memoryview(payload))
        writer.check_whole()
        self.cache.put(dst, pages)

    def write(self, plan: BatchPlan, tokens) -> None:
        keys = np.stack([tokens, np.zeros(len(tokens))], axis=1)[:, None].astype(np.float32)
        self.cache.by_block[0].write(plan.pages, plan.slots, keys, -keys)

    def check_run(self, plan: BatchPlan, seq_id: int, tokens: list[int], start: int, earliest: int = 0) -> None:
        """Check that tokens from ``start`` on see their windows, which contain no token before ``earliest``."""
        run = next(run for run in plan.runs if run.seq_id == seq_id)
        first = len(tokens) - run.n_held  # the position of the first held token
        assert first + run.start == start
        visible = max(earliest, start - self.window + 1)
        self.check_tokens(run.pages, run.n_held, tokens, visible, first)

    def check_tokens(self, pages, n_held: int, tokens: list[int], visible: int, first: int) -> None:
        assert first % PAGE_TOKENS == 0
        assert first <= visible
        layer = self.cache.by_block[0]
        for sign, read in ((1, layer.keys), (-1, layer.values)):
            np.testing.assert_array_equal(
                read(pages, n_held)[visible - first :, 0, 0], sign * np.array(tokens[visible:])
            )

    def check(self) -> None:
        most = (self.window + 3 * PAGE_TOKENS - 3) // PAGE_TOKENS
        for seq_id, tokens in enumerate(self.tokens):
            assert self.cache.n_held(seq_id) <= most
            pages = self.cache.held(seq_id, len(tokens))
            assert pages is not None
            if tokens:
                first = pages.gone * PAGE_TOKENS
                visible = max(0, len(tokens) - self.window + 1)
                self.check_tokens(np.array(pages.pages, np.intp), len(tokens) - first, tokens, visible, first)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append all", "fail", "fork", "truncate", "drop", "copy"]),
        st.integers(0, N_SEQ - 1),
        st.floats(0, 1),
    ),
    max_size=30,
)


def apply(model: Model, operation) -> None:
    name, a, share = operation
    length, b = len(model.tokens[a]), (a + 1) % N_SEQ
    at = int(share * length)
    if name == "append":
        model.append({a: 1 + int(share * (model.n_batch - 1))})
    elif name in ("append all", "fail"):
        model.append(dict.fromkeys(range(N_SEQ), max(1, int(share * model.n_batch / N_SEQ))), fail=name == "fail")
    elif name == "fork" and at and not model.tokens[b]:
        model.cache.put(b, model.past(a, at))
        model.tokens[b] = model.tokens[a][:at]
    elif name == "truncate" and at < length:
        model.cache.put(a, model.past(a, at))
        del model.tokens[a][at:]
    elif name == "copy" and length and not model.tokens[b]:
        model.copy(a, b)
        model.tokens[b] = list(model.tokens[a])
    elif name == "drop":
        model.cache.drop(a)
        model.tokens[a] = []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(OPERATIONS, st.sampled_from([1, 2, 48, 64, 65, 66, 130]), st.sampled_from([3, 70, 200]))
def test_windows_hold_the_written_tokens_and_pages_never_run_out(operations, window, n_batch):
    model = Model(window, n_batch, n_replayed=64)
    for operation in operations:
        apply(model, operation)
        model.check()


@pytest.mark.parametrize(
    ("window", "n_batch", "n_replayed"), [(3, 3, 64), (67, 3, 256), (66, 3, 192), (131, 640, 64), (700, 3, 64)]
)
def test_pages_suffice_in_the_worst_case(window, n_batch, n_replayed):
    """All sequences hold as many pages as they can; then each is truncated far back, and all grow at once."""
    model, counts = Model(window, n_batch, n_replayed), []
    most = (window + 3 * PAGE_TOKENS - 3) // PAGE_TOKENS
    for _ in range(3 * PAGE_TOKENS + window):
        model.append(dict.fromkeys(range(N_SEQ), 1))
        counts.append(model.cache.n_held(0))
    assert max(counts) == most, "the documented number of pages is reached"
    while model.cache.n_held(0) < most:
        model.append(dict.fromkeys(range(N_SEQ), 1))
    n_pages = WindowCache.n_pages_for(window, n_batch, N_SEQ, n_replayed)
    assert model.cache.tables.n_free == n_pages - N_SEQ * most >= N_SEQ, "each may need a page before it frees one"
    model.append(dict.fromkeys(range(N_SEQ), n_batch // N_SEQ), fail=True)
    for seq_id in (1, 2):
        at = len(model.tokens[seq_id]) - PAGE_TOKENS - window - seq_id
        model.cache.put(seq_id, model.past(seq_id, at))
        del model.tokens[seq_id][at:]
        model.check()
    model.append(dict.fromkeys(range(N_SEQ), n_batch // N_SEQ))
    model.check()


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_no_more_pages_than_needed(n_seq_max):
    """Each sequence has room for its window, the slack, and a part of a page at both ends."""
    for window, n_batch, n_replayed in ((1, 1, 1), (48, 64, 256), (512, 2048, 64)):
        n_tokens = n_seq_max * (window - 1 + SLACK + 2 * (PAGE_TOKENS - 1))
        in_batch = n_batch + 2 * PAGE_TOKENS * n_seq_max
        in_replay = window - 1 + SLACK + 2 * (PAGE_TOKENS - 1) + n_replayed + 2 * PAGE_TOKENS
        n_pages = WindowCache.n_pages_for(window, n_batch, n_seq_max, n_replayed)
        assert n_pages <= (n_tokens + max(in_batch, in_replay)) / PAGE_TOKENS + 1


@pytest.mark.parametrize("window", [48, 130])
def test_a_window_far_back_is_recomputed(window):
    """From another page than the first one, in several parts, in any sequence."""
    model = Model(window, n_batch=200, n_replayed=64)
    for _ in range(3):
        model.append({2: 200})
    for at in (500, 436, 435, 300, 192, 191, 64, 1):
        model.cache.put(2, model.past(2, at))
        del model.tokens[2][at:]
        model.check()


def test_a_few_tokens_are_truncated_without_a_replay():
    model = Model(window=48, n_batch=100, n_replayed=64)
    for n in (100, 100, 37):
        model.append({0: n})
        length = len(model.tokens[0])
        assert model.cache.held(0, length - SLACK) is not None
        first = model.cache.tables.gone(0) * PAGE_TOKENS
        pages = model.cache.held(0, first + 47)
        assert pages is not None, "this window begins where the held pages do"
        assert len(pages.pages) == 1, "pages after the last token are not held"
        if first:
            assert model.cache.held(0, first + 46) is None, "the first token of this window is gone"


def test_earlier_tables_can_be_restored():
    model = Model(window=48, n_batch=100, n_replayed=64)
    model.append({0: 90})
    before, pages = model.cache.tables, model.cache.held(0, 90)
    model.cache.drop(0)
    model.cache.set_tables(before)
    assert model.cache.held(0, 90) == pages
    model.check()


def test_an_import_without_room_gets_no_pages():
    cache = Model(window=48, n_batch=100, n_replayed=64).cache
    cache.put(0, Held(0, tuple(cache.tables.free(cache.tables.n_free))))
    assert cache.free(10) is None
