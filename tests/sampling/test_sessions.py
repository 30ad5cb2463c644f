"""Sampling in sessions: the state of steps survives pauses, dumps, forks and scratch branches."""

from __future__ import annotations

import pytest

from scripted import ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.generation import StoppingAction
from slm_core.sampling import Sampling
from slm_core.types import Capability

OPTIONS: dict[str, dict[str, object]] = {
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 4.0, "mirostat_eta": 0.5},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.5},
    "adaptive": {"adaptive_entropy": 2.0, "temperature": 1.5},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.01, "temperature": 2.0},
    "penalties": {"frequency_penalty": 0.5, "repeat_penalty": 1.2, "penalty_window": 9},
    "dry": {"dry_multiplier": 3.0, "dry_allowed_length": 1, "temperature": 0},
    "no_repeat_ngram": {"no_repeat_ngram": 1},
    "min_tokens": {"min_tokens": 12, "eog_bias": 6.0},
}


def session(sampling: Sampling, **options: object) -> Session:
    session = Session(ScriptedContext(**options), ByteVocab(), sampling=sampling)
    session.append("abcabcab")
    return session


@pytest.fixture(params=OPTIONS)
def sampling(request: pytest.FixtureRequest) -> Sampling:
    return Sampling.preset("neutral", seed=6, max_tokens=24, **OPTIONS[request.param])


def pause(n_tokens: int):
    return lambda event, draft: StoppingAction.PAUSE if len(draft.tokens) == n_tokens else StoppingAction.NEXT


@pytest.mark.parametrize("passes_options", [True, False])
def test_a_paused_answer_continues_after_a_dump(sampling: Sampling, passes_options: bool) -> None:
    options = sampling if passes_options else None
    whole = session(sampling).generate(options).run()
    paused = session(sampling)
    list(paused.generate(options, stopping_criteria=[pause(7)]))
    restored = Session.restore(ScriptedContext(), ByteVocab(), paused.dump())
    for each in (paused, restored):
        assert each.generate(stopping_criteria=()).run().tokens == whole.tokens
    # The next answer of the session's own chain continues with the state of its steps, too.
    if not passes_options:
        assert (
            paused.generate(stopping_criteria=()).run().tokens == restored.generate(stopping_criteria=()).run().tokens
        )


@pytest.mark.parametrize("capabilities", [frozenset(), frozenset({Capability.SHARED_FORK})], ids=["plain", "shared"])
def test_a_scratch_branch_does_not_change_the_state_of_steps(
    sampling: Sampling, capabilities: frozenset[Capability]
) -> None:
    undisturbed, disturbed = (session(sampling, capabilities=capabilities) for _ in range(2))
    for each in (undisturbed, disturbed):
        list(each.generate(stopping_criteria=[pause(5)]))
    disturbed.score("something else")
    with disturbed.scratch_branch() as elsewhere:
        elsewhere.append("xyz")
        elsewhere.generate(Sampling(temperature=0, max_tokens=4)).run()
    assert (
        disturbed.generate(stopping_criteria=()).run().tokens == undisturbed.generate(stopping_criteria=()).run().tokens
    )


def test_a_fork_continues_with_the_same_draws(sampling: Sampling) -> None:
    first = session(sampling)
    first.generate().run()
    twin = first.fork()
    for each in (first, twin):
        each.append("and then")
    assert first.generate().run().tokens == twin.generate().run().tokens
