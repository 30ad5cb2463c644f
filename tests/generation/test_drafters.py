"""Drafters: prompt lookup compared with brute force, draft models with their own answers; adaptive draft lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted import END, N_VOCAB, START, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.errors import ContextClosed, InvalidOption
from slm_core.generation.speculation import (
    DraftFunction,
    DraftModel,
    PromptLookup,
    Speculation,
    SuffixIndex,
    TranslatedDraftModel,
    draft_model,
    drafter_of,
    same_tokens,
)
from slm_core.generation.speculation.draft_length import AdaptiveDraftLength
from slm_core.generation.speculation.suffix import SuffixAutomaton
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def longest_suffix_length(text: Sequence[int], most: int) -> int:
    """Length of the longest suffix of ``text``, up to ``most``, that also begins earlier in it."""
    sizes = range(min(most, len(text) - 1), 0, -1)
    ends = (size for size in sizes if any(text[i : i + size] == text[-size:] for i in range(len(text) - size)))
    return next(ends, 0)


def is_continuation(text: Sequence[int], size: int, drafted: Sequence[int]) -> bool:
    """Whether ``drafted`` followed an earlier occurrence of the last ``size`` tokens, copied past the end of text."""
    for start in range(size, len(text)):
        if text[start - size : start] == text[-size:]:
            whole = list(text)
            for _ in drafted:
                whole.append(whole[start + len(whole) - len(text)])
            if whole[len(text) :] == list(drafted):
                return True
    return False


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.integers(1, 9))
def test_prompt_lookup_proposes_the_continuation_of_the_longest_match(text: list[int], n: int) -> None:
    lookup = PromptLookup(5, 2)
    size = longest_suffix_length(text, 5)
    drafted = lookup.draft(text, n).tokens
    assert len(drafted) == (n if size >= 2 else 0)
    assert not drafted or is_continuation(text, size, drafted)


@settings(deadline=None, max_examples=300)
@given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(1, 9))
def test_prompt_lookup_follows_growing_and_new_histories(histories: list[list[int]], n: int) -> None:
    lookup = PromptLookup(3, 1)
    for history in histories:
        for end in range(1, len(history) + 1):
            fresh = PromptLookup(3, 1).draft(history[:end], n)
            assert lookup.draft(history[:end], n) == fresh


@settings(deadline=None, max_examples=50)
@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=5), st.integers(1, 9))
def test_expected_tokens_are_looked_up_as_if_they_came_first(
    expected: list[int], histories: list[list[int]], n: int
) -> None:
    lookup = PromptLookup(3, 1, expected)
    for history in histories:
        for end in range(4, len(history) + 1):
            assert lookup.draft(history[:end], n) == PromptLookup(3, 1).draft([*expected, *history[:end]], n)
    assert expected == [] or lookup.settings() is None


def test_expected_tokens_are_drafted_in_an_empty_history() -> None:
    assert PromptLookup(expected=[1, 2, 3, 4, 5]).draft([9, 2, 3], 2).tokens == [4, 5]


def test_prompt_lookup_takes_the_last_occurrence() -> None:
    assert PromptLookup(2, 2).draft([1, 2, 3, 1, 2, 4, 1, 2], 1).tokens == [4]


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_the_automaton_finds_the_longest_suffix_with_an_earlier_occurrence(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        length, place = automaton.seen_before()
        assert length == longest_suffix_length(text[:end], end)
        assert length == 0 or (place < end and text[place - length : place] == text[end - length : end])


@settings(deadline=None, max_examples=200)
@given(TEXTS, st.integers(1, 9))
def test_a_suffix_index_proposes_the_continuation_of_the_longest_suffix(text: list[int], n: int) -> None:
    drafted = SuffixIndex(2).draft(text, n).tokens
    size = longest_suffix_length(text, len(text))
    assert len(drafted) == (n if size >= 2 else 0)
    assert not drafted or is_continuation(text, size, drafted)


def test_a_suffix_index_proposes_from_other_histories() -> None:
    index = SuffixIndex(corpus=[[1, 2, 3, 4, 5, 6]])
    assert index.draft([9, 2, 3], 2).tokens == [4, 5]
    index.draft([10, 11, 12, 13, 14], 1)
    assert index.draft([8, 8, 11, 12], 5).tokens == [13, 14], "up to the end of that history"


@settings(deadline=None, max_examples=100)
@given(st.lists(TEXTS, min_size=2, max_size=6))
def test_a_suffix_index_never_proposes_across_two_histories(histories: list[list[int]]) -> None:
    index = SuffixIndex(1)
    for history in histories:
        drafted = index.draft(history, 20).tokens
        assert all(token >= 0 for token in drafted)


def test_a_suffix_index_forgets_the_older_half() -> None:
    index = SuffixIndex(max_tokens=256)
    history = np.random.default_rng(1).integers(0, 50, 4000).tolist()
    for end in range(0, 4000, 40):
        index.draft(history[:end], 4)
        assert len(index._automaton.text) <= 256 + 40
    assert index.draft([*history[:3960], *history[3900:3910]], 3).tokens == history[3910:3913], (
        "recent tokens are found"
    )
    assert index.draft([*history[:3960], *history[100:110]], 3).tokens != history[110:113], "old tokens are forgotten"


@pytest.mark.parametrize(
    "make",
    [
        lambda: PromptLookup(0, 0),
        lambda: PromptLookup(2, 3),
        lambda: PromptLookup(17),
        lambda: SuffixIndex(0),
        lambda: SuffixIndex(max_tokens=10),
    ],
)
def test_sizes_of_drafters_out_of_range_are_refused(make: object) -> None:
    with pytest.raises(InvalidOption, match="accepted"):
        make()


@pytest.mark.parametrize("drafter", [PromptLookup(5, 3), SuffixIndex(4, max_tokens=1000)])
def test_settings_rebuild_the_same_drafter(drafter: PromptLookup | SuffixIndex) -> None:
    twin = drafter_of(drafter.settings())
    assert (type(twin), twin.settings()) == (type(drafter), drafter.settings())


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"drafter": "code"},
        {"drafter": "prompt_lookup", "max_ngram": "3"},
        {"drafter": "prompt_lookup", "more": 1},
        {"drafter": "prompt_lookup", "max_ngram": 10**9},
        {"drafter": "suffix_index", "max_tokens": True},
    ],
)
def test_invalid_settings_are_refused(meta: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        drafter_of(meta)


# Models.


def draft_context(n_ctx: int = 400, n_batch: int = 16) -> ScriptedContext:
    return ScriptedContext(n_ctx=n_ctx, n_batch=n_batch, n_seq_max=1)


def tokens_of_draft_model(text: str, sampling: Sampling, n: int) -> list[int]:
    session = Session(draft_context(), ByteVocab())
    session.append(text)
    return list(session.generate(sampling).run().tokens)[:n]


def test_a_draft_is_the_answer_of_the_draft_model_alone() -> None:
    drafter = DraftModel(draft_context(), ByteVocab())
    for text in ("abc", "abcdef", "abx", "q", "abcdefgh"):
        expected = tokens_of_draft_model(text, Sampling(temperature=0, max_tokens=5), 5)
        assert list(drafter.draft(list(text.encode()), 5).tokens) == expected


def test_a_draft_model_decodes_only_new_tokens() -> None:
    drafter = DraftModel(context := draft_context(), ByteVocab())
    history = list(b"abcdefgh")
    drafted = drafter.draft(history, 4).tokens
    before = context.n_decoded
    drafter.draft([*history, *drafted[:2], 7], 4)
    assert context.n_decoded - before == 1 + 3, "one new token, and three of the draft"


def test_reading_a_long_history_can_be_cancelled_before_each_batch() -> None:
    drafter = DraftModel(context := draft_context(n_batch=8), ByteVocab())
    history = list(b"x" * 20)
    n_decoded: list[int] = []

    def cancelled() -> bool:
        n_decoded.append(context.n_decoded)
        return len(n_decoded) == 3

    assert drafter.draft(history, 2, cancelled).tokens == ()
    assert n_decoded == [0, 8, 16]
    assert len(drafter.draft(history, 2).tokens) == 2
    assert context.n_decoded == 16 + 4 + 1, "tokens decoded before the cancellation are kept"


def test_a_draft_is_empty_without_room_and_for_unknown_tokens() -> None:
    class Small(ByteVocab):
        size = 100

    assert DraftModel(draft_context(n_ctx=8), ByteVocab()).draft(list(b"1234567"), 3).tokens == ()
    assert list(DraftModel(draft_context(n_ctx=9), ByteVocab()).draft(list(b"1234567"), 3).tokens) != []
    assert DraftModel(draft_context(), Small()).draft([1, 200], 3).tokens == ()


def test_a_draft_ends_with_eog() -> None:
    drafter = DraftModel(ScriptedContext(lambda data: END, n_seq_max=1), ByteVocab())
    assert drafter.draft([1, 2], 5).tokens == [END]


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=1)])
def test_tokens_missing_in_the_target_vocabulary_are_never_drafted(sampling: Sampling | None) -> None:
    class Fewer(ByteVocab):
        size = 200

    drafter = draft_model(ScriptedContext(lambda data: 255, n_seq_max=1), ByteVocab(), Fewer(), sampling=sampling)
    drafted = drafter.draft([1, 2, 3], 6).tokens
    assert len(drafted) == 6
    assert max(drafted) < 200


def test_sampled_drafts_have_the_chains_probabilities_and_a_draw_per_position() -> None:
    options = Sampling(temperature=1.3, top_k=20, seed=5, repeat_penalty=1.2)
    proposal = DraftModel(draft_context(), ByteVocab(), sampling=options).draft(list(b"abc"), 6)
    session = Session(draft_context(), ByteVocab())
    session.append("abc")
    chain = SamplerChain.for_vocab(options, session.vocab)
    chain.set_history(list(b"abc"))
    for token, (ids, probabilities) in zip(proposal.tokens, proposal.draft_probabilities, strict=True):
        expected_ids, expected = chain.distribution(session.next_logits())
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(probabilities, expected)
        chain.accept(token)
        session.append_tokens([token])
    again = DraftModel(draft_context(), ByteVocab(), sampling=options)
    again.draft(list(b"zzz"), 6)
    assert again.draft(list(b"abc"), 6).tokens == proposal.tokens
    other = Sampling(temperature=1.3, top_k=20, seed=6, repeat_penalty=1.2)
    assert DraftModel(draft_context(), ByteVocab(), sampling=other).draft(list(b"abc"), 6).tokens != proposal.tokens


def test_sampled_drafts_occur_with_their_probabilities() -> None:
    options = Sampling(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, seed=5)
    drafter = DraftModel(draft_context(), ByteVocab(), sampling=options)
    counts: dict[int, int] = {}
    for seed in range(600):
        drafter._seed = seed
        proposal = drafter.draft([1, 2, 3], 1)
        counts[proposal.tokens[0]] = counts.get(proposal.tokens[0], 0) + 1
    ((ids, probabilities),) = proposal.draft_probabilities
    expected = 600 * probabilities
    statistic = sum((counts.get(int(token), 0) - e) ** 2 / e for token, e in zip(ids, expected, strict=True))
    assert statistic < 2 + 6 * 2, "two degrees of freedom: mean 2, standard deviation 2"


def test_a_draft_model_that_cannot_truncate_is_refused() -> None:
    with pytest.raises(InvalidOption, match="edit level REPLAY"):
        DraftModel(ScriptedContext(level=EditLevel.REPLAY), ByteVocab())


def test_a_function_may_return_more_tokens_than_a_draft_has() -> None:
    assert DraftFunction(lambda tokens, n: range(n + 3)).draft([1], 2).tokens == (0, 1)


def test_a_closed_drafter_closes_its_context() -> None:
    context = draft_context()
    with DraftModel(context, ByteVocab()):
        pass
    with pytest.raises(ContextClosed):
        context.length(0)


# Translation.


class PairVocab(ByteVocab):
    """Another vocabulary: byte tokens with ids moved up by one, and tokens for a few pairs of letters."""

    pairs = (b"an", b"na", b"en", " é".encode()[:2])
    size = N_VOCAB + 1 + len(pairs)
    eos, eog_ids = END + 1, frozenset({END + 1})

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for token in super().encode(text, add_special=add_special, parse_special=parse_special):
            pair = bytes([ids[-1] - 1, token]) if ids and 0 < ids[-1] <= 256 and token < 256 else b""
            if pair in self.pairs:
                ids[-1] = N_VOCAB + 1 + self.pairs.index(pair)
            else:
                ids.append(token + 1)
        return ids

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        if id > N_VOCAB:
            return self.pairs[id - N_VOCAB - 1]
        return b"" if id == 0 else super().token_bytes(id - 1, special=special)


class PairContext(ScriptedContext):
    """A model with ``PairVocab`` that continues the alphabet, and ends after z."""

    def _row(self, state: object) -> np.ndarray:
        data = b"".join(PairVocab().token_bytes(token, special=True) for token, _ in state)
        row = np.zeros(N_VOCAB, np.float32)
        row[END + 1 if data[-1:] == b"z" else 2 + data[-1]] = 1
        return row


def translated_drafter() -> TranslatedDraftModel:
    drafter = draft_model(PairContext(n_seq_max=1, n_batch=64), PairVocab(), ByteVocab())
    assert isinstance(drafter, TranslatedDraftModel)
    return drafter


def test_translated_drafts_are_the_text_of_the_draft_model() -> None:
    drafter = translated_drafter()
    for text in ("banana a", "banana abc", "banan", "é m", "banana anana"):
        last = text.encode()[-1]
        expected = bytes(range(last + 1, last + 5)) if last < 128 else b""
        assert bytes(drafter.draft(list(text.encode()), 4).tokens) == expected[:4], text


def test_eog_is_translated_to_eog() -> None:
    assert translated_drafter().draft(list(b"wx"), 4).tokens == [ord("y"), ord("z"), END]


def test_a_draft_without_eog_is_translated_without_eog() -> None:
    drafted = translated_drafter().draft(list(b"}"), 4).tokens
    assert bytes(drafted) == b"~\x7f", "two of the four bytes are no text"


def test_an_incomplete_character_has_no_draft() -> None:
    drafter = translated_drafter()
    data = "a🙂b".encode()
    drafted = [len(drafter.draft(list(data[:end]), 2).tokens) for end in range(1, len(data) + 1)]
    assert drafted[:4] == [2, 0, 0, 0]
    assert drafted[5] == 2


def test_the_translation_follows_any_change_of_the_history() -> None:
    drafter = translated_drafter()
    texts = ["a🙂b banana", "a🙂c", "a🙃c", "a🙂", "banana a🙂 nab", "banana a", "\xff\xfe"]
    for text in [*texts, *reversed(texts)]:
        for data in (text.encode(), text.encode()[:-1]):
            drafter._follow(list(data))
            fresh = translated_drafter()
            fresh._follow(list(data))
            assert drafter._tokens == list(data) == fresh._tokens
            assert PairVocab().decode(drafter._translated) == PairVocab().decode(fresh._translated)
            assert drafter._pending == fresh._pending


def test_bytes_that_are_no_text_do_not_stop_drafts() -> None:
    for text in (b"a\xff\xfebc", b"\xffbc", "é".encode()[:1] + b"bc"):
        assert bytes(translated_drafter().draft(list(text), 3).tokens) == b"def", text


def test_control_tokens_are_translated_by_their_names() -> None:
    drafter = translated_drafter()
    drafter._follow([START, ord("a")])
    assert drafter._translated == [START + 1, ord("a") + 1]


def test_different_vocabularies_need_a_translated_draft_model() -> None:
    assert same_tokens(ByteVocab(), ByteVocab())
    assert not same_tokens(ByteVocab(), PairVocab())
    assert isinstance(draft_model(draft_context(), ByteVocab(), ByteVocab()), DraftModel)
    with pytest.raises(InvalidOption, match="sampling"):
        draft_model(draft_context(), PairVocab(), ByteVocab(), sampling=Sampling())


class StrictVocab(ByteVocab):
    """A vocabulary that has no bytes for ids outside it."""

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        if not 0 <= id < self.size:
            raise AssertionError(f"token {id} of {self.size}")
        return super().token_bytes(id, special=special)


class LongerVocab(StrictVocab):
    """The same tokens, and three more."""

    size = N_VOCAB + 3


def test_a_vocabulary_may_have_more_tokens_at_its_end() -> None:
    assert same_tokens(StrictVocab(), LongerVocab())
    assert same_tokens(LongerVocab(), StrictVocab())


# The length of drafts.


def play(
    draft_length: AdaptiveDraftLength, *, acceptance: float, verify_s: float, draft_s: float, rounds: int = 200
) -> list[int]:
    """Draft lengths of rounds: a decode of n tokens takes 1 + (n - 1) * verify_s, a drafted token is right with
    probability ``acceptance``."""
    random, lengths = np.random.default_rng(1), []
    for _ in range(rounds):
        n = draft_length.length()
        lengths.append(n)
        if n:
            draft_length.drafted(n, n * draft_s)
        draft_length.decoded(n + 1, 1 + n * verify_s)
        hits = (random.random(n) < acceptance).tolist()
        draft_length.verified(hits[: hits.index(False) + 1] if False in hits else hits)
    return lengths


def tokens_per_second(k: int, *, acceptance: float, verify_s: float, draft_s: float) -> float:
    return sum(acceptance**i for i in range(k + 1)) / (1 + k * verify_s + k * draft_s)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("verify_s", [0.02, 0.2])
@pytest.mark.parametrize("draft_s", [0.0, 0.1])
def test_adaptive_lengths_approach_the_best_length(acceptance: float, verify_s: float, draft_s: float) -> None:
    costs = {"acceptance": acceptance, "verify_s": verify_s, "draft_s": draft_s}
    lengths = play(AdaptiveDraftLength(16, adaptive=True), **costs)[50:]
    best = max(tokens_per_second(k, **costs) for k in range(17))
    reached = np.mean([tokens_per_second(k, **costs) for k in lengths])
    assert reached > 0.9 * best


def test_drafting_stops_if_it_costs_time_and_is_tried_ever_more_rarely() -> None:
    draft_length = AdaptiveDraftLength(8, adaptive=True)
    lengths = play(draft_length, acceptance=0.0, verify_s=0.3, draft_s=0.1, rounds=1000)
    probes = [i for i, n in enumerate(lengths) if n]
    assert not draft_length.on
    assert draft_length.n_switched_off == 1
    assert len(probes) < 20
    gaps = np.diff(probes)[-5:]
    assert (gaps[1:] >= gaps[:-1]).all(), "after each try that does not pay, the next try comes later"


def test_drafting_resumes_when_it_saves_time_again() -> None:
    draft_length = AdaptiveDraftLength(8, adaptive=True)
    play(draft_length, acceptance=0.0, verify_s=0.3, draft_s=0.1, rounds=60)
    assert not draft_length.on
    lengths = play(draft_length, acceptance=1.0, verify_s=0.05, draft_s=0.01, rounds=200)
    assert draft_length.on
    assert draft_length.n_switched_on == 1
    assert np.mean(lengths[-50:]) > 6


def test_a_fixed_length_stays() -> None:
    assert set(play(AdaptiveDraftLength(5, adaptive=False), acceptance=0, verify_s=9, draft_s=9, rounds=30)) == {5}


def test_errors_of_options_list_the_accepted_values() -> None:
    assert Speculation(PromptLookup()).n_max == 16
