"""Every option of beam searches, completions, drafts and shifts does something: one without a behaviour here fails."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping

import pytest

from scripted import END, START, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.constraints import Regex
from slm_core.errors import ContextFull
from slm_core.generation import Beams, StoppingAction
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import DraftFunction, PromptLookup, Speculation, SuffixIndex
from slm_core.sampling import Sampling

WARM = Sampling(temperature=1.2, seed=3, max_tokens=6)


def session(n_ctx: int = 400, *, ends: bool = False) -> Session:
    """A session at a prompt; ``ends``: the model wants to end an answer at once."""
    script = (lambda data: END) if ends else (lambda data: None)
    made = Session(ScriptedContext(script, n_ctx=n_ctx, n_seq_max=12, n_batch=32), ByteVocab(), sampling=WARM)
    made.append("prompt>")
    return made


# Beams.


def found(**options: object) -> object:
    return session().beam_search(Beams(**{"width": 4, "n_best": 2, "max_tokens": 6, **options})).hypotheses


def found_of_short(**options: object) -> object:
    """The same where each answer may end at once."""
    beams = Beams(**{"width": 3, "n_best": 3, "max_tokens": 5, "logit_bias": {END: 4.0}, **options})
    return session().beam_search(beams).hypotheses


GROUPS = {"n_groups": 2, "diversity_penalty": 0.5}
BEAMS: Mapping[str, tuple[Callable[..., object], Mapping[str, object], Mapping[str, object]]] = {
    "width": (found, {}, {"width": 2}),
    "n_best": (found, {}, {"n_best": 3}),
    "length_penalty": (found_of_short, {}, {"length_penalty": 3.0}),
    "early_stopping": (found_of_short, {"length_penalty": 2.0, "logit_bias": {END: 3.0}}, {"early_stopping": True}),
    "n_groups": (found, GROUPS, {"n_groups": 4}),
    "diversity_penalty": (found, {**GROUPS, "n_best": 4}, {"diversity_penalty": 1e-6}),
    "max_tokens": (found, {}, {"max_tokens": 3}),
    "min_tokens": (found_of_short, {}, {"min_tokens": 3}),
    "stop": (found, {}, {"stop": tuple(map(chr, range(128)))}),
    "logit_bias": (found, {}, {"logit_bias": {65: 9.0}}),
    "force_words": (found, {}, {"force_words": ("ab",)}),
}
"""Of each option what shows its effect, beside which others, and what differs from them."""


def test_every_option_of_a_search_is_here() -> None:
    assert {field.name for field in dataclasses.fields(Beams)} == set(BEAMS)


@pytest.mark.parametrize("name", BEAMS)
def test_the_option_of_a_search_matters(name: str) -> None:
    behaviour, beside, change = BEAMS[name]
    assert behaviour(**beside) == behaviour(**beside), "without the option nothing may differ"
    assert behaviour(**beside) != behaviour(**{**beside, **change})


# Drafts.


def batches(**options: object) -> tuple[int, int, int]:
    """Rounds, drafted and accepted tokens of an answer that repeats itself."""
    said = b"abcdabcdabcdabcdabcdabcdabcdabcdabcdabcd"
    s = Session(ScriptedContext(lambda data: said[len(data) - 4], n_batch=64), ByteVocab())
    s.append("abcd")
    given = {"drafter": PromptLookup(), "n_max": 4, "adaptive": False, **options}
    stats = s.generate(Sampling(temperature=0, max_tokens=36), speculation=Speculation(**given)).run().speculation
    assert stats is not None
    return stats.rounds, stats.drafted, stats.accepted


def wrong(tokens: object, n: int) -> list[int]:
    return [1] * n


DRAFTS: Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
    "drafter": ({}, {"drafter": DraftFunction(wrong)}),
    "n_max": ({}, {"n_max": 8}),
    "adaptive": ({"drafter": DraftFunction(wrong)}, {"adaptive": True}),
}


def test_every_option_of_drafts_is_here() -> None:
    assert {field.name for field in dataclasses.fields(Speculation)} == set(DRAFTS)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_option_of_drafts_matters(name: str) -> None:
    beside, change = DRAFTS[name]
    assert batches(**beside) != batches(**{**beside, **change})


@pytest.mark.parametrize("kind", [PromptLookup, SuffixIndex])
def test_every_option_of_a_drafter_matters(kind: type[PromptLookup | SuffixIndex]) -> None:
    known: Mapping[str, Mapping[str, object]] = {
        "max_ngram": {"max_ngram": 2},
        "min_ngram": {"min_ngram": 4},
        "min_match": {"min_match": 6},
        "max_tokens": {"max_tokens": 256},
        "corpus": {"corpus": [b"xyz, which is said elsewhere"]},
    }
    often = [*b"said long ago, and at length: ", *bytes(range(48, 123)) * 5]
    texts = [b"vwxyz! yz? vwxyz", b"xy! zzz xy", b"is said: xyz", bytes([*often, *b"?", *b"ago, and at length"])]

    def drafted(**options: object) -> object:
        return [tuple(kind(**options).draft(list(text), 4).tokens) for text in texts]

    for name in inspect.signature(kind).parameters:
        assert drafted() != drafted(**known[name]), f"{kind.__name__}({name}=...) changes nothing"


# Shifts.


def shifted(**options: object) -> object:
    s = session(n_ctx=40)
    answer = s.generate(Sampling(temperature=0, max_tokens=60), shift=TokenShift(**options)).run()
    assert answer.overflowed is not None
    return answer.tokens, answer.overflowed.n_tokens


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TokenShift)])
def test_every_option_of_a_shift_matters(name: str) -> None:
    assert shifted() != shifted(**{"keep": {"keep": 9}, "share": {"share": 0.2}}[name])


# What methods take.


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
    seen: list[tuple[int, int]] = []
    session().beam_search(Beams(2, max_tokens=2), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 7), (7, 7)]


def completions(n: int = 2, sampling: Sampling = WARM, **options: object) -> list[tuple[int, ...]]:
    return [completion.answer.tokens for completion in session().completions(n, sampling, **options).run()]


def check_n() -> None:
    assert len(completions(3)) == 3


def check_sampling() -> None:
    assert completions(sampling=Sampling(temperature=0, max_tokens=2)) != completions()


def check_best_of() -> None:
    assert completions(2, best_of=11) != completions(2)


def check_stopping_criteria() -> None:
    assert [len(t) for t in completions(stopping_criteria=[lambda event, draft: StoppingAction.STOP])] == [1, 1]


def check_completions_constraint() -> None:
    assert all(bytes(tokens).strip(b"ab") == b"" for tokens in completions(constraint=Regex("[ab]{5}")))


def check_completions_special() -> None:
    said = Sampling(temperature=0, max_tokens=2, logit_bias={START: 99.0})
    texts = [session().completions(1, said, special=special).run()[0].answer.text for special in (False, True)]
    assert texts == ["", "<|start|>" * 2]


def check_timeout() -> None:
    (completion,) = session().completions(1, timeout=1e-9).run()
    assert completion.answer.timed_out


def check_on_event() -> None:
    seen: list[int] = []
    session().completions(2, on_event=lambda event: seen.append(event.index)).run()
    assert seen == [0, 1] * 6


def check_completions_progress() -> None:
    seen: list[tuple[int, int]] = []
    session().completions(2, progress=lambda done, total: seen.append((done, total))).run()
    assert seen == [(0, 7), (7, 7)]


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
def test_every_parameter_is_here(method: Callable[..., object], checks: Mapping[str, object]) -> None:
    assert [name for name in inspect.signature(method).parameters if name != "self"] == list(checks)


@pytest.mark.parametrize("check", [*OF_SEARCH.values(), *OF_COMPLETIONS.values()], ids=lambda check: check.__name__)
def test_each_parameter_changes_something(check: Callable[[], None]) -> None:
    check()


def test_a_full_context_is_an_error_where_nothing_shifts() -> None:
    with pytest.raises(ContextFull):
        session(n_ctx=10).append("x" * 20)


def test_scores_take_the_number_that_is_wanted() -> None:
    assert [len(places) for places in session().score("ab", top=3).top] == [3, 3]
    assert not math.isnan(session().score("ab").total)
