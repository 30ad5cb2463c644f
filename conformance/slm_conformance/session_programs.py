"""Random programs of session calls, and what each must do: sessions in plain Python, with the float64 reference led along.

A step becomes a line of Python, which is run as it stands, so that the script that shows a failure is what was played.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from slm_conformance.answer_model import AnswerModel, At, BrakeError, letter_bias, spelled
from slm_conformance.bench import Bench, Rows
from slm_conformance.draws import Place, may_be_chosen, uniform
from slm_conformance.programs import Mismatch
from slm_conformance.reference import Reference
from slm_conformance.tolerance import relative_errors
from slm_core.chat import Session
from slm_core.errors import (
    ContextFull,
    InvalidMark,
    InvalidSequence,
    InvalidSnapshot,
    SessionError,
    SlmError,
)
from slm_core.generation import BrakeAction, Completion, Event, EventStream, FinishReason
from slm_core.generation.scoring import Score
from slm_core.protocols import Vocab
from slm_core.sampling import Sampling
from slm_core.types import Capability, EditLevel

N_CTX, N_BATCH, N_SLOTS = 64, 8, 3
_ASIDE, _KEPT = 99, 100
"""Sequences of the reference: one to look ahead in, and from the second number on, what was dumped."""
_TIGHT = 16
"""Positions with which a step of several decodes may not get by."""
_PLAIN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

Errors: TypeAlias = set[type[Exception]]


@dataclass(frozen=True, slots=True)
class Append:
    """``append_tokens``, or ``append`` of a text that spells a control token."""

    slot: int
    tokens: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """``generate``, with options by number or the session's own (None), and read ``n_read`` events of it."""

    slot: int
    options: int | None
    brake: At | None
    n_read: int
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class ReadOn:
    """Read on in the answer that was asked for last; first cancel it, perhaps."""

    slot: int
    n_read: int
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class MarkHere:
    """``mark``; marks are numbered."""

    slot: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """``rollback`` to one of the session's marks that are good, the last first; or to any, stale and foreign ones too."""

    slot: int
    mark: int
    any_mark: bool = False


@dataclass(frozen=True, slots=True)
class Shorten:
    """``truncate`` by so many tokens; -1 is one more than there are."""

    slot: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Remove:
    """``remove`` what lies between two marks, chosen as for a rollback."""

    slot: int
    start: int
    end: int
    exact: bool
    any_mark: bool = False


@dataclass(frozen=True, slots=True)
class ForkTo:
    """``fork`` into a slot that is closed."""

    slot: int
    dst: int


@dataclass(frozen=True, slots=True)
class DumpAs:
    """``dump``, kept under ``name``."""

    slot: int
    name: int


@dataclass(frozen=True, slots=True)
class RestoreTo:
    """``Session.restore`` what was kept under ``name``, or that less its last byte, into a slot that is closed."""

    slot: int
    name: int
    damaged: bool


@dataclass(frozen=True, slots=True)
class Detour:
    """``detour``: take ``n_back`` tokens back, append and answer there, and perhaps raise."""

    slot: int
    tokens: tuple[int, ...]
    n_back: int
    fails: bool


@dataclass(frozen=True, slots=True)
class ScoreOf:
    """``score`` of some tokens."""

    slot: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """``completions``, two of them."""

    slot: int
    options: int


@dataclass(frozen=True, slots=True)
class Look:
    """``next_logits``."""

    slot: int


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """``close``."""

    slot: int


Step: TypeAlias = (
    Append
    | Answer
    | ReadOn
    | MarkHere
    | Rollback
    | Shorten
    | Remove
    | ForkTo
    | DumpAs
    | RestoreTo
    | Detour
    | ScoreOf
    | Complete
    | Look
    | CloseSlot
)


@dataclass(slots=True)
class SlotModel:
    """A session, in lists.

    Attributes:
        identity: its number among all sessions of a program: marks are of one session.
        tokens: the history.
        n_drawn: numbers that its own chain has taken.
        answer: the answer that was asked for last, unless an edit has ended it.
        row: the logits that follow, where nothing has to be decoded for them.
        was_cut: whether a span was cut out of the context's sequence.
    """

    identity: int
    tokens: list[int] = field(default_factory=list)
    n_drawn: int = 0
    answer: AnswerModel | None = None
    row: Rows | None = None
    was_cut: bool = False

    @property
    def unfinished(self) -> AnswerModel | None:
        """The answer that goes on or is paused."""
        return self.answer if self.answer is not None and self.answer.reason is None else None


@dataclass(slots=True)
class MarkModel:
    """A mark: whose it is, and where it stands; None where it is stale."""

    identity: int
    place: int | None


def own_options(vocab: Vocab) -> Sampling:
    """The options of the sessions themselves."""
    bias = letter_bias(vocab, "abcdé", 4.0)
    return Sampling(
        **_PLAIN, temperature=1.0, seed=5, max_tokens=4, repeat_penalty=1.3, penalty_window=8, logit_bias=bias
    )


def other_options(vocab: Vocab) -> list[Sampling]:
    """Options that answers of a program bring along."""
    letters = letter_bias(vocab, "abé", 9.0)
    return [
        Sampling(**_PLAIN, temperature=0, max_tokens=6),
        Sampling(**_PLAIN, temperature=0, max_tokens=5, repeat_penalty=2.0, penalty_window=None),
        Sampling(**_PLAIN, temperature=1.3, seed=7, max_tokens=8, logit_bias=letters, stop=("bab", "aa", "éb")),
        Sampling(**_PLAIN, temperature=0.8, seed=8, frequency_penalty=0.7, presence_penalty=0.4, logit_bias=letters),
        Sampling(**_PLAIN, temperature=1.5, seed=9, max_tokens=7, min_tokens=3, eog_bias=6.0),
        Sampling(**_PLAIN, temperature=1.0, seed=7, max_tokens=0),
    ]


def read(events: EventStream, n: int, seen: list[Event]) -> None:
    """Read up to n events, into ``seen``."""
    for event in islice(events, n):
        seen.append(event)


def aside(session: Session, length: int, tokens: Sequence[int], *, fails: bool) -> None:
    """Go elsewhere in a detour, from ``length`` on; perhaps fail there."""
    with session.detour() as elsewhere:
        elsewhere.truncate(length)
        elsewhere.append_tokens(tokens)
        elsewhere.generate().run()
        if fails:
            raise BrakeError


class SessionPlayer:
    """Plays a program on sessions of one context, beside the model and the reference.

    Args:
        bench: makes the context.
        opening: the lines of Python that make the same model.
        n_seq_max: sequences of the context.
    """

    def __init__(self, bench: Bench, opening: str, n_seq_max: int) -> None:
        self._bench = bench
        self._context = bench.context(n_ctx=N_CTX, n_seq_max=n_seq_max, n_batch=N_BATCH)
        self._vocab = bench.vocab
        self._own, self._options = own_options(bench.vocab), other_options(bench.vocab)
        self._reference: Reference = bench.reference()
        self._slots: list[SlotModel | None] = [None] * N_SLOTS
        self._marks: list[MarkModel] = []
        self._dumps: dict[int, SlotModel] = {}
        self._n_sessions = 0
        kv = f"KvType({bench.kv_type.value!r})"
        sizes = f"{N_CTX}, {n_seq_max}, {N_BATCH}, {kv}, {kv}"
        self._script = [*_IMPORTS, *opening.splitlines(), f"context = model.new_context(ContextOptions({sizes}))"]
        self._script += ["vocab, marks = model.vocab, []", "own, options = own_options(vocab), other_options(vocab)"]
        self._names: dict[str, Any] = {"context": self._context, "vocab": self._vocab, "marks": []}
        self._names |= {"own": self._own, "options": self._options}
        exec("\n".join(_NAMES), self._names)  # noqa: S102  (imports of our own)
        for slot in range(N_SLOTS - 1):
            self._open(slot, f"s{slot} = Session(context, vocab, sampling=own)")

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
        """Whether a step makes sense: shrinking leaves out what others need."""
        match step:
            case ForkTo(slot, dst):
                return self._slots[slot] is not None and self._slots[dst] is None
            case RestoreTo(slot, name, _):
                return self._slots[slot] is None and name in self._dumps
            case Rollback(slot) | Remove(slot):
                return self._slots[slot] is not None and bool(self._marks)
            case ReadOn(slot, _, _):
                model = self._slots[slot]
                return model is not None and model.unfinished is not None
            case ScoreOf(slot, _) | Complete(slot, _):
                model = self._slots[slot]
                return model is not None and bool(model.tokens)
        return self._slots[step.slot] is not None

    def _play(self, step: Step) -> None:
        match step:
            case Answer() | ReadOn():
                self._play_answer(step)
            case ScoreOf(slot, _) | Complete(slot, _):
                self._look(slot)
                if self._slot(slot).row is not None:
                    self._play_aside(step)
            case Look(slot):
                self._look(slot)
            case _:
                self._play_edit(step)

    # Lines.

    def _run(self, line: str, errors: Errors, *, must: bool) -> bool:
        """Run a line; returns whether it did as told. What it raises must be among ``errors``."""
        wanted = " or ".join(sorted(error.__name__ for error in errors))
        try:
            exec(line, self._names)  # noqa: S102  (the lines are made here)
        except Exception as error:
            if not isinstance(error, tuple(errors)):
                kind = "" if isinstance(error, SlmError) else ", which is none of slm_core.errors"
                self._fail(line, f"it raised {type(error).__name__} ({error}){kind}; expected: {wanted or 'no error'}")
            self._script.append(f"with suppress({type(error).__name__}):\n    {line}")
            return False
        if errors and must:
            self._fail(line, f"it was accepted; expected: {wanted}")
        self._script.append(line)
        return True

    def _fail(self, line: str, why: str) -> None:
        script = "\n".join([*self._script, line])
        raise Mismatch(f"a program of session calls goes wrong in its last line: {why}\n\n{script}\n")

    def _check(self, holds: bool, line: str, why: str) -> None:
        if not holds:
            self._fail(f"assert {line}", why)

    # Sessions.

    def _slot(self, slot: int) -> SlotModel:
        model = self._slots[slot]
        assert model is not None, "steps of closed slots are not played"
        return model

    def _session(self, slot: int) -> Session:
        session: Session = self._names[f"s{slot}"]
        return session

    def _open(self, slot: int, line: str, like: SlotModel | None = None) -> None:
        self._run(line, set(), must=False)
        self._slots[slot] = self._copied(like)

    def _copied(self, like: SlotModel | None) -> SlotModel:
        self._n_sessions += 1
        model = SlotModel(self._n_sessions) if like is None else copy.deepcopy(like)
        model.identity, model.row = self._n_sessions, None
        return model

    @property
    def _n_free_sequences(self) -> int:
        return self._context.n_seq_max - sum(model is not None for model in self._slots)

    # Edits.

    def _play_edit(self, step: Step) -> None:
        errors, must = self._edit_errors(step)
        if self._run(self._edit_line(step), errors, must=must):
            self._make_edit(step)

    def _edit_line(self, step: Step) -> str:
        name = f"s{step.slot}"
        match step:
            case Append(_, tokens, text):
                return f"{name}.append({text!r})" if text else f"{name}.append_tokens({list(tokens)})"
            case MarkHere():
                return f"marks.append({name}.mark())"
            case Rollback():
                return f"{name}.rollback(marks[{self._chosen(step)[0]}])"
            case Shorten(slot, n_tokens):
                return f"{name}.truncate({self._length(slot, n_tokens)})"
            case Remove(_, _, _, exact):
                start, end = self._chosen(step)
                return f"level = {name}.remove(marks[{start}], marks[{end}], exact={exact})"
            case ForkTo(_, dst):
                return f"s{dst} = {name}.fork()"
            case DumpAs(_, number):
                return f"dump_{number} = {name}.dump()"
            case RestoreTo(_, number, damaged):
                return f"{name} = Session.restore(context, vocab, dump_{number}{'[:-1]' if damaged else ''})"
            case Detour(slot, tokens, n_back, fails):
                # Where a cut was made, what is decoded again is no longer what it was: it saw what was cut.
                length = self._length(slot, 0 if self._slot(slot).was_cut else n_back)
                return f"aside({name}, {length}, {list(tokens)}, fails={fails})"
        return f"{name}.close()"

    def _edit_errors(self, step: Step) -> tuple[Errors, bool]:
        context = self._context
        match step:
            case Append(slot):
                n = len(self._appended(step)) + self._session(slot).n_pending
                return ({ContextFull} if n > context.n_free else set()), True
            case Rollback(slot):
                return self._mark_errors(slot, self._chosen(step)[0]), True
            case Remove(slot):
                start, end = self._chosen(step)
                errors = self._mark_errors(slot, start) | self._mark_errors(slot, end)
                if not errors and self._place(end) < self._place(start):
                    errors = {InvalidMark}
                return errors, True
            case Shorten(_, n_tokens):
                return ({SessionError} if n_tokens < 0 else set()), True
            case ForkTo(slot, _):
                if not self._n_free_sequences:
                    return {InvalidSequence}, True
                copied = 0 if Capability.SHARED_FORK in context.capabilities else self._held(slot)
                return ({ContextFull} if copied > context.n_free else set()), True
            case RestoreTo(_, name, damaged):
                return self._restore_errors(name, damaged=damaged)
            case Detour(_, _, _, fails):
                tight: Errors = {ContextFull} if self._is_tight(step.slot) else set()
                return ({BrakeError} if fails else set()) | tight, fails
        return set(), True

    def _restore_errors(self, name: int, *, damaged: bool) -> tuple[Errors, bool]:
        if damaged:
            return {InvalidSnapshot}, True
        if not self._n_free_sequences:
            return {InvalidSequence}, True
        return ({ContextFull} if len(self._dumps[name].tokens) + _TIGHT > self._context.n_free else set()), False

    def _is_tight(self, slot: int) -> bool:
        return self._context.n_free < len(self._slot(slot).tokens) + _TIGHT

    def _chosen(self, step: Rollback | Remove) -> tuple[int, int]:
        """The marks that a step is about, in the order of their places unless any will do."""
        identity = self._slot(step.slot).identity
        good = [i for i, mark in enumerate(self._marks) if mark.identity == identity and mark.place is not None]
        among = list(range(len(self._marks))) if step.any_mark or not good else good[::-1]
        wanted = (step.mark, step.mark) if isinstance(step, Rollback) else (step.start, step.end)
        first, second = (among[i % len(among)] for i in wanted)
        ordered = step.any_mark or not good or self._place(first) <= self._place(second)
        return (first, second) if ordered else (second, first)

    def _length(self, slot: int, n_tokens: int) -> int:
        return max(0, len(self._slot(slot).tokens) - n_tokens)

    def _mark_errors(self, slot: int, mark: int) -> Errors:
        model = self._marks[mark]
        return {InvalidMark} if model.identity != self._slot(slot).identity or model.place is None else set()

    def _place(self, mark: int) -> int:
        place = self._marks[mark].place
        assert place is not None, "stale marks were refused"
        return place

    def _appended(self, step: Append) -> Sequence[int]:
        if not step.text:
            return step.tokens
        first = not self._slot(step.slot).tokens
        return self._vocab.encode(step.text, add_special=first, parse_special=False)

    def _make_edit(self, step: Step) -> None:
        match step:
            case Append(slot):
                added = self._appended(step)
                if added:
                    self._changed(slot, [*self._slot(slot).tokens, *added])
            case MarkHere(slot):
                self._marks.append(MarkModel(self._slot(slot).identity, len(self._slot(slot).tokens)))
            case Rollback(slot):
                self._shorten(slot, self._place(self._chosen(step)[0]))
            case Shorten(slot, n_tokens):
                self._shorten(slot, self._length(slot, n_tokens))
            case Remove(slot, _, _, exact):
                start, end = map(self._place, self._chosen(step))
                self._remove(slot, start, end, exact=exact)
            case ForkTo(slot, dst):
                self._slots[dst] = self._copied(self._slot(slot))
                self._slot(dst).answer = None
                self._reference.fork(slot, dst)
            case DumpAs(slot, name):
                self._dumps[name] = copy.deepcopy(self._slot(slot))
                self._reference.fork(slot, _KEPT + name)
            case RestoreTo(slot, name, _):
                self._restored(slot, name)
            case CloseSlot(slot):
                self._slots[slot] = None
                self._reference.drop(slot)

    def _restored(self, slot: int, name: int) -> None:
        model = self._slots[slot] = self._copied(self._dumps[name])
        self._reference.fork(_KEPT + name, slot)
        if model.unfinished is None:
            model.answer = None
        else:
            model.unfinished.paused, model.unfinished.brake = True, None

    def _changed(self, slot: int, tokens: list[int]) -> None:
        """The history is another: an unfinished answer is over, and what follows has to be decoded."""
        model = self._slot(slot)
        model.tokens, model.answer, model.row = tokens, None, None

    def _shorten(self, slot: int, length: int) -> None:
        model = self._slot(slot)
        if length == len(model.tokens):
            return
        self._forget_from(slot, length)
        self._changed(slot, model.tokens[:length])
        for mark in self._marks_of(model):
            if mark.place is not None and mark.place > length:
                mark.place = None

    def _remove(self, slot: int, start: int, end: int, *, exact: bool) -> None:
        model, level = self._slot(slot), self._context.edit_level
        wanted = min(level, EditLevel.TRUNCATE) if exact else level
        found = self._names["level"]
        self._check(found is wanted, f"level is EditLevel.{wanted.name}", f"it says that it was {found}")
        if start == end:
            return
        if level is EditLevel.CUT and not exact:
            held = self._reference.length(slot)
            if start < held:
                self._reference.cut(start, min(end, held), slot)
                model.was_cut = True
        else:
            self._forget_from(slot, start)
        self._changed(slot, model.tokens[:start] + model.tokens[end:])
        for mark in self._marks_of(model):
            if mark.place is not None and start < mark.place < end:
                mark.place = None
            elif mark.place is not None and mark.place >= end:
                mark.place -= end - start

    def _marks_of(self, model: SlotModel) -> Iterator[MarkModel]:
        return (mark for mark in self._marks if mark.identity == model.identity)

    def _forget_from(self, slot: int, length: int) -> None:
        """What of the reference's sequence goes, where the context may forget its end, or all."""
        if length < self._reference.length(slot):
            self._reference.truncate(length if self._context.edit_level >= EditLevel.TRUNCATE else 0, slot)

    # Logits.

    def _held(self, slot: int) -> int:
        return len(self._slot(slot).tokens) - self._session(slot).n_pending

    def _next_row(self, slot: int) -> Rows:
        """What follows by the reference, float64 [V]: where all is decoded, the last token is decoded again."""
        model = self._slot(slot)
        if model.row is None:
            if self._reference.length(slot) == len(model.tokens):
                self._forget_from(slot, len(model.tokens) - 1)
            model.row = self._reference.decode(model.tokens[self._reference.length(slot) :], slot)[-1]
        return model.row

    def _error(self, row: Rows) -> float:
        """The most that a logit of a row may be off: all of the row's error may lie in it."""
        return float(self._bench.tolerance.row * np.linalg.norm(row))

    def _look(self, slot: int) -> None:
        model = self._slot(slot)
        errors: Errors = set() if model.tokens else {SessionError}
        # The last token is decoded again where its logits were not kept, in a position that a fork may still hold.
        needed = max(1, self._session(slot).n_pending)
        full: Errors = {ContextFull} if model.row is None and needed > self._context.n_free else set()
        if not self._run(f"row = s{slot}.next_logits()", errors | full, must=bool(errors)):
            return
        expected = self._next_row(slot)
        off, allowed = relative_errors(self._names["row"][None], expected[None])[0], self._bench.tolerance.row
        k = int(np.argmax(np.abs(self._names["row"] - expected)))
        line = f"abs(row[{k}] - {expected[k]:.6g}) < {abs(self._names['row'][k] - expected[k]) / 2:.2g}"
        why = f"the next logits differ from the reference by {off:.1e} of their norm, allowed {allowed:.1e}"
        self._check(bool(off <= allowed), f"{line}  # by the float64 reference", why)

    # Answers.

    def _play_answer(self, step: Answer | ReadOn) -> None:
        slot, model = step.slot, self._slot(step.slot)
        if isinstance(step, Answer) and not self._ask(step):
            return
        answer = model.answer
        assert answer is not None, "it was asked for"
        if isinstance(step, ReadOn) and step.cancel and not answer.paused:
            self._run(f"g{slot}.cancel()", set(), must=False)
            answer.reason = FinishReason.CANCELLED
        pending = max(1, self._session(slot).n_pending)
        at_start = not answer.tokens and model.row is None and pending > self._context.n_free
        errors: Errors = {ContextFull} if at_start else set()
        raises = answer.brake is not None and answer.brake.action is None
        line = f"read(g{slot}, {step.n_read}, seen := [])"
        n_before, before = len(model.tokens), answer.shown(self._vocab) if answer.reason is None else None
        done = self._run(line, errors | ({BrakeError} if raises else set()), must=False)
        self._follow(slot, self._session(slot).tokens[n_before:], before, step.n_read, raised=not done)

    def _ask(self, step: Answer) -> bool:
        """Ask for an answer; returns whether there is one to be read."""
        slot, model = step.slot, self._slot(step.slot)
        paused = model.unfinished is not None and model.unfinished.paused
        arguments = [] if step.options is None else [f"options[{step.options}]"]
        if step.brake is not None:
            action = "None" if step.brake.action is None else f"BrakeAction.{step.brake.action.name}"
            arguments.append(f"brakes=[At({step.brake.n_tokens}, {action})]")
        if step.drafts and not paused:
            arguments.append("speculation=Speculation(PromptLookup(3, 1), 4, adaptive=False)")
        refused = not model.tokens or (paused and step.options is not None)
        errors: Errors = {SessionError} if refused else set()
        n_held = self._held(slot)
        if not self._run(f"g{slot} = s{slot}.generate({', '.join(arguments)})", errors, must=True):
            return False
        if paused and model.unfinished is not None:
            model.unfinished.paused = False
            model.unfinished.brake = step.brake or model.unfinished.brake
            return True
        sampling = self._own if step.options is None else self._options[step.options]
        model.answer = AnswerModel(sampling, len(model.tokens), n_held, sampling.stop, brake=step.brake)
        model.answer.own = step.options is not None
        return True

    def _follow(self, slot: int, said: Sequence[int], before: str | None, n_read: int, *, raised: bool) -> None:
        """Lead the model along with what was said, and compare."""
        model = self._slot(slot)
        answer = model.answer
        assert answer is not None, "it was asked for"
        brake_raised = False
        for token in said:
            over = answer.reason is not None or answer.paused or brake_raised or answer.at_limit
            self._check(not over, f"len(s{slot}.tokens) == {len(model.tokens)}", "the answer goes on after its end")
            self._check_choice(slot, answer, token)
            brake_raised = answer.take(token, self._vocab)
            model.n_drawn += not answer.own
        line = f"s{slot}.tokens[-1] is not None"
        if raised:
            known = brake_raised or not answer.tokens
            self._check(known, line, "something raised, and no brake did")
            return
        self._check(not brake_raised, line, "a brake raised, and that is not told")
        self._end(slot, answer, len(said) < n_read)
        events = self._names["seen"]
        if before is not None:
            shown, told = answer.shown(self._vocab), before + "".join(event.text for event in events)
            self._check(told == shown, f"''.join(event.text for event in seen) == {shown[len(before) :]!r}", "by its bytes")
        if answer.reason is not None:
            self._check_answer(slot, answer)

    def _end(self, slot: int, answer: AnswerModel, stopped: bool) -> None:
        """Where the events stopped, and no token says why: the limit, or a context that is full."""
        if not stopped or answer.reason is not None or answer.paused:
            return
        full = self._context.n_free < max(1, self._session(slot).n_pending)
        why = "the answer stops before its end"
        self._check(answer.at_limit or full, f"not g{slot}.finished", why)
        answer.reason = FinishReason.LENGTH

    def _check_choice(self, slot: int, answer: AnswerModel, token: int) -> None:
        model = self._slot(slot)
        sampling, n_drawn = answer.sampling, answer.n_drawn if answer.own else model.n_drawn
        row = self._next_row(slot)
        place = Place(
            tuple(model.tokens),
            len(answer.tokens),
            uniform(sampling.seed or 0, 0, n_drawn),
            self._vocab.eog_ids,
        )
        right = may_be_chosen(token, row, self._error(row), sampling, place)
        i = len(model.tokens)
        self._check(
            right, f"s{slot}.tokens[{i}] != {token}", f"token {token} is not what {spelled(sampling)} chooses there"
        )
        model.tokens.append(token)
        model.row = None

    def _check_answer(self, slot: int, answer: AnswerModel) -> None:
        found, name = self._names[f"g{slot}"].answer, f"g{slot}.answer"
        reason, text = answer.reason, answer.shown(self._vocab)
        assert reason is not None, "it is over"
        self._check(found.tokens == tuple(answer.tokens), f"{name}.tokens == {tuple(answer.tokens)}", "these were said")
        self._check(found.text == text, f"{name}.text == {text!r}", f"its text is {found.text!r}")
        self._check(
            found.finish_reason is reason,
            f"{name}.finish_reason == {reason.value!r}",
            f"it ended with {found.finish_reason.value}",
        )
        counts = (answer.n_prompt, answer.n_cached, len(answer.tokens))
        usage = found.usage
        told = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self._check(told == counts, f"{name}.usage == Usage{counts}", f"its usage is {told}")

    # What leaves no trace.

    def _play_aside(self, step: ScoreOf | Complete) -> None:
        slot = step.slot
        tight: Errors = {ContextFull} if self._is_tight(slot) else set()
        if isinstance(step, ScoreOf):
            if self._run(f"score = s{slot}.score({list(step.tokens)})", tight, must=False):
                self._check_score(slot, self._names["score"])
            return
        few = self._n_free_sequences < 2
        errors: Errors = {InvalidSequence} if few else tight
        line = f"both = s{slot}.completions(2, options[{step.options}]).run()"
        if self._run(line, errors, must=few):
            for i, completion in enumerate(self._names["both"]):
                self._check_completion(slot, i, completion, self._options[step.options])

    def _check_score(self, slot: int, score: Score) -> None:
        expected, bounds = [], []
        self._reference.fork(slot, _ASIDE)
        row = self._next_row(slot)
        for token in score.tokens:
            expected.append(float(row[token] - np.logaddexp.reduce(row)))
            # log-softmax moves by at most twice the largest change of a logit.
            bounds.append(2 * self._error(row) + 1e-5)
            row = self._reference.decode([token], _ASIDE)[-1]
        off = np.abs(np.array(score.logprobs) - expected) - bounds
        i = int(np.argmax(off))
        line = f"abs(score.logprobs[{i}] - {expected[i]:.6g}) <= {bounds[i]:.2g}"
        self._check(bool(off[i] <= 0), line, f"the reference finds token {i} likely by {expected[i]:.5f}")

    def _check_completion(self, slot: int, i: int, completion: Completion, sampling: Sampling) -> None:
        model, tokens = self._slot(slot), completion.answer.tokens
        answer, row = AnswerModel(sampling, len(model.tokens), 0, sampling.stop), self._next_row(slot)
        self._reference.fork(slot, _ASIDE)
        for n, token in enumerate(tokens):
            history = (*model.tokens, *tokens[:n])
            place = Place(history, n, uniform(sampling.seed or 0, i, n), self._vocab.eog_ids)
            right = answer.reason is None and may_be_chosen(token, row, self._error(row), sampling, place)
            line = f"both[{i}].answer.tokens[{n}] != {token}"
            self._check(right, line, f"it is not what {spelled(sampling)} draws there from stream {i}")
            answer.take(token, self._vocab)
            row = self._reference.decode([token], _ASIDE)[-1]
        if answer.reason is None:
            answer.reason = FinishReason.LENGTH
        text = answer.shown(self._vocab)
        self._check(completion.answer.text == text, f"both[{i}].answer.text == {text!r}", "by its bytes")

    # After each step.

    def _compare(self) -> None:
        for slot, model in enumerate(self._slots):
            if model is None:
                continue
            session, name = self._session(slot), f"s{slot}"
            wanted = tuple(model.tokens)
            self._check(session.tokens == wanted, f"{name}.tokens == {wanted}", f"they are {session.tokens}")
            held = self._held(slot)
            known = self._reference.length(slot)
            least = min(known, len(wanted) - 1) if self._context.edit_level >= EditLevel.TRUNCATE else 0
            self._check(least <= held <= len(wanted), f"{name}.n_pending == {len(wanted) - known}", "so many wait")
            if held > known:
                self._reference.decode(model.tokens[known:held], slot)
            elif held < known:
                self._reference.truncate(held, slot)
            found = self._context.tokens(session.seq_id)[:held]
            self._check(found == wanted[:held], f"context.tokens({name}.seq_id) == {wanted[:held]}", f"{found}")
        if all(model is None for model in self._slots):
            self._check(self._context.n_free == N_CTX, f"context.n_free == {N_CTX}", f"{self._context.n_free} are")


_NAMES = (
    "from slm_conformance.answer_model import At, BrakeError",
    "from slm_conformance.session_programs import aside, other_options, own_options, read",
    "from slm_core.chat import Session",
    "from slm_core.generation import BrakeAction, Usage",
    "from slm_core.generation.speculation import PromptLookup, Speculation",
    "from slm_core.types import EditLevel",
)
_IMPORTS = (
    "from contextlib import suppress",
    "from pathlib import Path",
    "from slm_conformance.factories import make_tiny_model",
    "from slm_conformance.spec import make_backend",
    "from slm_core.errors import *",
    "from slm_core.types import ContextOptions, KvType, ModelOptions",
    *_NAMES,
)
