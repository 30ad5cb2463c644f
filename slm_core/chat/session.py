"""A session: one sequence of a context, with methods for text and generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import check_function, check_kind
from slm_core.chat import answers, branching, picture, session_dump
from slm_core.chat.guard import one_thread
from slm_core.chat.history import SessionHistory
from slm_core.chat.sequences import claim, free_sequences, release
from slm_core.chat.source import SessionSource
from slm_core.closing import Closing
from slm_core.constraints import Spec
from slm_core.context.inputs import Held, block_boundary
from slm_core.context_queue import checked_deadline, queue_of
from slm_core.errors import BackendCrashed, ContextClosed, ContextFull, SessionError
from slm_core.generation import (
    BeamAnswer,
    Beams,
    CompletionEvent,
    Completions,
    Control,
    Event,
    Generation,
    StoppingCriterion,
)
from slm_core.generation.control import checked_timeout
from slm_core.generation.scoring import Score, checked_top
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import Speculation, in_sequence
from slm_core.generation.token_loop import Progress
from slm_core.generation.trained import TrainedLength
from slm_core.interrupts import uninterrupted
from slm_core.keywords import checked_keywords
from slm_core.numerics import common_prefix
from slm_core.protocols import Constraint, Context, Sampler, Vocab
from slm_core.sampling import LogitsProcessor, SamplerChain, Sampling, chain_for
from slm_core.types import Capability, PrefillProgress


class Session(SessionHistory, Closing):
    """One token history and its text.

    Text is decoded lazily: ``append`` only queues tokens, ``generate`` decodes them. A session is for one thread at a
    time: while a call runs, other threads get ``SessionError``. Sessions of one context, such as forks, are for a
    thread each: their calls on the context wait their turn.

    Args:
        context: the KV cache; sessions may share one, each in its own sequence.
        vocab: the model's vocabulary.
        seq_id: an empty sequence that no other session uses; None for the first free one.
        adapters: adapters (LoRA) of the model by name, with their scales; None for none.
        sampling: the default sampling of answers.
        owns_context: whether closing the session closes the context.
        queue_timeout: seconds that a call of any session of the context waits while another thread uses the context;
            then it raises ``ContextBusy``. None keeps the value, which is 300; ``math.inf`` waits without end.
        n_ctx_train: the longest context in training, in tokens, ``info.n_ctx_train``: the first longer history gives a
            warning in the log. 0 for no warning.

    Raises:
        InvalidSequence: the sequence is taken, or none is left.
        InvalidOption: an invalid ``queue_timeout``, an unknown adapter, or a ``sampling`` that is no ``Sampling``.
        UnsupportedInput: adapters, and the context takes none.
    """

    def __init__(
        self,
        context: Context,
        vocab: Vocab,
        *,
        seq_id: int | None = None,
        adapters: Mapping[str, float] | None = None,
        sampling: Sampling | None = None,
        owns_context: bool = False,
        queue_timeout: float | None = None,
        n_ctx_train: int = 0,
    ) -> None:
        check_kind("sampling", sampling, Sampling)
        self.context = context
        self._owns_context = owns_context
        self._queue = queue_of(context)
        if queue_timeout is not None:
            self._queue.deadline_s = checked_deadline(queue_timeout)
        self.vocab = vocab
        self.sampling = sampling if sampling is not None else Sampling()
        self.seq_id = claim(context, seq_id, self)
        try:
            with self._queue:
                context.set_adapters(self.seq_id, {} if adapters is None else adapters)
        except BaseException:
            release(context, self.seq_id)
            raise
        self._sampler = SamplerChain.for_vocab(self.sampling, vocab)
        self._source = SessionSource(context, self.seq_id, TrainedLength(n_ctx_train))
        self._generation: Generation | None = None

    def __repr__(self) -> str:
        return picture.session_line(self)

    @checked_keywords
    @one_thread
    def generate(
        self,
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        constraint: Constraint | Spec | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        special: bool = False,
        speculation: Speculation | None = None,
        shift: TokenShift | None = None,
        timeout: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: PrefillProgress | None = None,
    ) -> Generation:
        """Let the model continue; iterate the result for events, with ``for`` or ``async for``.

        After a pause, ``generate`` with no arguments other than stopping_criteria, timeout, on_event and progress
        continues as if there had been no pause. Omitted arguments keep their values. After ``restore``, pass
        ``speculation`` again if its drafter is code or a model.

        Args:
            sampling: instead of the session's.
            max_tokens: the most tokens of the answer. If this or one of the next four is None, ``sampling`` decides.
            temperature: divides the logits; 0 chooses the likeliest token.
            top_p: keep the likeliest tokens that together reach this probability.
            seed: the seed of the draws.
            stop: texts that end the answer.
            stopping_criteria: called in order after each token.
            constraint: restricts the answer; a constraint object is copied and not advanced.
            sampler: instead of the chain of ``sampling``, which then only sets length and stops.
            logits_processors: change each row before the chain of ``sampling`` reads it, in order; see
                ``sampling.LogitsProcessor``.
            special: whether control tokens other than EOG become text.
            speculation: drafts for the answer; the answer is the same, or drawn from the same distribution.
            shift: continue when the context is full, by dropping tokens; ``Answer.overflowed`` counts them.
            timeout: seconds from the first step on, without pauses, after which the answer ends as cancelled with
                ``Answer.timed_out``; in prefill, within one batch.
            on_event: called with each event, before the iteration yields it.
            progress: called with the number of decoded prompt tokens, and the number of prompt tokens to decode.


        Raises:
            SessionError: there is nothing to continue, or a paused generation would continue with other options.
            InvalidOption: a value of the wrong type, a timeout that is not above 0, speculation and shift together, or
                the drafter "mtp" in a context that does not declare ``MTP``.
            ConstraintError: the spec of a constraint is invalid or unsupported.
        """
        self._source.check_open()
        check_kind("sampling", sampling, Sampling)
        answers.check_source(speculation, shift)
        if speculation is not None:
            speculation = in_sequence(speculation, self.context, self.seq_id)
        if not self.n_tokens:
            raise SessionError("there is nothing to continue: append text first")
        if self._generation is not None and self._generation.paused:
            changed = (sampling, constraint, sampler, shift, max_tokens, temperature, top_p, seed, stop)
            if special or logits_processors or any(option is not None for option in changed):
                raise SessionError(
                    "a generation is paused: call generate() without options to continue it, or roll back first"
                )
            if speculation is not None or self._generation.needs_drafter:
                self._generation.draft_with(speculation)
            return self._generation.resume(stopping_criteria, timeout=timeout, on_event=on_event, progress=progress)
        seconds = checked_timeout(timeout)
        rule = answers.own_constraint(constraint, self.vocab)
        control = Control(() if stopping_criteria is None else stopping_criteria, on_event, progress)
        options = (sampling if sampling is not None else self.sampling).override(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
        )
        answers.check_processors(logits_processors, sampler)
        if sampler is None:
            draws = any(option is not None for option in (sampling, temperature, top_p, seed))
            is_own = not draws and not logits_processors
            sampler = self._sampler if is_own else chain_for(options, self.vocab, logits_processors)
        sampler.set_history(self._source.history)
        self._abandon()  # only now: an error above must not end the current answer
        self._source.decoded.settle()
        n_cached = self.n_tokens - self.n_pending
        begun = Progress(self.n_tokens, n_cached, options.max_tokens, options.stop, time_left_s=seconds)
        self._generation = answers.begun(
            self._source, self.vocab, sampler, begun, control, rule, speculation or shift, special=special
        )
        return self._generation

    @overload
    def next_logits(
        self, *, expected: Sequence[int] = (), progress: PrefillProgress | None = None
    ) -> NDArray[np.float32]: ...
    @overload
    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None: ...
    def next_logits(
        self,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """Decode pending tokens; returns the next logits, float32 [V]; None if ``cancelled`` became true.

        Args:
            cancelled: called before each batch.
            expected: likely next tokens: they are decoded in the last batch, so that their logits are known when the
                history takes them.
            progress: called after each batch.
        """
        with self._guard.block():
            return self._source.next_logits(cancelled, expected=expected, progress=progress)

    @one_thread
    def prefill(
        self, cancelled: Callable[[], bool] = lambda: False, *, progress: PrefillProgress | None = None
    ) -> NDArray[np.float32] | None:
        """Decode the whole history; returns the next logits like ``next_logits``."""
        row = self.next_logits(cancelled, progress=progress)
        if row is not None and self.n_pending and self._source.decoded.decode(self._source.inputs, cancelled) is None:
            return None  # cancelled before removed tokens were decoded again
        return row

    @one_thread
    def beam_search(
        self,
        beams: Beams | None = None,
        *,
        constraint: Constraint | Spec | None = None,
        special: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
        progress: PrefillProgress | None = None,
    ) -> BeamAnswer:
        """Search for the most likely answers; the history does not change, but is decoded.

        To continue with a hypothesis, pass its tokens to ``append_tokens``.

        Args:
            beams: options of the search; None for ``Beams()``.
            constraint: restricts the answers; it is not advanced.
            special: whether control tokens other than EOG become text.
            cancelled: called before each batch; when it returns true, the search ends with its current hypotheses.
            progress: called after each batch of the prompt.

        Raises:
            InvalidOption: a value of the wrong type.
            InvalidSequence: fewer than ``beams.width`` sequences of the context are free.
            ContextFull: no room for a single step.
            SamplingError: no answer satisfies the options.
            ConstraintError: the spec of a constraint is invalid or unsupported.
        """
        self._check_settled()
        check_kind("beams", beams, Beams)
        check_function("cancelled", cancelled)
        check_function("progress", progress)
        rule = answers.own_constraint(constraint, self.vocab)
        return branching.beam_search(self, beams or Beams(), rule, cancelled, progress, special=special)

    @checked_keywords
    @one_thread
    def completions(
        self,
        n: int,
        sampling: Sampling | None = None,
        *,
        best_of: int | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriterion] = (),
        constraint: Constraint | Spec | None = None,
        special: bool = False,
        timeout: float | None = None,
        on_event: Callable[[CompletionEvent], None] | None = None,
        progress: PrefillProgress | None = None,
    ) -> Completions:
        """Generate ``n`` completions; the history does not change, but is decoded.

        The prompt is decoded once; the completions are forks that are decoded together, one batch per step. Completion
        i draws from stream i of the seed, for any ``n``; completion 0 is the answer of ``generate`` with the same seed.
        To continue with a completion, pass its tokens to ``append_tokens``.

        Args:
            n: the number of completions, up to 4096.
            sampling: instead of the session's.
            best_of: generate this many, and keep the n with the largest mean log probability.
            max_tokens: see ``generate``, as for the next four.
            temperature: divides the logits; 0 chooses the likeliest token.
            top_p: keep the likeliest tokens that together reach this probability.
            seed: the seed of the draws.
            stop: texts that end a completion.
            logits_processors: change each row of logits of each completion before it is sampled; see
                ``sampling.LogitsProcessor``.
            stopping_criteria: called in order after each token of each completion.
            constraint: restricts the answers; each completion has a copy.
            special: whether control tokens other than EOG become text.
            timeout: seconds after which the completions are cancelled.
            on_event: called with each event, before the iteration yields it.
            progress: called with the number of decoded prompt tokens, and the number of prompt tokens to decode.

        Raises:
            InvalidOption: ``n`` is below 1, ``best_of`` below ``n``, one of them above 4096, or a value of the wrong
                type.
            InvalidSequence: the context has too few free sequences.
            SessionError: there is nothing to continue.
            ConstraintError: the spec of a constraint is invalid or unsupported.
        """
        self._check_settled()
        check_kind("sampling", sampling, Sampling)
        check_function("on_event", on_event)
        options = (sampling if sampling is not None else self.sampling).override(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
        )
        rule = answers.own_constraint(constraint, self.vocab)
        plan = branching.Plan(options, logits_processors, rule, special=special, timeout=checked_timeout(timeout))
        return branching.completions(self, n, best_of, plan, Control(stopping_criteria, None, progress), on_event)

    @one_thread
    def score(self, content: str | Sequence[int], *, top: int = 0) -> Score:
        """Log probabilities of a text after the history; the session does not change.

        Args:
            content: text, which is never parsed for control tokens, or tokens. At the start of a history, text gets the
                model's BOS token, which is part of the result.
            top: the number of likeliest tokens to list at each position; see ``Score.top``.

        Raises:
            InvalidOption: ``top`` is out of range, or ``content`` is neither text nor tokens.
            ContextFull: no room.
            InvalidToken: a token outside the vocabulary.
        """
        return branching.score(self, content, checked_top(top))

    # Copies.

    @one_thread
    def fork(self, seq_id: int | None = None) -> Session:
        """An independent copy in another sequence of the same context; marks stay with the original.

        Raises:
            InvalidSequence: the sequence is taken, or none is free.
            ContextFull: storage is not shared, and there is no room for a copy.
        """
        self._check_settled()
        twin = Session(self.context, self.vocab, seq_id=seq_id, sampling=self.sampling)
        try:
            with self._queue:
                self.context.fork(self.seq_id, twin.seq_id)
        except BaseException:
            twin.close()
            raise
        twin._source.inputs = list(self._source.inputs)
        twin._source.trained = self._source.trained
        twin._sampler = self._sampler.clone()
        return twin

    @one_thread
    def dump(self) -> bytes:
        """Dump the session: tokens and KV cache, sampler, and a paused answer with its pending text.

        Raises:
            SessionError: an unfinished answer has a constraint or sampler of a custom class.
        """
        self._check_settled()
        with self._queue:
            sequence = self.context.dump(self.seq_id)
        return session_dump.write(
            session_dump.SessionState(
                sequence=sequence,
                inputs=self.inputs,
                sampling=self.sampling,
                sampler=self._sampler.state(),
                answer=answers.kept(self._generation, self._sampler),
            )
        )

    @classmethod
    def restore(
        cls,
        context: Context,
        vocab: Vocab,
        data: bytes,
        *,
        seq_id: int | None = None,
        owns_context: bool = False,
        n_ctx_train: int = 0,
    ) -> Self:
        """A session that continues a dumped one, also in another context or on another backend.

        The sampler is restored. Pass stopping criteria to ``generate`` again, because dumps contain no code.

        Raises:
            InvalidSnapshot, SnapshotMismatch: damaged bytes, or a dump of another model.
            InvalidSequence: the sequence is taken, or none is free.
            ContextFull: no room.
        """
        state = session_dump.read(data, vocab.size)
        session = cls(context, vocab, seq_id=seq_id, sampling=state.sampling, n_ctx_train=n_ctx_train)
        try:
            session._load(state)
        except BaseException:
            session.close()
            raise
        session._owns_context = owns_context
        return session

    @contextlib.contextmanager
    def scratch_branch(self) -> Iterator[Session]:
        """A session for a side branch: this session stays unchanged, even if the branch raises.

        It is a fork if forks share storage and a sequence is free; otherwise this session, rolled back afterwards.
        """
        with self._guard.block():  # not around the branch, whose steps may run in other threads
            self._check_settled()
        if Capability.SHARED_FORK in self.context.capabilities and free_sequences(self.context):
            with self.fork() as twin:
                yield twin
            return
        inputs, n_held, row = list(self._source.inputs), self._source.decoded.n_held, self._source.decoded.row
        generation, sampler, marks = self._generation, self._sampler.state(), self._source.marks.places()
        self._generation = None
        try:
            yield self
        finally:
            with uninterrupted.closing():
                self._return_to(inputs, n_held)
                self._source.decoded.keep(row)
                self._generation = generation
                self._sampler.set_state(sampler)
                self._source.marks.bring_back(marks)
            with contextlib.suppress(ContextFull):  # a fork may share removed tokens: removing them freed no room
                self._source.decoded.decode(inputs[:n_held], lambda: False)

    def close(self) -> None:
        """Drop and release the sequence, or close the context if the session owns it. A second call does nothing."""
        if self._source.closed:
            return
        with uninterrupted.closing():
            self._source.closed = True
            release(self.context, self.seq_id)
            with contextlib.suppress(ContextClosed, BackendCrashed):  # there is nothing left to drop
                self._source.decoded.clear()
            if self._owns_context:
                with self._queue:
                    self.context.close()

    # Steps that several calls share.

    def _load(self, state: session_dump.SessionState) -> None:
        with self._queue:
            self.context.restore(self.seq_id, state.sequence)
        session_dump.check_history(state, self.context, self.context.tokens(self.seq_id), self.vocab.size)
        self._source.inputs = list(state.inputs)
        self._sampler.set_state(state.sampler)
        n_said = 0 if state.answer is None else len(state.answer.progress.tokens)
        self._sampler.set_history(self._source.history, n_said=n_said)  # the state's history is not trusted
        if state.answer is not None:
            self._generation = answers.taken_up(self._source, self.vocab, self._sampler, state.answer)

    def _abandon(self) -> None:
        """Drop an unfinished answer, because its history changes."""
        if self._generation is not None:
            self._generation.cancel()
            self._generation = None

    def _return_to(self, inputs: list[Held], n_held: int) -> None:
        """Make ``inputs`` the history again; at most its first ``n_held`` inputs stay decoded."""
        self._check_settled()
        kept = block_boundary(inputs, min(common_prefix(self._source.inputs, inputs), n_held))
        if kept < self._source.decoded.n_held:
            self._source.decoded.forget_from(kept)
        self._edited(inputs)

    def _edited(self, inputs: list[Held]) -> None:
        self._abandon()
        self._source.decoded.keep(None)
        self._source.inputs = inputs
        self._sampler.set_history(self._source.history)
