"""Sessions over the backend's contexts: append, roll back, remove, fork, pause."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.refused_calls import (
    check_branches_are_refused,
    check_code_is_not_dumped,
    check_edits_end_answers,
    check_ranges,
    pause_at,
)
from slm_conformance.suite.scenarios.base import Scenarios
from slm_conformance.suite.workshop import Rows
from slm_core.chat import Session
from slm_core.constraints import Regex
from slm_core.container import pack, unpack
from slm_core.errors import (
    ContextClosed,
    ContextFull,
    InvalidMark,
    InvalidOption,
    InvalidSequence,
    InvalidSnapshot,
    SessionError,
)
from slm_core.generation import Answer, BeamAnswer, Beams, FinishReason
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import PromptLookup, Speculation
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel, PrefillProgress, Segment

GREEDY = Sampling(temperature=0, max_tokens=8)
UNIFORM = Sampling(temperature=1e12, top_k=0, top_p=1.0, min_p=0.0, seed=11, max_tokens=12)
"""All tokens are equally likely, whatever their logits: draws depend on the seed alone.

Two answers then have the same tokens even if their logits differ within the tolerance, as after a replay. Half
of the tokens of a model with byte tokens are broken or incomplete characters.
"""


class TestSession(Scenarios):
    """Session: edits are the cheapest that the edit level allows; the visible result is the same at every level."""

    above_contract = True

    def test_append(self, bench: Bench) -> None:
        """Session: text is content, after the special tokens of the vocabulary; control segments are control tokens."""
        encode, spelled = bench.vocab.encode, "hi <|im_end|> you"
        session = Session(bench.context(), bench.vocab)
        for first in (True, False):
            before, expected = session.tokens, encode(spelled, add_special=first, parse_special=False)
            assert list(session.score(spelled).tokens) == expected, "a scored text has other tokens than appended text"
            assert session.append(spelled) == len(expected), "append() returned another number of tokens than it added"
            assert session.tokens == (*before, *expected), "appended text has other tokens than its encoding as content"
        before, expected = session.tokens, encode("<|im_end|>", add_special=False, parse_special=True)
        session.append([Segment("<|im_end|>", control=True)])
        assert session.tokens == (*before, *expected), "an appended control segment is not its control token"
        bench.agree(next_row(session), fresh_row(bench, session), "the next logits after appended text")

    def test_more_than_there_is_room_for(self, bench: Bench) -> None:
        """Session: tokens that do not fit together with pending tokens raise and are not appended."""
        session = Session(bench.context(n_ctx=32), bench.vocab)
        session.append_tokens(bench.tokens(20))
        before = session.tokens
        for _ in range(2):  # with 20 pending tokens, and with 20 decoded tokens
            with bench.refused("13 tokens behind 20 of 32", ContextFull, context=session.context):
                session.append_tokens(bench.tokens(13, seed=1))
            with bench.refused("33 tokens in place of 20 of 32", ContextFull, context=session.context):
                session.follow([*before[:5], *bench.tokens(28, seed=2)])
            assert session.tokens == before, "tokens that were refused are in the session"
            session.next_logits()
        session.append_tokens(bench.tokens(12, seed=1))
        with bench.refused("32 tokens in a context of 31", ContextFull):
            Session.restore(bench.context(n_ctx=31), bench.vocab, session.dump())
        for token in (bench.vocab.size, -2):
            with bench.refused(f"a dump in which token {token} waits", InvalidSnapshot):
                Session.restore(bench.context(), bench.vocab, _with_last_token(session.dump(), token))
        restored = Session.restore(bench.context(n_ctx=32), bench.vocab, session.dump())
        for full in (session, restored):
            bench.agree(next_row(full), fresh_row(bench, full), "the next logits of a session that fills its context")
        session.follow([*before[:5], *bench.tokens(27, seed=2)])
        bench.agree(next_row(session), fresh_row(bench, session), "the next logits of other tokens that fill it")

    def test_in_batches(self, bench: Bench) -> None:
        """Session: pending tokens are decoded in batches, with progress; a cancelled prefill continues there."""
        session = Session(bench.context(n_ctx=48, n_batch=8), bench.vocab)
        session.append_tokens(bench.tokens(20))
        reports: list[tuple[int, int]] = []
        row = session.next_logits(lambda: len(reports) == 2, progress=lambda *counts: reports.append(counts))
        assert row is None, "a cancelled prefill returned logits"
        assert (reports, session.n_pending) == ([(0, 20), (8, 20)], 12), (
            f"cancelled after a batch of 8 of 20: {reports}"
        )
        calls: tuple[Callable[[PrefillProgress], object], ...] = (
            lambda progress: session.prefill(progress=progress),
            lambda progress: session.next_logits(progress=progress),
            lambda progress: session.generate(replace(GREEDY, max_tokens=2), progress=progress).run(),
            lambda progress: session.beam_search(Beams(width=1, max_tokens=2), progress=progress),
        )
        for n_kept, decode in zip((8, 3, 6, 5), calls, strict=True):
            session.truncate(n_kept)
            session.append_tokens(bench.tokens(20 - n_kept, seed=n_kept))
            n = session.n_pending
            if bench.edit_level >= EditLevel.TRUNCATE:
                assert n == 20 - n_kept, f"{n} of 20 tokens are pending after {n_kept} were kept"
            reports.clear()
            answer = decode(lambda *counts: reports.append(counts))
            if isinstance(answer, Answer | BeamAnswer):
                usage = (answer.usage.prompt_tokens, answer.usage.cached_tokens)
                assert usage == (20, 20 - n), f"of 20 tokens of a prompt, {n} were decoded; its usage is {usage}"
                times = (answer.timings.prefill_s, answer.timings.decode_s)
                assert all(0 <= seconds < 600 for seconds in times), f"2 tokens took {times} seconds"
            expected = [(min(n_done, n), n) for n_done in range(0, n + 8, 8)]
            assert reports == expected, f"{n} tokens in batches of 8 report the progress {reports}, not {expected}"
            bench.agree(next_row(session), fresh_row(bench, session), "the next logits after a prefill with progress")

    def test_expected_tokens(self, bench: Bench) -> None:
        """Session: expected tokens are decoded with the last batch if it has room; no later call sees them."""
        tokens, ahead = bench.tokens(10), bench.tokens(20, seed=1)
        session = Session(bench.context(n_ctx=64, n_seq_max=1, n_batch=8), bench.vocab)
        session.append_tokens(tokens)
        row = session.next_logits(expected=ahead)
        assert row is not None, "next_logits() gave nothing, though nobody cancelled"
        bench.agree(row[None], fresh_row(bench, session), "the next logits before expected tokens")
        decoded = session.context.tokens(0)
        assert decoded == (*tokens, *ahead)[:16], (
            f"10 tokens and 20 expected ones in batches of 8: the context holds {decoded}"
        )
        calls: dict[str, Callable[[Session], object]] = {
            "append_tokens": lambda session: session.append_tokens(ahead[:1]),
            "follow": lambda session: session.follow([*tokens[:9], ahead[3]]),
            "truncate": lambda session: session.truncate(9),
            "remove_span": lambda session: session.remove_span(8, 10),
            "fork": lambda session: session.fork().close(),
            "dump": lambda session: Session.restore(session.context, bench.vocab, session.dump()).close(),
            "scratch_branch": _answer_in_scratch_branch,
            "generate": lambda session: session.generate(GREEDY).run(),
            "completions": lambda session: session.completions(1, GREEDY).run(),
            "score": lambda session: session.score(ahead[4:6]),
        }
        context = bench.context(n_batch=16)
        for name, call in calls.items():
            with Session(context, bench.vocab, sampling=GREEDY) as session:
                session.append_tokens(tokens)
                session.next_logits(expected=ahead[:6])
                call(session)
                decoded, n_pending = context.tokens(session.seq_id), session.n_pending
                assert decoded == session.tokens[: len(decoded)], (
                    f"after {name}, the context holds expected tokens: {decoded}"
                )
                assert n_pending == session.n_tokens - len(decoded), (
                    f"after {name}, {n_pending} tokens are said to wait"
                )
                bench.agree(next_row(session), fresh_row(bench, session), f"the next logits after {name}")

    def test_rollback(self, bench: Bench) -> None:
        """Session: a rollback restores tokens and next logits, any number of times, with nested marks."""
        session = _session(bench, bench.tokens(20))
        outer, tokens, before = session.mark(), session.tokens, next_row(session)
        for i in range(3):
            session.append_tokens(bench.tokens(5, seed=i))
            inner, inner_tokens, next_logits = session.mark(), session.tokens, next_row(session)
            session.generate(GREEDY).run()
            session.rollback(inner)
            assert session.tokens == inner_tokens, "rollback to an inner mark left other tokens"
            bench.same(next_row(session), next_logits, "the next logits after rollback to an inner mark")
            session.rollback(outer)
            assert session.tokens == tokens, "rollback to an outer mark left other tokens"
            bench.same(next_row(session), before, f"the next logits after rollback number {i + 1}")

    def test_a_mark_at_the_end(self, bench: Bench) -> None:
        """Session: a mark at the end of the history stays valid after any number of rollbacks."""
        session = _session(bench, bench.tokens(12))
        tokens, marks = session.tokens, [session.mark(), session.mark()]
        for i in range(3):
            session.append_tokens(bench.tokens(3, seed=i))
            for mark in marks:
                session.rollback(mark)
                assert session.tokens == tokens, f"return {i + 1} to a mark at the end left other tokens"
        assert session.remove(*marks) is bench.edit_level, "a removal of nothing says that it was something else"
        assert session.tokens == tokens, "a removal of nothing left other tokens"

    def test_marks_that_are_stale_or_foreign(self, bench: Bench) -> None:
        """Session: a stale mark, and a mark of another session, raise ``InvalidMark``."""
        context = bench.context()
        session, other = (Session(context, bench.vocab) for _ in range(2))
        session.append_tokens(bench.tokens(10))
        early = session.mark()
        session.append_tokens(bench.tokens(5, seed=1))
        late = session.mark()
        before = session.tokens
        with bench.refused("a mark of another session", InvalidMark, context=context):
            other.rollback(late)
        with bench.refused("marks in the wrong order", InvalidMark, context=context):
            session.remove(late, early)
        session.rollback(early)
        with bench.refused("a mark behind what was rolled back", InvalidMark, context=context):
            session.rollback(late)
        assert session.tokens == before[:10], "a refused rollback changed the session"

    def test_remove_exactly(self, bench: Bench) -> None:
        """Session: after ``remove(exact=True)`` the history is as if the tokens had never been there, at any level."""
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
        """Session: ``remove`` cuts at level CUT and recomputes below it; the tokens are gone either way."""
        session, tokens = _session(bench, bench.tokens(12)), bench.tokens(20, seed=1)
        start = session.mark()
        session.append_tokens(tokens[:10])
        end = session.mark()
        session.append_tokens(tokens[10:])
        session.next_logits()
        before = session.tokens
        level = session.remove(start, end)
        assert level is bench.edit_level, f"at edit level {bench.edit_level.name}, remove says it was {level.name}"
        assert session.tokens == before[:12] + before[22:], "remove left other tokens than the tokens around the span"
        expected = cut_row(bench, before, 12, 22) if level is EditLevel.CUT else fresh_row(bench, session)
        bench.agree(next_row(session), expected, f"the next logits after remove, a {level.name}")

    def test_marks_after_a_removal(self, bench: Bench) -> None:
        """Session: a mark after removed tokens moves with its tokens; a mark among them becomes stale."""
        session = _session(bench, bench.tokens(12))
        marks = [session.mark()]
        for seed in (1, 2, 3, 4):
            session.append_tokens(bench.tokens(5, seed=seed))
            marks.append(session.mark())
        start, inside, end, after, _ = marks
        session.next_logits()
        expected = (*session.tokens[:12], *session.tokens[22:27])
        session.remove(start, end)
        with bench.refused("a mark inside what was removed", InvalidMark, context=session.context):
            session.rollback(inside)
        session.rollback(after)
        assert session.tokens == expected, "a mark behind what was removed did not move with its tokens"

    def test_fork(self, bench: Bench) -> None:
        """Session: a fork and its original do not affect each other."""
        session = _session(bench, bench.tokens(20))
        session.next_logits()
        fork = session.fork(2)
        assert fork.seq_id == 2, f"a fork into sequence 2 is in sequence {fork.seq_id}"
        bench.feed(session.context, bench.tokens(3), 1)
        assert Session(session.context, bench.vocab).seq_id == 3, "a session does not begin in the free sequence"
        for seq_id in (0, 1, 2, 4):
            with bench.refused(f"a fork into sequence {seq_id} of 4", InvalidSequence, context=session.context):
                session.fork(seq_id)
        with session.fork():
            for fifth in (None, 3):
                with bench.refused(f"a fifth sequence of 4: {fifth}", InvalidSequence, context=session.context):
                    session.fork(fifth)
        for either, other, name in ((fork, session, "the fork"), (session, fork, "the original")):
            tokens = other.tokens
            either.generate(GREEDY).run()
            either.append_tokens(bench.tokens(4))
            assert other.tokens == tokens, f"what {name} of a session said is in the other, too"
        for either, name in ((fork, "the fork"), (session, "the original")):
            bench.agree(next_row(either), fresh_row(bench, either), f"the next logits of {name} of a session")

    def test_a_fork_draws_as_the_original(self, bench: Bench) -> None:
        """Session: a fork and its original continue with equal draws, from separate streams."""
        session = _session(bench, bench.tokens(20), UNIFORM)
        session.generate().run()
        fork = session.fork()
        original_tokens, fork_tokens = (either.generate().run().tokens for either in (session, fork))
        assert fork_tokens == original_tokens, "a fork continues with other draws than its original"

    def test_dump_in_mid_answer(self, bench: Bench) -> None:
        """Session: a dump of a paused answer, also inside a character or stop text, continues in another context.

        The draws are the same, and the next logits are within the tolerance (clause 16): a context that cannot use the
        payload decodes the tokens again, in other batches.
        """
        session = _session(bench, bench.tokens(20))
        uninterrupted, after = session.generate(UNIFORM).run(), next_row(session)
        # The second half of the stop text is sampled, but not its end: text is held back at the pauses in between.
        sampling = replace(UNIFORM, stop=(uninterrupted.text[len(uninterrupted.text) // 2 :] + "!",))
        for n in range(1, len(uninterrupted.tokens)):
            session = _session(bench, bench.tokens(20))
            for _event in session.generate(sampling, stopping_criteria=[pause_at(n)]):
                pass
            restored = Session.restore(bench.context(), bench.vocab, session.dump())
            assert restored.tokens == session.tokens, f"a dump of an answer paused after token {n} has other tokens"
            resumed = restored.generate(stopping_criteria=()).run()
            assert resumed.tokens == uninterrupted.tokens, (
                f"dumped while paused after token {n}, an answer has other tokens"
            )
            assert resumed.text == uninterrupted.text, (
                f"dumped while paused after token {n}, an answer reads {resumed.text!r}, not {uninterrupted.text!r}"
            )
            bench.same(next_row(restored), after, f"the next logits of an answer that was dumped after token {n}")
            restored.close()
            session.close()
        for n in (1, 2, 3):  # bytes of a character
            session = _session(bench, bench.tokens(6), GREEDY)
            for _event in session.generate(constraint=Regex("🙂"), stopping_criteria=[pause_at(n)]):
                pass
            restored = Session.restore(bench.context(), bench.vocab, session.dump())
            text = restored.generate(stopping_criteria=()).run().text
            assert text == "🙂", f"dumped after token {n} of one character, an answer reads {text!r}"

    def test_a_scratch_branch(self, bench: Bench) -> None:
        """Session: a scratch branch, in a fork or in the session's sequence, keeps marks and a paused answer.

        The draws are the same, and the next logits are within the tolerance (clause 16): without a sequence to spare,
        tokens are decoded again.
        """
        session = _session(bench, bench.tokens(20), UNIFORM)
        uninterrupted, after = session.generate().run(), next_row(session)
        for n_seq_max in (2, 1):
            session = Session(bench.context(n_seq_max=n_seq_max), bench.vocab, sampling=UNIFORM)
            session.append_tokens(bench.tokens(20))
            mark = session.mark()
            paused = session.generate(stopping_criteria=[pause_at(3)])
            for _event in paused:
                pass
            later = session.mark()
            with session.scratch_branch() as branch:
                branch.truncate(10)
                branch.append_tokens(bench.tokens(5, seed=1))
                branch.generate(GREEDY).run()
            what = f"a scratch branch with {n_seq_max - 1} sequences to spare"
            session.generate().run()
            assert paused.answer.tokens == uninterrupted.tokens, f"an answer that was paused in {what} has other tokens"
            bench.same(next_row(session), after, f"the next logits of an answer that was paused in {what}")
            session.rollback(later)
            session.rollback(mark)
            assert session.tokens == tuple(bench.tokens(20)), f"marks from before {what} are at other places"

    def test_a_scratch_branch_takes_no_draws(self, bench: Bench) -> None:
        """Session: a scratch branch that draws, or raises, does not change the session's next draws."""
        reports: list[tuple[int, int]] = []
        for n_seq_max in (2, 1):
            session = Session(bench.context(n_seq_max=n_seq_max), bench.vocab, sampling=GREEDY)
            session.append_tokens(bench.tokens(10))
            session.next_logits()
            _answer_in_scratch_branch(session)
            session.next_logits(progress=lambda *counts: reports.append(counts))
            assert reports == [], f"after a scratch branch, logits that were known are computed again: {reports}"
            drawn = []
            for scratch_branches in (0, 2):
                session = Session(bench.context(n_seq_max=n_seq_max), bench.vocab, sampling=UNIFORM)
                session.append_tokens(bench.tokens(10))
                session.generate().run()
                for i in range(scratch_branches):
                    _answer_in_scratch_branch(session, fails=i == 1)
                drawn.append(session.generate().run().tokens)
            what = f"two scratch branches with {n_seq_max - 1} sequences to spare"
            assert drawn[0] == drawn[1], f"after {what}, a session draws {drawn[1]} in place of {drawn[0]}"

    def test_a_scratch_branch_in_a_full_context(self, bench: Bench) -> None:
        """Session: a scratch branch needs no room for a copy; without room for tokens it raises; pending ones stay."""
        session = Session(bench.context(n_ctx=40, n_seq_max=2), bench.vocab)
        session.append_tokens(bench.tokens(30))
        session.next_logits()
        with session.scratch_branch() as branch:  # there is no room for a copy
            branch.append_tokens(bench.tokens(4))
            bench.agree(next_row(branch), fresh_row(bench, branch), "the next logits in a scratch branch")
        context = bench.context(n_ctx=40, n_seq_max=2)
        session, other = (Session(context, bench.vocab) for _ in range(2))
        session.append_tokens(bench.tokens(10))
        session.next_logits()
        session.append_tokens(bench.tokens(2, seed=1))
        other.append_tokens(bench.tokens(context.n_free, seed=2))
        other.next_logits()
        before = (session.tokens, session.n_pending)
        with (
            bench.refused("a scratch branch without room", ContextFull, context=context),
            session.scratch_branch() as branch,
        ):
            branch.truncate(11)
            branch.append_tokens(bench.tokens(4))
        assert (session.tokens, session.n_pending) == before, "a scratch branch without room changed the session"

    def test_a_restored_answer_goes_on_counting(self, bench: Bench) -> None:
        """Session: a restored answer ends at its limit, stop text or EOG token as without the dump."""
        letter = bench.vocab.encode("a", add_special=False, parse_special=False)[-1]
        ends = max(bench.vocab.eog_ids)
        greedy = Sampling(temperature=0, logit_bias={letter: 1e4})
        cases = (
            (replace(greedy, max_tokens=5), 5, FinishReason.LENGTH),
            (replace(greedy, max_tokens=9, stop=("aaaaa",)), 5, FinishReason.STOP),
            (replace(greedy, max_tokens=9, min_tokens=4, logit_bias={ends: 2e4, letter: 1e4}), 5, FinishReason.STOP),
        )
        for sampling, n_tokens, reason in cases:
            for n in range(1, n_tokens):
                session = _session(bench, bench.tokens(6), sampling)
                for _event in session.generate(stopping_criteria=[pause_at(n)]):
                    pass
                restored = Session.restore(bench.context(), bench.vocab, session.dump())
                answer = restored.generate(stopping_criteria=()).run()
                assert (len(answer.tokens), answer.finish_reason) == (n_tokens, reason), (
                    f"dumped after token {n} of {n_tokens}, an answer with max_tokens={sampling.max_tokens},"
                    f" stop={sampling.stop} and min_tokens={sampling.min_tokens} has {len(answer.tokens)} tokens, ended"
                    f" with {answer.finish_reason.value}"
                )
                restored.close()
                session.close()

    def test_refused_options(self, bench: Bench) -> None:
        """Session: refused options and edits of nothing do not end a running or a paused answer; other edits do."""
        session = _session(bench, bench.tokens(10))
        running = session.generate(UNIFORM, stopping_criteria=[pause_at(2)])
        next(running)
        sampler = SamplerChain.for_vocab(GREEDY, bench.vocab)
        refused: tuple[dict[str, Any], ...] = (
            {"sampling": Sampling(logit_bias={bench.vocab.size: 1.0})},
            {"sampling": {"temperature": 0}},
            {"speculation": 3},
            {"shift": 3},
            {"speculation": Speculation(PromptLookup()), "shift": TokenShift()},
            {"constraint": "a+"},
            {"timeout": 0},
            {"logits_processors": [lambda tokens, row: row], "sampler": sampler},
        )
        for options in refused:
            with bench.refused(f"generate with {options}", InvalidOption, context=session.context):
                session.generate(**options)
        check_branches_are_refused(bench, session)
        for _event in running:
            pass
        paused: tuple[dict[str, Any], ...] = (
            {"sampling": GREEDY},
            {"constraint": Regex("a+")},
            {"sampler": sampler},
            {"shift": TokenShift()},
            {"special": True},
            {"logits_processors": [lambda tokens, row: row]},
        )
        for options in paused:
            with bench.refused(f"a paused answer with {options}", SessionError, context=session.context):
                session.generate(**options)
        marks = session.mark(), session.mark()
        session.append_tokens([])
        session.follow(session.inputs)
        session.truncate(session.n_tokens)
        session.rollback(marks[0])
        session.remove(*marks)
        session.remove_span(3, 3)
        answer = session.generate(stopping_criteria=()).run()
        assert answer.finish_reason is not FinishReason.CANCELLED, "refused options ended the answer before them"
        assert answer.tokens == session.tokens[10:], "a paused answer began anew"
        check_edits_end_answers(bench, session)
        check_code_is_not_dumped(bench, session)
        check_ranges(bench, session)

    def test_close(self, bench: Bench) -> None:
        """Session: ``close`` frees the session's tokens, and a new session works like the first."""
        context = bench.context(n_ctx=32, n_seq_max=1)
        for seed in (1, 2):
            with Session(context, bench.vocab) as session:
                session.append_tokens(bench.tokens(25, seed=seed))
                mark = session.mark()
                bench.agree(next_row(session), fresh_row(bench, session), f"the next logits of session {seed} of two")
            assert context.length(0) == 0, "a closed session's tokens are still held"
        rows = np.ones((1, bench.model.info.n_embd), np.float32)
        calls: dict[str, Callable[[], object]] = {
            "append": lambda: session.append("a"),
            "append_tokens": lambda: session.append_tokens(bench.tokens(1)),
            "append_rows": lambda: session.append_rows(rows),
            "follow": lambda: session.follow(bench.tokens(1)),
            "set_adapters": lambda: session.set_adapters({}),
            "mark": session.mark,
            "rollback": lambda: session.rollback(mark),
            "truncate": lambda: session.truncate(25),
            "remove": lambda: session.remove(mark, mark),
            "remove_span": lambda: session.remove_span(0, 0),
            "generate": session.generate,
            "next_logits": session.next_logits,
            "prefill": session.prefill,
            "beam_search": session.beam_search,
            "completions": lambda: session.completions(1),
            "score": lambda: session.score(bench.tokens(1)),
            "fork": session.fork,
            "dump": session.dump,
        }
        for name, call in calls.items():
            with bench.refused(f"{name} of a closed session", SessionError, context=context):
                call()
        session.close()
        other = Session(bench.context(), bench.vocab)
        other.context.close()
        other.close()
        other = Session(bench.context(), bench.vocab, owns_context=True)
        other.close()
        with bench.refused("the context of a closed session", ContextClosed):
            other.context.clear()


def _with_last_token(data: bytes, token: int) -> bytes:
    """The dump of a session with another last token."""
    meta, (sequence, tokens, *others) = unpack("session", data)
    return pack("session", meta, (sequence, tokens[:-4] + struct.pack("<i", token), *others))


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
    """The logits of the reference after the tokens of the session."""
    return bench.reference().decode(session.tokens)[-1:]


def cut_row(bench: Bench, before: Sequence[int], start: int, end: int) -> Rows:
    """The logits after a cut of [start, end). The last token is decoded again, because its logits are not stored."""
    reference = bench.reference()
    reference.decode(before)
    reference.cut(start, end)
    reference.truncate(reference.length() - 1)
    return reference.decode(before[-1:])


def _answer_in_scratch_branch(session: Session, *, fails: bool = False) -> None:
    """Answer in a scratch branch with the sampling of the session; then raise if ``fails``."""
    with suppress(KeyError), session.scratch_branch() as branch:
        branch.generate().run()
        if fails:
            raise KeyError("an error of the caller's")
