"""All options of beam search, completions, drafts and shifts do what is documented; an option without a case fails."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from scripted import END, START, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.constraints import Regex
from slm_core.errors import ContextFull
from slm_core.generation import Beams, FinishReason, StoppingAction
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import DraftFunction, PromptLookup, Speculation, SuffixIndex, source
from slm_core.sampling import Sampling

WARM = Sampling(temperature=1.2, seed=3, max_tokens=6)


def session(n_ctx: int = 400) -> Session:
    """A session at a prompt."""
    at_prompt = Session(ScriptedContext(n_ctx=n_ctx, n_seq_max=12, n_batch=32), ByteVocab(), sampling=WARM)
    at_prompt.append("prompt>")
    return at_prompt


@functools.cache
def log_probabilities(tokens: tuple[int, ...]) -> np.ndarray:
    """The model's log probabilities after the prompt and these tokens, float64 [V]."""
    s = session()
    s.append_tokens(list(tokens))
    row = s.next_logits().astype(np.float64)
    shifted: np.ndarray = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


# Beams.


def checked_search(**options: object) -> list[tuple[object, ...]]:
    """The hypotheses of a beam search, after a check that they equal those of ``plain_search``."""
    beams = Beams(**{"width": 4, "n_best": 2, "max_tokens": 6, **options})
    hypotheses = session().beam_search(beams).hypotheses
    expected = plain_search(beams)
    assert [(h.tokens, h.text, h.finish_reason) for h in hypotheses] == [e[:3] for e in expected]
    # Rows are float32: one ulp of a logit below 8 is 5e-7, and a score adds up to six log probabilities.
    assert [h.score for h in hypotheses] == pytest.approx([score for *_, score in expected], abs=1e-5)
    for h in hypotheses:
        logprobs = [log_probabilities(h.tokens[:i])[token] for i, token in enumerate(h.tokens)]
        assert h.logprobs == pytest.approx(logprobs, abs=1e-5)
    return [e[:3] for e in expected]


def checked_search_of_short_answers(**options: object) -> list[tuple[object, ...]]:
    """Like ``checked_search``, with a bias that lets answers end at once."""
    return checked_search(**{"width": 3, "n_best": 3, "max_tokens": 5, "logit_bias": {END: 4.0}, **options})


Finished = tuple[tuple[int, ...], str, FinishReason, float]


def plain_search(beams: Beams) -> list[Finished]:
    """Beam search in groups (Vijayakumar et al., arXiv 1610.02424), with all candidates ranked."""
    size = beams.width // beams.n_groups
    groups: list[list[tuple[tuple[int, ...], float]]] = [[((), 0.0)] for _ in range(beams.n_groups)]
    finished: list[list[Finished]] = [[] for _ in groups]
    for n_tokens in range(1, beams.max_tokens + 1):
        chosen: Counter[int] = Counter()
        for g in [g for g, live in enumerate(groups) if live]:
            going, ended = extended_group(beams, groups[g], chosen)
            finished[g] = sorted(finished[g] + ended, key=lambda e: -e[3])[:size]
            groups[g] = going[:size]
            chosen.update([tokens[-1] for tokens, _ in groups[g]] or [e[0][-1] for e in ended])
            full = len(finished[g]) == size
            if groups[g] and full:
                hoped = beams.max_tokens if beams.early_stopping == "never" else n_tokens
                best = max(score for _, score in groups[g]) / hoped**beams.length_penalty
                groups[g] = [] if beams.early_stopping is True or best <= finished[g][-1][3] else groups[g]
    return sorted((e for group in finished for e in group), key=lambda e: -e[3])[: beams.n_best]


def extended_group(
    beams: Beams, live: Sequence[tuple[tuple[int, ...], float]], chosen: Counter[int]
) -> tuple[list[tuple[tuple[int, ...], float]], list[Finished]]:
    """The live continuations of a group, best first, and the finished ones among its best."""
    size, going, ended = beams.width // beams.n_groups, [], []
    candidates = []
    for tokens, score in live:
        for token, logprob in enumerate(log_probabilities(tokens)):
            bias = beams.logit_bias.get(token, 0.0) - chosen[token] * beams.diversity_penalty
            if token != END or len(tokens) >= beams.min_tokens:
                candidates.append(((*tokens, token), score + float(logprob) + bias))
    for rank, (tokens, score) in enumerate(sorted(candidates, key=lambda c: -c[1])[: 2 * size]):
        text = ByteVocab().decode(tokens)
        stops = [text.index(stop) for stop in beams.stop if stop in text]
        if tokens[-1] != END and not stops and len(tokens) < beams.max_tokens:
            going.append((tokens, score))
        elif rank < size:
            reason = FinishReason.STOP if stops or tokens[-1] == END else FinishReason.LENGTH
            ended.append(
                (tokens, text[: min(stops, default=None)], reason, score / len(tokens) ** beams.length_penalty)
            )
    return going, ended


def search_with_words(**options: object) -> list[tuple[object, ...]]:
    """The hypotheses of a search with forced words: each contains them, with the model's log probability."""
    beams = Beams(**{"width": 4, "n_best": 2, "max_tokens": 6, **options})
    hypotheses = session().beam_search(beams).hypotheses
    assert len(hypotheses) == beams.n_best
    for h in hypotheses:
        assert all(word in h.text for word in beams.force_words)
        total = sum(log_probabilities(h.tokens[:i])[token] for i, token in enumerate(h.tokens))
        assert h.score == pytest.approx(total / len(h.tokens), abs=1e-5)
    return [(h.tokens, h.text, h.finish_reason) for h in hypotheses]


GROUPS = {"n_groups": 2, "diversity_penalty": 0.5}
BEAMS: Mapping[str, tuple[Callable[..., object], Mapping[str, object], Mapping[str, object]]] = {
    "width": (checked_search, {}, {"width": 2}),
    "n_best": (checked_search, {}, {"n_best": 3}),
    "length_penalty": (checked_search_of_short_answers, {}, {"length_penalty": 3.0}),
    "early_stopping": (
        checked_search_of_short_answers,
        {"length_penalty": 2.0, "logit_bias": {END: 3.0}},
        {"early_stopping": True},
    ),
    "n_groups": (checked_search, GROUPS, {"n_groups": 4}),
    "diversity_penalty": (checked_search, {**GROUPS, "n_best": 4}, {"diversity_penalty": 1e-6}),
    "max_tokens": (checked_search, {}, {"max_tokens": 3}),
    "min_tokens": (checked_search_of_short_answers, {}, {"min_tokens": 3}),
    "stop": (checked_search, {}, {"stop": tuple(map(chr, range(128)))}),
    "logit_bias": (checked_search, {}, {"logit_bias": {65: 9.0}}),
    "force_words": (search_with_words, {}, {"force_words": ("ab",)}),
}
"""For each option: the checked behaviour, the other options of the case, and a value that changes the result."""


def test_every_option_of_a_search_has_a_case() -> None:
    assert {field.name for field in dataclasses.fields(Beams)} == set(BEAMS)


@pytest.mark.parametrize("name", BEAMS)
def test_options_of_a_search_do_what_is_documented(name: str) -> None:
    behaviour, others, change = BEAMS[name]
    assert behaviour(**{**others, **change}) != behaviour(**others)


def test_each_value_of_early_stopping_finds_other_answers() -> None:
    options = {"length_penalty": 2.5, "logit_bias": {END: 4.0}}
    results = [checked_search_of_short_answers(**options, early_stopping=early) for early in (True, False, "never")]
    assert len(set(map(tuple, results))) == 3


# Drafts.


def speculation_stats(monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[int, int, int]:
    """Rounds, drafted tokens and accepted tokens of an answer of 36 tokens that repeats its prompt, "abcd".

    A decode takes one second per token, so that rejected drafts never save time.
    """
    repeated = b"abcdabcdabcdabcdabcdabcdabcdabcdabcdabcd"
    context = ScriptedContext(lambda data: repeated[len(data) - 4], n_batch=64)
    monkeypatch.setattr(source, "time", SimpleNamespace(perf_counter=lambda: float(context.n_decoded)))
    s = Session(context, ByteVocab())
    s.append("abcd")
    speculation = Speculation(**{"drafter": PromptLookup(), "n_max": 4, "adaptive": False, **options})
    stats = s.generate(Sampling(temperature=0, max_tokens=36), speculation=speculation).run().speculation
    assert stats is not None
    return stats.rounds, stats.drafted, stats.accepted


def wrong(tokens: object, n: int) -> list[int]:
    return [1] * n


def all_accepted(n_max: int) -> tuple[int, int, int]:
    """After "abcd", "a" and "b", prompt lookup finds the rest: a round gives its draft and one more token."""
    rounds = math.ceil((36 - 2) / (n_max + 1))
    return rounds, 36 - 2 - rounds, 36 - 2 - rounds


def none_accepted(n_max: int) -> tuple[int, int, int]:
    """A round gives one token; its draft is limited by ``max_tokens``. The first and the last round have no draft."""
    drafts = [min(n_max, n_left - 1) for n_left in range(35, 1, -1)]
    return len(drafts), sum(drafts), 0


DRAFTS: Mapping[str, tuple[Mapping[str, object], tuple[int, int, int]]] = {
    "drafter": ({"drafter": DraftFunction(wrong)}, none_accepted(4)),
    "n_max": ({"n_max": 8}, all_accepted(8)),
    # The first draft, of one token, does not pay. Later drafts are compared with the answer, and are all wrong.
    "adaptive": ({"drafter": DraftFunction(wrong), "adaptive": True}, (1, 1, 0)),
}
"""For each option: a case, and its rounds, drafted tokens and accepted tokens."""


def test_every_option_of_drafts_has_a_case() -> None:
    assert {field.name for field in dataclasses.fields(Speculation)} == set(DRAFTS)


@pytest.mark.parametrize("name", DRAFTS)
def test_options_of_drafts_do_what_is_documented(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, expected = DRAFTS[name]
    assert speculation_stats(monkeypatch) == all_accepted(4)
    assert speculation_stats(monkeypatch, **options) == expected


def continuations(texts: Sequence[Sequence[int]], end: Sequence[int], n: int) -> set[tuple[int, ...]]:
    """The continuations of each occurrence of ``end`` in the texts. Only the last text is copied on past its end."""
    results = set()
    for text in texts:
        for start in range(len(end), len(text)):
            if tuple(text[start - len(end) : start]) == tuple(end):
                copied = list(text)
                while text is texts[-1] and len(copied) < start + n:
                    copied.append(copied[start + len(copied) - len(text)])
                results.add(tuple(copied[start : start + n]))
    return results


def documented_drafts(
    text: Sequence[int],
    *,
    max_ngram: int,
    min_ngram: int,
    max_tokens: int = 2**16,
    corpus: Sequence[Sequence[int]] = (),
    expected: Sequence[int] = (),
) -> set[tuple[int, ...]]:
    """The possible drafts: continuations of the longest suffix with ``max_ngram`` down to ``min_ngram`` tokens."""
    text = [*expected, *text]
    remembered = text if len(text) < max_tokens else text[-max_tokens // 2 :]
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        if drafts := continuations([*corpus, remembered], text[-size:], 4):
            return drafts
    return {()}


DRAFTERS: Mapping[type[PromptLookup | SuffixIndex], Mapping[str, Mapping[str, object]]] = {
    PromptLookup: {
        "max_ngram": {"max_ngram": 2},
        "min_ngram": {"min_ngram": 4},
        "expected": {"expected": list(b"xyz, which is said elsewhere")},
    },
    SuffixIndex: {
        "min_match": {"min_match": 6},
        "max_tokens": {"max_tokens": 256},
        "corpus": {"corpus": [list(b"xyz, which is said elsewhere")]},
    },
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_option_of_a_drafter_has_a_case(kind: type[PromptLookup | SuffixIndex]) -> None:
    assert set(inspect.signature(kind).parameters) == set(DRAFTERS[kind])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, options in DRAFTERS.items() for name in options])
def test_options_of_a_drafter_do_what_is_documented(kind: type[PromptLookup | SuffixIndex], name: str) -> None:
    often = [*b"said long ago, and at length: ", *bytes(range(48, 123)) * 5]
    texts = [b"vwxyz! yz? vwxyz", b"xy! zzz xy", b"is said: xyz", bytes([*often, *b"?", *b"ago, and at length"])]
    texts.append(bytes([*bytes(range(48, 123)) * 3, *b"!said elsewhere!", *range(128, 208), *b"!said else"]))
    defaults = {"max_ngram": 4, "min_ngram": 2} if kind is PromptLookup else {"max_ngram": 999, "min_ngram": 2}
    drafts = []
    for options in ({}, DRAFTERS[kind][name]):
        documented = {**defaults, **{"min_ngram" if key == "min_match" else key: v for key, v in options.items()}}
        drafts.append([tuple(kind(**options).draft(list(text), 4).tokens) for text in texts])
        for text, draft in zip(texts, drafts[-1], strict=True):
            assert draft in documented_drafts(list(text), **documented), f"{kind.__name__}({options}) after {text!r}"
    assert drafts[0] != drafts[1]


# Shifts.


@pytest.mark.parametrize("options", [{}, {"keep": 9}, {"share": 0.2}], ids=str)
def test_the_options_of_a_shift_determine_the_dropped_tokens(options: dict[str, float]) -> None:
    assert set(options) <= {field.name for field in dataclasses.fields(TokenShift)} == {"keep", "share"}
    n_ctx, (keep, share) = 40, (options.get("keep", 4), options.get("share", 0.5))
    s = session(n_ctx)
    history, n_dropped = list(s.tokens), 0
    answer = s.generate(Sampling(temperature=0, max_tokens=60), shift=TokenShift(**options)).run()
    for token in answer.tokens:
        if len(history) > n_ctx:  # the last token does not fit
            end = keep + math.ceil((len(history) - keep) * share)
            n_dropped += end - keep
            del history[keep:end]
        history.append(token)
    assert list(s.tokens) == history
    assert answer.overflowed is not None
    assert answer.overflowed.n_tokens == n_dropped > 0


# Parameters of methods.


def check_beams() -> None:
    assert len(session().beam_search(Beams(3, n_best=3, max_tokens=2)).hypotheses) == 3


def check_constraint() -> None:
    assert session().beam_search(constraint=Regex("[ab]{3}")).text.strip("ab") == ""


def check_special() -> None:
    beams = Beams(2, max_tokens=2, logit_bias={START: 99.0})
    assert [session().beam_search(beams, special=special).text for special in (False, True)] == ["", "<|start|>" * 2]


def check_cancelled() -> None:
    assert session().beam_search(cancelled=lambda: True).hypotheses == ()


def check_progress() -> None:
    reports: list[tuple[int, int]] = []
    session().beam_search(Beams(2, max_tokens=2), progress=lambda done, total: reports.append((done, total)))
    assert reports == [(0, 7), (7, 7)]


def completions(n: int = 2, sampling: Sampling = WARM, **options: object) -> list[tuple[int, ...]]:
    return [completion.answer.tokens for completion in session().completions(n, sampling, **options).run()]


def check_n() -> None:
    assert len(completions(3)) == 3


def check_sampling() -> None:
    greedy = Sampling(temperature=0, max_tokens=2)
    assert completions(sampling=greedy) == [session().generate(greedy).run().tokens] * 2


def check_best_of() -> None:
    def mean_logprob(tokens: tuple[int, ...]) -> float:
        return float(np.mean([log_probabilities(tokens[:i])[token] for i, token in enumerate(tokens)]))

    assert completions(2, best_of=11) == sorted(completions(11), key=mean_logprob, reverse=True)[:2]


def check_completions_logits_processors() -> None:
    def no_a(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[ord("a")] = -np.inf
        return logits

    banned = Sampling(temperature=1.2, seed=3, max_tokens=6, logit_bias={ord("a"): -np.inf})
    completions = session().completions(2, logits_processors=[no_a]).run()
    assert [c.answer.tokens for c in completions] == [c.answer.tokens for c in session().completions(2, banned).run()]


def check_stopping_criteria() -> None:
    assert [len(t) for t in completions(stopping_criteria=[lambda event, draft: StoppingAction.STOP])] == [1, 1]


def check_completions_constraint() -> None:
    assert all(bytes(tokens).strip(b"ab") == b"" for tokens in completions(constraint=Regex("[ab]{5}")))


def check_completions_special() -> None:
    sampling = Sampling(temperature=0, max_tokens=2, logit_bias={START: 99.0})
    texts = [session().completions(1, sampling, special=special).run()[0].answer.text for special in (False, True)]
    assert texts == ["", "<|start|>" * 2]


def check_timeout() -> None:
    (completion,) = session().completions(1, timeout=1e-9).run()
    assert completion.answer.timed_out


def check_on_event() -> None:
    indices: list[int] = []
    session().completions(2, on_event=lambda event: indices.append(event.index)).run()
    assert indices == [0, 1] * 6


def check_completions_progress() -> None:
    reports: list[tuple[int, int]] = []
    session().completions(2, progress=lambda done, total: reports.append((done, total))).run()
    assert reports == [(0, 7), (7, 7)]


def check_completions_replaced() -> None:
    """Options of one call replace those of the sampling."""
    options: dict[str, object] = {"max_tokens": 3, "temperature": 1.7, "top_p": 0.9, "seed": 8, "stop": ("x", "y", "z")}

    def changed(**values: object) -> Sampling:
        return Sampling.from_dict({**WARM.to_dict(), **values})

    for name, value in options.items():
        assert completions(**{name: value}) == completions(sampling=changed(**{name: value}))
    assert completions(**options) == completions(sampling=changed(**options)) != completions()


OF_SEARCH = {
    "beams": check_beams,
    "constraint": check_constraint,
    "special": check_special,
    "cancelled": check_cancelled,
    "progress": check_progress,
}
OF_COMPLETIONS = {
    "n": check_n,
    "sampling": check_sampling,
    "best_of": check_best_of,
    **dict.fromkeys(("max_tokens", "temperature", "top_p", "seed", "stop"), check_completions_replaced),
    "logits_processors": check_completions_logits_processors,
    "stopping_criteria": check_stopping_criteria,
    "constraint": check_completions_constraint,
    "special": check_completions_special,
    "timeout": check_timeout,
    "on_event": check_on_event,
    "progress": check_completions_progress,
}


@pytest.mark.parametrize(
    ("method", "checks"),
    [(Session.beam_search, OF_SEARCH), (Session.completions, OF_COMPLETIONS)],
    ids=["beam_search", "completions"],
)
def test_every_parameter_has_a_check(method: Callable[..., object], checks: Mapping[str, object]) -> None:
    assert [name for name in inspect.signature(method).parameters if name != "self"] == list(checks)


@pytest.mark.parametrize("check", [*OF_SEARCH.values(), *OF_COMPLETIONS.values()], ids=lambda check: check.__name__)
def test_each_parameter_does_what_is_documented(check: Callable[[], None]) -> None:
    check()


def test_a_full_context_is_an_error_without_shifts() -> None:
    with pytest.raises(ContextFull):
        session(n_ctx=10).append("x" * 20)


def test_scores_have_the_requested_number_of_top_tokens() -> None:
    assert [len(places) for places in session().score("ab", top=3).top] == [3, 3]
    assert not math.isnan(session().score("ab").total)
