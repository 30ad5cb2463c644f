"""Several completions of one prompt: each is the same as alone, and the prompt is decoded once."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest

from scripted import ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.errors import ContextFull, DecodeFailed, InvalidOption, InvalidSequence, SessionError
from slm_core.generation import Completions, FinishReason, StoppingAction
from slm_core.protocols import Forward, Stop
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel

WARM = Sampling(seed=5, temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, max_tokens=7)
PROMPT = "a prompt of some length"


def session_of(**options: Any) -> Session:
    session = Session(ScriptedContext(**{"n_seq_max": 8, **options}), ByteVocab())
    session.append(PROMPT)
    return session


def tokens_alone(i: int, sampling: Sampling = WARM) -> tuple[int, ...]:
    chain = SamplerChain.for_vocab(sampling, ByteVocab(), stream=i)
    return session_of().generate(sampling, sampler=chain).run().tokens


def tokens_of(completions: Completions) -> list[tuple[int, ...]]:
    return [completion.answer.tokens for completion in completions.run()]


def lengths(session: Session) -> list[int]:
    return [session.context.length(s) for s in range(session.context.n_seq_max)]


@pytest.mark.parametrize("n", [1, 3, 5])
def test_completions_are_the_same_as_alone_for_any_n(n) -> None:
    completions = tokens_of(session_of().completions(n, WARM))
    assert completions == [tokens_alone(i) for i in range(n)]
    assert len(set(completions)) == n
    assert completions[0] == session_of().generate(WARM).run().tokens


def test_refused_options_take_no_sequences() -> None:
    session = session_of(n_seq_max=3)
    with pytest.raises(InvalidOption) as error:  # the traceback keeps local objects alive
        session.completions(2, Sampling(logit_bias={10**6: 1.0}))
    assert len(session.completions(2, WARM).run()) == 2, error


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("shared", [True, False])
def test_all_contexts_give_the_same_completions_and_stay_unchanged(level, shared) -> None:
    capabilities = ScriptedContext().capabilities if shared else frozenset()
    session = session_of(level=level, capabilities=capabilities, n_batch=2)
    assert tokens_of(session.completions(3, WARM)) == [tokens_alone(i) for i in range(3)]
    assert (session.tokens, session.n_pending) == (tuple(PROMPT.encode()), 0)
    assert lengths(session) == [len(PROMPT)] + [0] * 7


def test_the_prompt_is_decoded_once_and_each_step_is_one_batch() -> None:
    session, sizes = session_of(n_batch=64), []
    context = session.context
    context.on_decode = lambda: sizes.append(context.n_decoded)
    session.completions(4, WARM).run()
    steps = np.diff([*sizes, context.n_decoded]).tolist()
    assert steps == [len(PROMPT), *[4] * 6], "the last of 7 tokens needs no decode"


def test_events_alternate_and_have_an_index() -> None:
    completions = session_of().completions(3, WARM)
    events = list(completions)
    assert [event.index for event in events] == [0, 1, 2] * 7
    for completion in completions.answers:
        own_events = [event.event for event in events if event.index == completion.index]
        assert "".join(event.text for event in own_events) == completion.answer.text
        assert tuple(event.token for event in own_events) == completion.answer.tokens
        assert completion.mean_logprob == pytest.approx(math.fsum(event.logprob for event in own_events) / 7)


def test_usage_counts_the_prompt_once() -> None:
    usages = [completion.answer.usage for completion in session_of().completions(3, WARM).run()]
    assert [usage.prompt_tokens for usage in usages] == [len(PROMPT)] * 3
    assert [usage.cached_tokens for usage in usages] == [0, len(PROMPT), len(PROMPT)]


def test_best_of_keeps_the_likeliest_completions() -> None:
    every = session_of().completions(6, WARM).run()
    best = sorted(every, key=lambda completion: -completion.mean_logprob)[:2]
    likeliest = session_of().completions(2, WARM, best_of=6).run()
    assert [c.answer.tokens for c in likeliest] == [c.answer.tokens for c in best]
    assert likeliest[0].mean_logprob >= likeliest[1].mean_logprob


def test_without_a_seed_completions_differ_between_each_other_and_runs() -> None:
    unseeded = Sampling(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, max_tokens=7)
    completions = [tokens for _ in range(2) for tokens in tokens_of(session_of().completions(3, unseeded))]
    assert len(set(completions)) == 6


def test_closing_again_does_not_release_what_another_session_claimed_since() -> None:
    session = session_of(n_seq_max=3)
    completions = session.completions(2, WARM)
    completions.close()
    others = [Session(session.context, ByteVocab()) for _ in range(2)]
    completions.close()
    with pytest.raises(InvalidSequence, match="no sequence is left"):
        Session(session.context, ByteVocab())
    for other in others:
        other.close()


class CountingConstraint:
    """A constraint: one token per step, another one at each of three steps."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    @property
    def is_complete(self) -> bool:
        return self.n == 3

    def mask(self, logits):
        row = np.full_like(logits, -np.inf)
        row[65 + self.n], row[97 + self.n] = logits[65 + self.n], logits[97 + self.n]
        return row

    def advance(self, token):
        assert token in (65 + self.n, 97 + self.n)
        self.n += 1
        return Stop() if self.is_complete else Forward()

    def clone(self):
        return CountingConstraint(self.n)

    def state(self) -> bytes:
        return b""


def test_each_has_its_own_copy_of_a_constraint() -> None:
    constraint = CountingConstraint()
    answers = [c.answer for c in session_of().completions(4, WARM, constraint=constraint).run()]
    assert {answer.text.lower() for answer in answers} == {"abc"}
    assert {answer.finish_reason for answer in answers} == {FinishReason.CONSTRAINT}
    assert constraint.n == 0


def test_pausing_one_completion_does_not_pause_the_others() -> None:
    expected = [tokens_alone(i) for i in range(3)]

    def criterion(event, draft):
        odd = tuple(draft.tokens) == expected[1][:2]
        return StoppingAction.PAUSE if odd else StoppingAction.NEXT

    session = session_of()
    completions = session.completions(3, WARM, stopping_criteria=[criterion])
    events = list(completions)
    assert completions.paused and not completions.over
    assert [sum(event.index == i for event in events) for i in range(3)] == [7, 2, 7]
    with pytest.raises(SessionError, match="no answers yet"):
        _ = completions.answers
    assert tokens_of(completions.resume()) == expected
    assert lengths(session)[1:] == [0] * 7


def test_cancelling_one_completion_does_not_cancel_the_others() -> None:
    completions = session_of().completions(3, WARM)
    next(completions)
    completions.cancel(1)
    answers = [c.answer for c in completions.run()]
    assert answers[1].finish_reason is FinishReason.CANCELLED
    assert [answers[0].tokens, answers[2].tokens] == [tokens_alone(0), tokens_alone(2)]


def test_cancelling_in_prefill_decodes_one_batch() -> None:
    session = session_of()
    completions = session.completions(3, WARM)
    session.context.on_decode = completions.cancel
    answers = [c.answer for c in completions.run()]
    assert {(answer.tokens, answer.finish_reason) for answer in answers} == {((), FinishReason.CANCELLED)}
    assert session.context.n_decoded == 16, "one batch of the prompt"
    assert lengths(session)[1:] == [0] * 7


@pytest.mark.parametrize("failing", [0, 2, 3, 5])
def test_a_failure_frees_everything(failing) -> None:
    session = session_of()
    n = iter(range(99))

    def fail() -> None:
        if next(n) == failing:
            raise DecodeFailed("as the test wants it")

    session.context.on_decode = fail
    with pytest.raises(DecodeFailed):
        session.completions(3, WARM).run()
    assert lengths(session)[1:] == [0] * 7
    assert tokens_of(session.completions(7, WARM)) == [tokens_alone(i) for i in range(7)]


def test_a_full_context_ends_completions_one_by_one() -> None:
    session = session_of(n_ctx=len(PROMPT) + 10)
    answers = [c.answer for c in session.completions(4, WARM).run()]
    assert answers[0].finish_reason is FinishReason.LENGTH
    assert len(answers[0].tokens) < 7
    assert all(answer.tokens == tokens_alone(i)[: len(answer.tokens)] for i, answer in enumerate(answers))
    assert session.context.n_free == 10


def test_forks_without_room_are_an_error() -> None:
    session = session_of(n_ctx=60, capabilities=frozenset())
    with pytest.raises(ContextFull):
        session.completions(3, WARM).run()
    assert lengths(session) == [len(PROMPT)] + [0] * 7


def test_leaving_early_frees_the_sequences() -> None:
    session = session_of()
    with session.completions(7, WARM) as completions:
        next(completions)
        with pytest.raises(InvalidSequence):
            session.fork()
    assert lengths(session)[1:] == [0] * 7
    assert list(completions) == []
    session.fork()


def test_a_session_changed_meanwhile_is_refused() -> None:
    session = session_of()
    completions = session.completions(2, WARM)
    session.append("more")
    with pytest.raises(SessionError, match="changed since"):
        next(completions)


def test_invalid_numbers_of_completions_are_refused() -> None:
    session = session_of(n_seq_max=3)
    for options, message in (
        ({"n": 0}, "n=0 .accepted: an integer from 1 to 4096"),
        ({"n": True}, "n=True"),
        ({"n": 4097}, "n=4097 .accepted: an integer from 1 to 4096"),
        ({"n": 2, "best_of": 1}, "best_of=1 .accepted: an integer from 2 to 4096"),
        ({"n": 2, "best_of": 10**5000}, "best_of=.* .accepted: an integer from 2 to 4096"),
    ):
        with pytest.raises(InvalidOption, match=message):
            session.completions(sampling=WARM, **options)
    with pytest.raises(InvalidSequence, match=r"making 5 completions takes 5 free sequences, there are 2.*n_seq_max=6"):
        session.completions(2, WARM, best_of=5)
    with pytest.raises(SessionError, match="nothing to continue"):
        Session(ScriptedContext(), ByteVocab()).completions(2)
    assert session.context.n_decoded == 0


def test_async_events_are_the_same() -> None:
    async def collect() -> list[tuple[int, str]]:
        return [(event.index, event.event.text) async for event in session_of().completions(2, WARM)]

    assert asyncio.run(collect()) == [(e.index, e.event.text) for e in session_of().completions(2, WARM)]
    answers = asyncio.run(session_of().completions(2, WARM).arun())
    assert [c.answer.tokens for c in answers] == [tokens_alone(0), tokens_alone(1)]


def test_on_event_gets_each_event_and_its_error_ends_all() -> None:
    observed = []
    session = session_of()
    events = list(session.completions(2, WARM, on_event=observed.append))
    assert observed == events

    def refuse(event: object) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        next(session.completions(2, WARM, on_event=refuse))
    assert lengths(session)[1:] == [0] * 7


def test_timeout_and_progress() -> None:
    session, reports = session_of(), []
    session.context.on_decode = lambda: time.sleep(0.02)
    answers = [
        c.answer for c in session.completions(2, WARM, timeout=0.05, progress=lambda *n: reports.append(n)).run()
    ]
    assert {answer.timed_out for answer in answers} == {True}
    assert reports == [(0, len(PROMPT)), (16, len(PROMPT)), (len(PROMPT), len(PROMPT))]
    with pytest.raises(InvalidOption, match="timeout=0"):
        session.completions(2, WARM, timeout=0)
