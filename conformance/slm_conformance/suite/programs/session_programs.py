"""Plays programs of session calls. Expected sessions are plain Python; the float64 reference decodes their tokens.

Each step becomes a line of Python that is run, so that the script of a failure is exactly the played program.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.programs.answer_model import AnswerModel, CriterionError, letter_bias, spelled
from slm_conformance.suite.programs.draws import Choice, may_be_chosen, uniform
from slm_conformance.suite.programs.histories import History
from slm_conformance.suite.programs.scripts import Errors, Script
from slm_conformance.suite.programs.session_steps import (
    Answer,
    Append,
    CloseSlot,
    Complete,
    DumpAs,
    ForkTo,
    Look,
    MarkHere,
    ReadOn,
    Remove,
    RestoreTo,
    Rollback,
    ScoreOf,
    ScratchBranch,
    Shorten,
    Step,
)
from slm_conformance.suite.workshop import Rows
from slm_core.chat import Session
from slm_core.errors import ContextFull, InvalidMark, InvalidSequence, InvalidSnapshot, SessionError
from slm_core.generation import Completion, Event, EventStream, FinishReason
from slm_core.generation.scoring import Score
from slm_core.protocols import Vocab
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel

N_CTX, N_BATCH, N_SLOTS = 80, 8, 3
_LOOKAHEAD, _FIRST_DUMP = 99, 100
"""Sequence ids of the reference: one to look ahead, and the first one for dumps."""
TIGHT = 16
"""Extra positions that a step with several decodes may need."""
PLAIN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(slots=True)
class SlotModel:
    """A session in plain Python.

    Attributes:
        identity: its number among all sessions of a program; a mark belongs to one session.
        history: its tokens, and the part that the context has decoded.
        n_drawn: number of random numbers that its own chain has used.
        answer: the last answer, unless an edit ended it.
    """

    identity: int
    history: History
    n_drawn: int = 0
    answer: AnswerModel | None = None

    @property
    def unfinished(self) -> AnswerModel | None:
        """The answer that is running or paused."""
        return self.answer if self.answer is not None and self.answer.reason is None else None

    def copied(self, identity: int, seq_id: int) -> SlotModel:
        """The same state for another session."""
        return SlotModel(identity, self.history.copy(seq_id), self.n_drawn, copy.deepcopy(self.answer))


@dataclass(slots=True)
class MarkModel:
    """A mark: its session and its position; None if it is stale."""

    identity: int
    position: int | None


def own_options(vocab: Vocab) -> Sampling:
    """The options of sessions."""
    bias, seed = letter_bias(vocab, "abcdé", 6.0), 5
    limits: dict[str, Any] = {"max_tokens": 5, "min_tokens": 3, "eog_bias": 5.0}
    return Sampling(
        **PLAIN, **limits, seed=seed, temperature=1.0, repeat_penalty=2.0, penalty_window=8, logit_bias=bias
    )


def other_options(vocab: Vocab) -> list[Sampling]:
    """The options of single answers in a program."""
    letters = letter_bias(vocab, "abé", 9.0)
    hello = dict.fromkeys(vocab.encode("hello", add_special=False, parse_special=False)[-1:], 9.0)
    return [
        Sampling(**PLAIN, temperature=0, max_tokens=6),
        Sampling(**PLAIN, temperature=0, max_tokens=5, repeat_penalty=2.0, penalty_window=None),
        Sampling(**PLAIN, temperature=1.3, seed=7, max_tokens=8, logit_bias=letters, stop=("bab", "aa", "éb")),
        Sampling(**PLAIN, temperature=0.8, seed=8, frequency_penalty=0.7, presence_penalty=0.4, logit_bias=letters),
        Sampling(**PLAIN, temperature=1.5, seed=9, max_tokens=7, min_tokens=3, eog_bias=6.0),
        Sampling(**PLAIN, temperature=1.0, seed=7, max_tokens=0),
        Sampling(**PLAIN, temperature=1.0, seed=8, max_tokens=6, logit_bias=letters | hello, stop=("lo", "he", "é")),
        own_options(vocab),
    ]


def read(events: EventStream, n: int, events_so_far: list[Event]) -> None:
    """Read up to n events, and append them to ``events_so_far``."""
    for event in islice(events, n):
        events_so_far.append(event)


def aside(session: Session, length: int, tokens: Sequence[int], *, fails: bool) -> None:
    """Answer in a scratch branch from ``length`` on; perhaps raise in it."""
    with session.scratch_branch() as branch:
        branch.truncate(length)
        branch.append_tokens(tokens)
        branch.generate().run()
        if fails:
            raise CriterionError


class SessionPlayer:
    """Plays a program on sessions of one context, on the models in plain Python, and on the reference.

    Args:
        bench: makes the context.
        opening: the lines of Python that load the same model.
        n_seq_max: sequences of the context.
    """

    def __init__(self, bench: Bench, opening: str, n_seq_max: int) -> None:
        self._bench = bench
        self._vocab = bench.vocab
        self._script = Script(bench, opening, _IMPORTS)
        self._context = self._script.context(N_CTX, n_seq_max, N_BATCH)
        self._own, self._options = own_options(bench.vocab), other_options(bench.vocab)
        self._reference = bench.reference()
        self._slots: list[SlotModel | None] = [None] * N_SLOTS
        self._marks: list[MarkModel] = []
        self._dumps: dict[int, SlotModel] = {}
        self._n_sessions = 0
        self._script.run("vocab, marks = model.vocab, []")
        self._script.run("own, options = own_options(vocab), other_options(vocab)")
        for slot in range(N_SLOTS - 1):
            self._script.run(f"s{slot} = Session(context, vocab, sampling=own)")
            history = History(self._reference, slot, self._context.edit_level)
            self._slots[slot] = SlotModel(self._identity(), history)

    def play(self, program: Sequence[Step]) -> None:
        """Play all steps.

        Raises:
            Mismatch: with the script.
        """
        with self._context:
            for step in program:
                if self._applies(step):
                    self._play(step)
                    self._compare()

    def _applies(self, step: Step) -> bool:
        """Whether a step is possible; shrinking may have removed steps that it needs."""
        model = self._slots[step.slot]
        match step:
            case RestoreTo(_, name, _):
                return model is None and name in self._dumps
            case ForkTo(_, dst):
                return model is not None and self._slots[dst] is None
            case Rollback() | Remove():
                return model is not None and bool(self._marks)
            case ReadOn():
                return model is not None and model.unfinished is not None
            case ScoreOf() | Complete():
                return model is not None and bool(model.history.tokens)
        return model is not None

    def _play(self, step: Step) -> None:
        match step:
            case Answer() | ReadOn():
                self._play_answer(step)
            case ScoreOf(slot, _) | Complete(slot, _):
                self._look(slot)
                if self._slot(slot).history.row is not None:
                    self._play_aside(step)
            case Look(slot, expected):
                self._look(slot, expected)
            case _:
                errors, must = self._edit_errors(step)
                if self._script.run(self._edit_line(step), errors, must=must):
                    self._make_edit(step)

    # Sessions.

    def _slot(self, slot: int) -> SlotModel:
        model = self._slots[slot]
        assert model is not None, "steps of closed slots are not played"
        return model

    def _session(self, slot: int) -> Session:
        session: Session = self._script.names[f"s{slot}"]
        return session

    def _identity(self) -> int:
        self._n_sessions += 1
        return self._n_sessions

    def _n_decoded(self, slot: int) -> int:
        return len(self._slot(slot).history.tokens) - self._session(slot).n_pending

    @property
    def _n_free_sequences(self) -> int:
        return self._context.n_seq_max - sum(model is not None for model in self._slots)

    def _n_free(self, slot: int) -> int:
        """Free positions for the session, which first removes tokens that were decoded ahead."""
        n_ahead = self._context.length(self._session(slot).seq_id) - self._n_decoded(slot)
        return self._context.n_free + n_ahead

    def _is_tight(self, slot: int) -> bool:
        return self._context.n_free < len(self._slot(slot).history.tokens) + TIGHT

    # Edits.

    def _edit_line(self, step: Step) -> str:
        name = f"s{step.slot}"
        match step:
            case Append(_, tokens, text):
                return f"{name}.append({text!r})" if text else f"{name}.append_tokens({list(tokens)})"
            case MarkHere():
                return f"marks.append({name}.mark())"
            case Rollback():
                return f"{name}.rollback(marks[{self._chosen(step)[0]}])"
            case Shorten():
                return f"{name}.truncate({self._length(step)})"
            case Remove(_, _, _, exact):
                start, end = self._chosen(step)
                return f"level = {name}.remove(marks[{start}], marks[{end}], exact={exact})"
            case ForkTo(_, dst):
                return f"s{dst} = {name}.fork()"
            case DumpAs(_, number):
                return f"dump_{number} = {name}.dump()"
            case RestoreTo(_, number, damaged):
                return f"{name} = Session.restore(context, vocab, dump_{number}{'[:-1]' if damaged else ''})"
            case ScratchBranch(_, tokens, _, fails):
                return f"aside({name}, {self._length(step)}, {list(tokens)}, fails={fails})"
        return f"{name}.close()"

    def _edit_errors(self, step: Step) -> tuple[Errors, bool]:
        context = self._context
        match step:
            case Append(slot):
                n = len(self._appended(step)) + self._session(slot).n_pending
                return ({ContextFull} if n > self._n_free(slot) else set()), True
            case Rollback(slot):
                return self._mark_errors(slot, self._chosen(step)[0]), True
            case Remove(slot):
                start, end = self._chosen(step)
                errors = self._mark_errors(slot, start) | self._mark_errors(slot, end)
                if not errors and self._position(end) < self._position(start):
                    errors = {InvalidMark}
                return errors, True
            case Shorten(_, n_tokens):
                return ({SessionError} if n_tokens < 0 else set()), True
            case ForkTo(slot, _):
                if not self._n_free_sequences:
                    return {InvalidSequence}, True
                copied = 0 if Capability.SHARED_FORK in context.capabilities else self._n_decoded(slot)
                return ({ContextFull} if copied > self._n_free(slot) else set()), True
            case RestoreTo(_, name, damaged):
                return self._restore_errors(name, damaged=damaged)
            case ScratchBranch(slot, _, _, fails):
                tight: Errors = {ContextFull} if self._is_tight(slot) else set()
                return ({CriterionError} if fails else set()) | tight, fails
        return set(), True

    def _restore_errors(self, name: int, *, damaged: bool) -> tuple[Errors, bool]:
        if damaged:
            return {InvalidSnapshot}, True
        if not self._n_free_sequences:
            return {InvalidSequence}, True
        n_tokens = len(self._dumps[name].history.tokens)
        return ({ContextFull} if n_tokens + TIGHT > self._context.n_free else set()), False

    def _mark_errors(self, slot: int, mark: int) -> Errors:
        model = self._marks[mark]
        return {InvalidMark} if model.identity != self._slot(slot).identity or model.position is None else set()

    def _chosen(self, step: Rollback | Remove) -> tuple[int, int]:
        """The marks of a step, sorted by position unless any order is allowed."""
        identity = self._slot(step.slot).identity
        good = [i for i, mark in enumerate(self._marks) if mark.identity == identity and mark.position is not None]
        any_mark = step.any_mark or not good
        among = list(range(len(self._marks))) if any_mark else good[::-1]
        marks = (step.mark, step.mark) if isinstance(step, Rollback) else (step.start, step.end)
        first, second = (among[i % len(among)] for i in marks)
        ordered = any_mark or self._position(first) <= self._position(second)
        return (first, second) if ordered else (second, first)

    def _position(self, mark: int) -> int:
        position = self._marks[mark].position
        assert position is not None, "stale marks were refused"
        return position

    def _length(self, step: Shorten | ScratchBranch) -> int:
        history = self._slot(step.slot).history
        if isinstance(step, Shorten):
            return max(0, len(history.tokens) - step.n_tokens)
        # After a cut, no token is decoded again: it had attended to the removed tokens, and its values would change.
        return max(0, len(history.tokens) - (0 if history.was_cut else step.n_back))

    def _appended(self, step: Append) -> Sequence[int]:
        if not step.text:
            return step.tokens
        first = not self._slot(step.slot).history.tokens
        return self._vocab.encode(step.text, add_special=first, parse_special=False)

    def _make_edit(self, step: Step) -> None:
        match step:
            case Append(slot):
                if added := self._appended(step):
                    self._slot(slot).history.extend(added)
                    self._slot(slot).answer = None
            case MarkHere(slot):
                self._marks.append(MarkModel(self._slot(slot).identity, len(self._slot(slot).history.tokens)))
            case Rollback(slot):
                self._shorten(slot, self._position(self._chosen(step)[0]))
            case Shorten(slot):
                self._shorten(slot, self._length(step))
            case Remove(slot, _, _, exact):
                start, end = map(self._position, self._chosen(step))
                self._remove(slot, start, end, exact=exact)
            case ForkTo(slot, dst):
                self._slots[dst] = replace(self._slot(slot).copied(self._identity(), dst), answer=None)
            case DumpAs(slot, name):
                self._dumps[name] = self._slot(slot).copied(0, _FIRST_DUMP + name)
            case RestoreTo(slot, name, _):
                model = self._slots[slot] = self._dumps[name].copied(self._identity(), slot)
                if model.unfinished is not None:
                    model.unfinished.paused, model.unfinished.criterion = True, None
            case CloseSlot(slot):
                self._slot(slot).history.drop()
                self._slots[slot] = None

    def _shorten(self, slot: int, length: int) -> None:
        model = self._slot(slot)
        if length == len(model.history.tokens):
            return
        model.history.shorten(length)
        model.answer = None
        for mark in self._marks_of(model):
            if mark.position is not None and mark.position > length:
                mark.position = None

    def _remove(self, slot: int, start: int, end: int, *, exact: bool) -> None:
        model, level = self._slot(slot), self._script.names["level"]
        expected = model.history.remove(start, end, exact=exact)
        self._script.check(level is expected, f"level is EditLevel.{expected.name}", f"it says that it was {level}")
        if start == end:
            return
        model.answer = None
        for mark in self._marks_of(model):
            if mark.position is not None and start < mark.position < end:
                mark.position = None
            elif mark.position is not None and mark.position >= end:
                mark.position -= end - start

    def _marks_of(self, model: SlotModel) -> Iterator[MarkModel]:
        return (mark for mark in self._marks if mark.identity == model.identity)

    # Logits.

    def _error(self, row: Rows) -> float:
        """The error bound of a single logit of a row: it may have all of the row's error."""
        return float(self._bench.tolerance.row * np.linalg.norm(row))

    def _look(self, slot: int, expected: Sequence[int] = ()) -> None:
        history = self._slot(slot).history
        errors: Errors = set() if history.tokens else {SessionError}
        # Without stored logits, the last token is decoded again; a fork may still share its position.
        needed = max(1, self._session(slot).n_pending)
        full: Errors = {ContextFull} if history.row is None and needed > self._context.n_free else set()
        # At level REPLAY, removing expected tokens drops the history, too, and takes room that forks share.
        is_expecting = len(expected) > 0 and history.level >= EditLevel.TRUNCATE
        arguments = f"expected={list(expected)}" if is_expecting else ""
        if self._script.run(f"row = s{slot}.next_logits({arguments})", errors | full, must=bool(errors)):
            self._script.check_row("row", history.next_row())

    # Answers.

    def _play_answer(self, step: Answer | ReadOn) -> None:
        slot, model = step.slot, self._slot(step.slot)
        if isinstance(step, Answer) and not self._ask(step):
            return
        answer = model.answer
        assert answer is not None, "it was asked for"
        n_shown = len(answer.shown(self._vocab))
        if isinstance(step, ReadOn) and step.cancel and not answer.paused:
            self._script.run(f"g{slot}.cancel()")
            answer.reason = FinishReason.CANCELLED
        pending = max(1, self._session(slot).n_pending)
        full = not answer.tokens and model.history.row is None and pending > self._context.n_free
        errors: Errors = {ContextFull} if full else set()
        if answer.criterion is not None and answer.criterion.action is None:
            errors.add(CriterionError)
        n_before = len(model.history.tokens)
        outcome = self._script.run(f"read(g{slot}, {step.n_read}, seen := [])", errors)
        self._follow(slot, self._session(slot).tokens[n_before:], step.n_read, raised=not outcome)
        if outcome:
            self._check_text(slot, n_shown)

    def _ask(self, step: Answer) -> bool:
        """Start an answer; returns whether there is one to read."""
        slot, model = step.slot, self._slot(step.slot)
        paused = model.unfinished if model.unfinished is not None and model.unfinished.paused else None
        arguments = [] if step.options is None else [f"options[{step.options}]"]
        if step.criterion is not None:
            arguments.append(f"stopping_criteria=[{step.criterion.spelled()}]")
        if step.drafts and paused is None:
            arguments.append("speculation=Speculation(PromptLookup(3, 1), 4, adaptive=False)")
        refused = not model.history.tokens or (paused is not None and step.options is not None)
        errors: Errors = {SessionError} if refused else set()
        n_decoded = self._n_decoded(slot)
        if not self._script.run(f"g{slot} = s{slot}.generate({', '.join(arguments)})", errors, must=True):
            return False
        if paused is not None:
            paused.paused, paused.criterion = False, step.criterion or paused.criterion
            return True
        sampling = self._own if step.options is None else self._options[step.options]
        model.answer = AnswerModel(
            sampling, len(model.history.tokens), n_decoded, sampling.stop, criterion=step.criterion
        )
        model.answer.has_own_chain = step.options is not None
        return True

    def _follow(self, slot: int, tokens: Sequence[int], n_read: int, *, raised: bool) -> None:
        """Advance the model by the tokens of an answer."""
        model, check, line = self._slot(slot), self._script.check, f"s{slot}.tokens[-1] is not None"
        answer = model.answer
        assert answer is not None, "it was asked for"
        criterion_raised = False
        for token in tokens:
            over = answer.reason is not None or answer.paused or criterion_raised or answer.at_limit
            check(not over, f"len(s{slot}.tokens) == {len(model.history.tokens)}", "the answer continues after its end")
            self._check_choice(slot, answer, token)
            criterion_raised = answer.take(token, self._vocab)
            model.n_drawn += not answer.has_own_chain
        if raised:
            check(criterion_raised or not answer.tokens, line, "something raised, and no stopping criterion did")
            return
        check(not criterion_raised, line, "a stopping criterion raised, and that is not told")
        if len(tokens) < n_read and answer.reason is None and not answer.paused:
            full = self._context.n_free < max(1, self._session(slot).n_pending)
            check(answer.at_limit or full, f"not g{slot}.finished", "the answer stops before its end")
            answer.reason = FinishReason.LENGTH

    def _check_choice(self, slot: int, answer: AnswerModel, token: int) -> None:
        model, sampling = self._slot(slot), answer.sampling
        history, n_drawn = model.history, answer.n_drawn if answer.has_own_chain else model.n_drawn
        row, number = history.next_row(), uniform(sampling.seed or 0, 0, n_drawn)
        choice = Choice(tuple(history.tokens), len(answer.tokens), number, self._vocab.eog_ids)
        right = may_be_chosen(token, row, self._error(row), sampling, choice)
        why = f"token {token} is not what {spelled(sampling)} chooses there"
        self._script.check(right, f"s{slot}.tokens[{len(history.tokens)}] != {token}", why)
        history.extend([token])

    def _check_text(self, slot: int, n_shown: int) -> None:
        answer = self._slot(slot).answer
        assert answer is not None, "it was asked for"
        streamed = "".join(event.text for event in self._script.names["seen"])
        new = answer.shown(self._vocab)[n_shown:]
        self._script.check(streamed == new, f"''.join(event.text for event in seen) == {new!r}", f"it is {streamed!r}")
        if answer.reason is not None:
            self._check_answer(slot, answer, answer.reason)

    def _check_answer(self, slot: int, answer: AnswerModel, reason: FinishReason) -> None:
        actual, name, text = self._script.names[f"g{slot}"].answer, f"g{slot}.answer", answer.shown(self._vocab)
        tokens, counts = tuple(answer.tokens), (answer.n_prompt, answer.n_cached, len(answer.tokens))
        usage = (actual.usage.prompt_tokens, actual.usage.cached_tokens, actual.usage.completion_tokens)
        ended = f"it ended with {actual.finish_reason.value}"
        check = self._script.check
        check(actual.tokens == tokens, f"{name}.tokens == {tokens}", f"they are {actual.tokens}")
        check(actual.text == text, f"{name}.text == {text!r}", f"it is {actual.text!r}")
        check(actual.finish_reason is reason, f"{name}.finish_reason == {reason.value!r}", ended)
        check(usage == counts, f"{name}.usage == Usage{counts}", f"it is {usage}")

    # Calls that leave no trace.

    def _play_aside(self, step: ScoreOf | Complete) -> None:
        slot, tight = step.slot, self._is_tight(step.slot)
        errors: Errors = {ContextFull} if tight else set()
        if isinstance(step, ScoreOf):
            if self._script.run(f"score = s{slot}.score({list(step.tokens)})", errors):
                self._check_score(slot, self._script.names["score"])
            return
        few = self._n_free_sequences < 2
        line = f"both = s{slot}.completions(2, options[{step.options}]).run()"
        if self._script.run(line, {InvalidSequence} if few else errors, must=few):
            for i, completion in enumerate(self._script.names["both"]):
                self._check_completion(slot, i, completion, self._options[step.options])

    def _check_score(self, slot: int, score: Score) -> None:
        history = self._slot(slot).history
        row, ahead = history.next_row(), history.copy(_LOOKAHEAD)
        for i, token in enumerate(score.tokens):
            expected = float(row[token] - np.logaddexp.reduce(row))
            bound = 2 * self._error(row) + 1e-5  # log-softmax moves by at most twice the largest change of a logit
            line = f"abs(score.logprobs[{i}] - {expected:.6g}) <= {bound:.2g}"
            right = abs(score.logprobs[i] - expected) <= bound
            self._script.check(right, line, f"it is {score.logprobs[i]:.6g}, by the reference {expected:.6g}")
            ahead.extend([token])
            row = ahead.next_row()

    def _check_completion(self, slot: int, i: int, completion: Completion, sampling: Sampling) -> None:
        history = self._slot(slot).history
        row, ahead = history.next_row(), history.copy(_LOOKAHEAD)
        answer = AnswerModel(sampling, len(history.tokens), 0, sampling.stop)
        for n, token in enumerate(completion.answer.tokens):
            choice = Choice(tuple(ahead.tokens), n, uniform(sampling.seed or 0, i, n), self._vocab.eog_ids)
            right = answer.reason is None and may_be_chosen(token, row, self._error(row), sampling, choice)
            line = f"both[{i}].answer.tokens[{n}] != {token}"
            self._script.check(right, line, f"it is not what {spelled(sampling)} draws there from stream {i}")
            answer.take(token, self._vocab)
            ahead.extend([token])
            row = ahead.next_row()
        answer.reason = answer.reason or FinishReason.LENGTH
        text, actual = answer.shown(self._vocab), completion.answer.text
        self._script.check(actual == text, f"both[{i}].answer.text == {text!r}", f"it is {actual!r}")

    # After each step.

    def _compare(self) -> None:
        check = self._script.check
        for slot, model in enumerate(self._slots):
            if model is None:
                continue
            session, name, history = self._session(slot), f"s{slot}", model.history
            expected, n_decoded = tuple(history.tokens), self._n_decoded(slot)
            check(session.tokens == expected, f"{name}.tokens == {expected}", f"they are {session.tokens}")
            can_truncate = self._context.edit_level >= EditLevel.TRUNCATE
            least = min(history.n_decoded, len(expected) - 1) if can_truncate else 0
            line = f"{name}.n_pending <= {len(expected) - least}"
            check(least <= n_decoded <= len(expected), line, f"{session.n_pending} tokens are to be decoded again")
            history.decode_to(n_decoded)
            actual = self._context.tokens(session.seq_id)[:n_decoded]
            check(
                actual == expected[:n_decoded],
                f"context.tokens({name}.seq_id)[:{n_decoded}] == {expected[:n_decoded]}",
                f"{actual}",
            )
        n_used = sum(self._context.length(seq_id) > 0 for seq_id in range(self._context.n_seq_max))
        n_open = sum(model is not None for model in self._slots)
        line = f"sum(context.length(s) > 0 for s in range({self._context.n_seq_max})) <= {n_open}"
        check(n_used <= n_open, line, "a sequence holds tokens of no session")


_IMPORTS = (
    "from slm_conformance.suite.programs.answer_model import Every, CriterionError",
    "from slm_conformance.suite.programs.session_programs import aside, other_options, own_options, read",
    "from slm_core.chat import Session",
    "from slm_core.generation import StoppingAction, Usage",
    "from slm_core.generation.speculation import PromptLookup, Speculation",
    "from slm_core.types import EditLevel",
)
