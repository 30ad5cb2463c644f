"""Tokens that a constraint forces: one batch, the same events, and no extra tokens if the answer ends early."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from scripted import ALL, ByteVocab, ScriptedContext
from slm_core.chat import Session
from slm_core.generation import Event, Generation, StoppingAction
from slm_core.protocols import Advance, Batch, FastForward, Forward, Stop
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel, Logits

ANSWER = b"chosen, then all of this is forced."
GREEDY = Sampling(temperature=0)


class ForcedText:
    """Allows one text; from ``first`` on, forces the next ``n`` tokens, after each token or only once."""

    def __init__(self, first: int, n: int, *, repeats: bool = False) -> None:
        self.first, self.n, self.repeats, self.at, self.n_masked = first, n, repeats, 0, 0

    @property
    def is_complete(self) -> bool:
        return self.at == len(ANSWER)

    def mask(self, logits: Logits) -> Logits:
        self.n_masked += 1
        row = np.full_like(logits, -np.inf)
        row[ANSWER[self.at]] = logits[ANSWER[self.at]]
        return row

    def advance(self, token: int) -> Advance:
        assert token == ANSWER[self.at]
        self.at += 1
        if self.is_complete:
            return Stop()
        forced = ANSWER[self.at : self.first + self.n]
        says = self.first <= self.at < self.first + self.n and (self.repeats or self.at == self.first)
        return FastForward(tuple(forced)) if says else Forward()

    def clone(self) -> ForcedText:
        return self  # so that the test can inspect it


class Counting(ScriptedContext):
    """Records the number of tokens of each batch."""

    sizes: tuple[int, ...] = ()

    def decode(self, batch: Batch) -> Logits:
        self.sizes = (*self.sizes, len(batch))
        return super().decode(batch)


def begin(level: EditLevel = EditLevel.CUT, **options: object) -> Session:
    session = Session(Counting(n_batch=64, level=level, **options), ByteVocab(), sampling=GREEDY)
    session.append("prompt>")
    return session


def summarized(events: Sequence[Event]) -> list[tuple[int | None, str, float]]:
    return [(event.token, event.text, event.logprob) for event in events]


@pytest.mark.parametrize("repeats", [False, True])
def test_a_forced_run_is_one_batch_with_the_events_of_single_steps(repeats: bool) -> None:
    plain, forced = begin(), begin()
    expected = summarized(list(plain.generate(constraint=ForcedText(0, 0))))
    constraint = ForcedText(8, 20, repeats=repeats)
    assert summarized(list(forced.generate(constraint=constraint))) == expected
    assert forced.context.sizes == (7, *[1] * 7, 21, *[1] * 6), "token 8 is in one batch with the 20 forced tokens"
    assert constraint.n_masked == len(ANSWER) - 20
    assert forced.context.tokens(0) == forced.tokens[:-1], "the last token of an answer is not decoded"


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("limit", [8, 9, 10, 27, 28, 29])
def test_a_limit_within_a_forced_run_decodes_no_more_than_it_needs(level: EditLevel, limit: int) -> None:
    plain, forced = begin(level), begin(level)
    options = Sampling(temperature=0, max_tokens=limit)
    expected = summarized(list(plain.generate(options, constraint=ForcedText(0, 0))))
    assert summarized(list(forced.generate(options, constraint=ForcedText(8, 20)))) == expected
    assert forced.context.n_decoded == plain.context.n_decoded
    np.testing.assert_array_equal(forced.next_logits(), plain.next_logits())


@pytest.mark.parametrize("level", list(EditLevel))
def test_a_stop_string_within_a_forced_run_leaves_no_extra_tokens(level: EditLevel) -> None:
    plain, forced = begin(level), begin(level)
    options = Sampling(temperature=0, stop=("all",))
    assert plain.generate(options, constraint=ForcedText(0, 0)).run().text == "chosen, then "
    assert forced.generate(options, constraint=ForcedText(8, 20)).run().text == "chosen, then "
    assert forced.tokens == plain.tokens
    assert forced.n_pending == (0 if level else forced.n_tokens), "extra decoded tokens are truncated"
    np.testing.assert_array_equal(forced.next_logits(), plain.next_logits())


@pytest.mark.parametrize("capabilities", [ALL, frozenset()], ids=["shared", "copied"])
@pytest.mark.parametrize("level", list(EditLevel))
def test_a_pause_within_a_forced_run_leaves_a_usable_session(
    level: EditLevel, capabilities: frozenset[Capability]
) -> None:
    def pause_in_the_run(event: Event, draft: object) -> StoppingAction:
        return StoppingAction.PAUSE if len(draft.tokens) == 12 else StoppingAction.NEXT

    s, plain = begin(level, capabilities=capabilities), begin(level)
    whole = plain.generate(constraint=ForcedText(0, 0)).run()
    generation: Generation = s.generate(constraint=ForcedText(8, 20), stopping_criteria=[pause_in_the_run])
    list(generation)
    with s.fork() as twin:
        assert twin.text == "prompt>chosen, then"
        twin.append("!")
        assert twin.next_logits() is not None
    with s.scratch_branch() as elsewhere:
        elsewhere.append("?")
        assert elsewhere.next_logits() is not None
    assert s.generate().run().tokens == whole.tokens == generation.answer.tokens


@pytest.mark.parametrize("level", list(EditLevel))
def test_after_an_edit_within_a_forced_run_the_answer_follows_the_history(level: EditLevel) -> None:
    s, plain = begin(level), begin(level)
    generation = s.generate(constraint=ForcedText(8, 20))
    for _ in range(12):
        next(generation)
    s.append("!")
    plain.append(ANSWER[:12].decode() + "!")
    np.testing.assert_array_equal(s.next_logits(), plain.next_logits())


def test_a_forced_run_longer_than_a_batch_takes_several_batches() -> None:
    s = Session(Counting(n_batch=8), ByteVocab(), sampling=GREEDY)
    s.append("prompt>")
    assert s.generate(constraint=ForcedText(1, 33)).run().text == ANSWER.decode()
    assert s.context.sizes[:5] == (7, 8, 8, 8, 8)


def test_a_full_context_ends_a_forced_run_at_the_same_token() -> None:
    sessions = [Session(Counting(n_batch=64, n_ctx=20), ByteVocab(), sampling=GREEDY) for _ in range(2)]
    answers = []
    for s, n in zip(sessions, (0, 20), strict=True):
        s.append("prompt>")
        answers.append(s.generate(constraint=ForcedText(3, n)).run())
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].finish_reason is answers[1].finish_reason


def test_closing_a_session_within_a_forced_run_frees_its_sequence() -> None:
    context = Counting(n_batch=64)
    s = Session(context, ByteVocab(), sampling=GREEDY)
    s.append("prompt>")
    generation = s.generate(constraint=ForcedText(8, 20))
    for _ in range(12):
        next(generation)
    s.close()
    generation.cancel()
    assert len(generation.run().tokens) == 12
    assert context.length(0) == 0
