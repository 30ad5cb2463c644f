"""Sessions over the backend's contexts: going back, removing, copying, pausing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slm_conformance.bench import Bench, Rows
from slm_conformance.scenarios.base import Scenarios
from slm_core.chat import Session
from slm_core.errors import InvalidMark
from slm_core.generation import BrakeAction, Draft, Event, FinishReason
from slm_core.sampling import Sampling
from slm_core.types import EditLevel

GREEDY = Sampling(temperature=0, max_tokens=8)


class TestSession(Scenarios):
    """Session, at every edit level: the cheapest edit that the level allows, with the same visible result."""

    def test_the_greedy_answer(self, bench: Bench) -> None:
        """Session: each token of a greedy answer is the reference's best, as far as its logits tell."""
        session = _session(bench, bench.tokens(20))
        prompt = list(session.tokens)
        answer = session.generate(GREEDY).run()
        rows = bench.reference().decode([*prompt, *answer.tokens])[len(prompt) - 1 : -1]
        # Two entries of a row can differ by the norm of the error times the square root of two, and no more.
        slack = np.sqrt(2) * bench.tolerance.row * np.linalg.norm(rows, axis=1)
        behind = rows.max(axis=1) - rows[np.arange(len(rows)), list(answer.tokens)]
        worst = int(np.argmax(behind - slack))
        assert behind[worst] <= slack[worst], (
            f"token {worst} of the answer is {behind[worst]:.2e} behind the reference's best"
            f" (allowed: {slack[worst]:.2e})"
        )

    def test_rollback(self, bench: Bench) -> None:
        """Session: back at a mark, tokens and next logits are what they were, any number of times, marks nested."""
        session = _session(bench, bench.tokens(20))
        outer, tokens, before = session.mark(), session.tokens, next_row(session)
        for turn in range(3):
            session.append_tokens(bench.tokens(5, seed=turn))
            inner, within, there = session.mark(), session.tokens, next_row(session)
            session.generate(GREEDY).run()
            session.rollback(inner)
            assert session.tokens == within, "rollback to an inner mark left other tokens"
            bench.agree(next_row(session), there, "the next logits after rollback to an inner mark")
            session.rollback(outer)
            assert session.tokens == tokens, "rollback to an outer mark left other tokens"
            bench.agree(next_row(session), before, f"the next logits after rollback number {turn + 1}")

    def test_marks_that_are_stale_or_foreign(self, bench: Bench) -> None:
        """Session: a mark whose place was taken away, or of another session, raises ``InvalidMark``."""
        context = bench.context()
        session, other = (Session(context, bench.vocab) for _ in range(2))
        session.append_tokens(bench.tokens(10))
        early = session.mark()
        session.append_tokens(bench.tokens(5, seed=1))
        late = session.mark()
        before = session.tokens
        with bench.refused("a mark of another session", InvalidMark, context=context):
            other.rollback(late)
        session.rollback(early)
        with bench.refused("a mark behind what was rolled back", InvalidMark, context=context):
            session.rollback(late)
        assert session.tokens == before[:10], "a refused rollback changed the session"

    def test_remove_exactly(self, bench: Bench) -> None:
        """Session: what remains after ``remove(exact=True)`` is as if the rest had never been, at every edit level."""
        session, tokens = _session(bench, bench.tokens(12)), bench.tokens(40)
        start = session.mark()
        session.append_tokens(tokens[:10])
        end = session.mark()
        session.append_tokens(tokens[10:20])
        session.next_logits()
        level = session.remove(start, end, exact=True)
        assert level <= EditLevel.TRUNCATE, f"an exact removal says that it was a {level.name}"
        expected = bench.reference().decode(session.tokens)[-1:]
        bench.agree(next_row(session), expected, "the next logits after an exact removal")

    def test_remove(self, bench: Bench) -> None:
        """Session: ``remove`` cuts where the level is CUT, else computes again; either way the tokens are gone."""
        session, tokens = _session(bench, bench.tokens(12)), bench.tokens(20, seed=1)
        start = session.mark()
        session.append_tokens(tokens[:10])
        end = session.mark()
        session.append_tokens(tokens[10:])
        session.next_logits()
        before = session.tokens
        level = session.remove(start, end)
        assert level is bench.edit_level, f"at edit level {bench.edit_level.name}, remove says it was {level.name}"
        assert session.tokens == before[:12] + before[22:], "remove left other tokens than those around the span"
        expected = cut_row(bench, before, 12, 22) if level is EditLevel.CUT else fresh_row(bench, session)
        bench.agree(next_row(session), expected, f"the next logits after remove, a {level.name}")

    def test_fork(self, bench: Bench) -> None:
        """Session: a fork goes its own way; both are right."""
        session = _session(bench, bench.tokens(20))
        twin = session.fork()
        for which, seed in ((session, 1), (twin, 2)):
            which.append_tokens(bench.tokens(6, seed=seed))
        for which, name in ((twin, "the fork"), (session, "the original")):
            bench.agree(next_row(which), fresh_row(bench, which), f"the next logits of {name} of a session")

    def test_pause_and_resume(self, bench: Bench) -> None:
        """Session: an answer that is paused after each token goes on as if it never had been."""
        sampling = Sampling(temperature=0.8, seed=11, max_tokens=10)
        whole = _session(bench, bench.tokens(20)).generate(sampling).run()
        session = _session(bench, bench.tokens(20))
        generation = session.generate(sampling, brakes=[_pause])
        for _ in range(20):
            for _event in generation:
                pass
            if generation.finished:
                break
            generation = session.generate()
        assert generation.answer.tokens == whole.tokens, "an answer paused after each token has other tokens"

    def test_dump_in_mid_answer(self, bench: Bench) -> None:
        """Session: a paused answer is dumped, and goes on in another context with the same draws."""
        sampling = Sampling(temperature=0.8, seed=11, max_tokens=10)
        session = _session(bench, bench.tokens(20), sampling)
        for _event in session.generate(brakes=[_pause]):
            pass
        twin = Session.restore(bench.context(), bench.vocab, session.dump())
        here, there = (which.generate(brakes=()).run().tokens for which in (session, twin))
        assert len(here) > 1, "the answer ended where it was paused"
        assert there == here, "an answer that was dumped while paused goes on with other tokens"

    def test_a_full_context(self, bench: Bench) -> None:
        """Session: an answer that meets the end of the context ends with ``length``; the session goes on."""
        session = Session(bench.context(n_ctx=24), bench.vocab)
        session.append_tokens(bench.tokens(20))
        mark, before = session.mark(), next_row(session)
        answer = session.generate(Sampling(temperature=0)).run()
        ended = answer.finish_reason is FinishReason.LENGTH or answer.tokens[-1] in bench.vocab.eog_ids
        assert ended, f"an answer in a context with room for 4 tokens ended with {answer.finish_reason.value}"
        session.rollback(mark)
        bench.agree(next_row(session), before, "the next logits after an answer that filled the context")

    def test_cancelled_in_prefill(self, bench: Bench) -> None:
        """Session: cancelling ends an answer within a batch, in prefill, too; what was not decoded can be later."""
        session = Session(bench.context(n_batch=16), bench.vocab)
        session.append_tokens(bench.tokens(60))
        generation = session.generate(GREEDY)
        generation.cancel()
        answer = generation.run()
        assert answer.finish_reason is FinishReason.CANCELLED, f"it ended with {answer.finish_reason.value}"
        assert session.context.length(session.seq_id) < 60, "the whole prompt was decoded after cancel()"
        bench.agree(next_row(session), fresh_row(bench, session), "the next logits after a cancelled prefill")


def _session(bench: Bench, tokens: Sequence[int], sampling: Sampling | None = None) -> Session:
    session = Session(bench.context(), bench.vocab, sampling=sampling)
    session.append_tokens(tokens)
    return session


def next_row(session: Session) -> Rows:
    """The logits that follow a session, float32 [1, V]."""
    row = session.next_logits()
    assert row is not None, "next_logits() gave nothing, though nobody cancelled"
    return row[None].copy()


def fresh_row(bench: Bench, session: Session) -> Rows:
    """What the reference says follows the session's tokens."""
    return bench.reference().decode(session.tokens)[-1:]


def cut_row(bench: Bench, before: Sequence[int], start: int, end: int) -> Rows:
    """What follows after [start, end) was cut: the last token is decoded again, as its logits were not kept."""
    reference = bench.reference()
    reference.decode(before)
    reference.cut(start, end)
    reference.truncate(reference.length() - 1)
    return reference.decode(before[-1:])


def _pause(event: Event, draft: Draft) -> BrakeAction:
    return BrakeAction.PAUSE
