"""A session: one sequence of a context, with methods for text and generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from slm_core.chat import answers, branching, picture, session_dump
from slm_core.chat.marks import Mark
from slm_core.chat.prompt import encode_segments
from slm_core.chat.records import check_records, context_inputs
from slm_core.chat.sequences import claim, free_sequences, release
from slm_core.chat.source import SessionSource
from slm_core.closing import Closing
from slm_core.constraints import Spec
from slm_core.context.inputs import Held, block_boundary, token_ids
from slm_core.context_queue import checked_deadline, queue_of
from slm_core.embedding_rows import EmbeddingRows
from slm_core.errors import ContextClosed, ContextFull, InvalidMark, InvalidSequence, SessionError
from slm_core.generation import (
    BeamAnswer,
    Beams,
    CompletionEvent,
    Completions,
    Control,
    Event,
    Generation,
    Infill,
    StoppingCriterion,
)
from slm_core.generation.control import checked_timeout
from slm_core.generation.scoring import Score, checked_top
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import Speculation
from slm_core.generation.token_loop import Progress
from slm_core.numerics import common_prefix
from slm_core.protocols import Constraint, Context, Sampler, Vocab
from slm_core.sampling import LogitsProcessor, SamplerChain, Sampling, chain_for
from slm_core.types import Capability, EditLevel, PrefillProgress, Segment


class Session(Closing):
    """One token history and its text.

    Text is decoded lazily: ``append`` only queues tokens, ``generate`` decodes them. A session is for one thread at a
    time. Sessions of one context, such as forks, are for a thread each: their calls on the context wait their turn.

    Args:
        context: the KV cache; sessions may share one, each in its own sequence.
        vocab: the model's vocabulary.
        seq_id: an empty sequence that no other session uses; None for the first free one.
        adapters: adapters (LoRA) of the model by name, with their scales; None for none.
        sampling: the default sampling of answers.
        owns_context: whether closing the session closes the context.
        queue_timeout: seconds that a call of any session of the context waits while another thread uses the context;
            then it raises ``ContextBusy``. None keeps the value, which is 300; ``math.inf`` waits without end.

    Raises:
        InvalidSequence: the sequence is taken, or none is left.
        InvalidOption: an invalid ``queue_timeout``, or an unknown adapter.
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
    ) -> None:
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
        self._source = SessionSource(context, self.seq_id)
        self._generation: Generation | None = None

    def __repr__(self) -> str:
        return picture.session_line(self)

    # The history.

    @property
    def closed(self) -> bool:
        """Whether the session is closed."""
        return self._source.closed

    @property
    def tokens(self) -> tuple[int, ...]:
        """The history, decoded or not; ``EMBEDDED`` for each embedding row."""
        return tuple(token_ids(self._source.inputs))

    @property
    def inputs(self) -> tuple[Held, ...]:
        """The history: a token id, or a record of an embedding row or of a token in a bidirectional block, each."""
        return tuple(self._source.inputs)

    @property
    def text(self) -> str:
        """The history as text, including control tokens, without embedding rows."""
        return self.vocab.decode(self._source.history, special=True)

    @property
    def n_tokens(self) -> int:
        """Tokens and embedding rows of the history."""
        return self._source.n_tokens

    @property
    def adapters(self) -> Mapping[str, float]:
        """The adapters of the session, by name, with their scales."""
        return self.context.adapters(self.seq_id)

    def set_adapters(self, scales: Mapping[str, float]) -> None:
        """Continue with these adapters of the model, by name, in place of the present ones.

        The history is decoded again when it is needed: keys and values of other adapters are never used.

        Raises:
            UnsupportedInput: the context takes no adapters.
            InvalidOption: an unknown adapter, or a scale that is no finite number.
            ContextFull: the history shares storage with a fork, and there is no room to decode it again.
        """
        self._check_settled()
        with self._queue:
            before, n_held = self.adapters, self._source.decoded.n_held
            try:
                self.context.set_adapters(self.seq_id, scales)
            except InvalidSequence:  # the names are valid, and the sequence has tokens of other adapters
                free = self.context.n_free + self.context.n_exclusive(self.seq_id)
                if n_held > free:
                    raise ContextFull(n_held, free, seq_id=self.seq_id) from None
                self._source.decoded.clear()
                self.context.set_adapters(self.seq_id, scales)
        if self.adapters != before:
            self._edited(self._source.inputs)

    @property
    def n_pending(self) -> int:
        """Tokens and embedding rows of the history that are not decoded yet."""
        return self._source.n_pending

    # Growing.

    def append(self, content: str | Infill | Sequence[Segment]) -> int:
        """Add text, which is never parsed for control tokens, a text with a gap, or segments.

        A text at the start of the history gets the model's BOS token. A text with a gap is the start.

        Returns:
            The number of tokens.

        Raises:
            ContextFull: no room; nothing changed.
            SessionError: a text with a gap after other tokens.
            VocabError: a text with a gap, and the model was not trained to fill it.
        """
        if isinstance(content, Infill):
            if self.n_tokens:
                raise SessionError(f"a text with a gap begins a history, and this one has {self.n_tokens} tokens")
            ids = content.tokens(self.vocab)
        elif isinstance(content, str):
            ids = self.vocab.encode(content, add_special=not self.n_tokens, parse_special=False)
        else:
            ids = encode_segments(self.vocab, content)
        self.append_tokens(ids)
        return len(ids)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens.

        Raises:
            ContextFull: no room; nothing changed.
        """
        self._append(tokens)

    def append_rows(
        self,
        rows: NDArray[np.float32],
        *,
        blocks: Sequence[tuple[int, int]] = (),
        offsets: NDArray[np.integer] | None = None,
    ) -> None:
        """Add embedding rows in place of tokens, such as an encoded image; they are copied.

        Args:
            rows: float32 [n, E].
            blocks: ranges [start, end) of rows that are bidirectional blocks; at most ``n_batch`` rows each.
            offsets: M-RoPE offsets of the rows, integers [n, 3]; see ``Batch.add_embeddings``.

        Raises:
            InvalidEmbedding: no rows, or rows that are not finite float32 [n, E]; invalid offsets.
            InvalidOption: invalid blocks, or a block that is longer than ``n_batch``.
            UnsupportedInput: the context takes no rows, no blocks or no offsets.
            ContextFull: no room; nothing changed.
        """
        self._source.check_open()
        self._append(context_inputs(self.context, EmbeddingRows(rows, blocks, offsets)))

    def generate(
        self,
        sampling: Sampling | None = None,
        *,
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
            InvalidOption: a value of the wrong type, a timeout that is not above 0, or speculation and shift together.
            ConstraintError: the spec of a constraint is invalid or unsupported.
        """
        self._source.check_open()
        answers.check_kind("sampling", sampling, Sampling)
        answers.check_source(speculation, shift)
        if not self.n_tokens:
            raise SessionError("there is nothing to continue: append text first")
        if self._generation is not None and self._generation.paused:
            if special or logits_processors or any(o is not None for o in (sampling, constraint, sampler, shift)):
                raise SessionError("a generation is paused: go on without options, or roll back first")
            if speculation is not None or self._generation.needs_drafter:
                self._generation.draft_with(speculation)
            return self._generation.resume(stopping_criteria, timeout=timeout, on_event=on_event, progress=progress)
        seconds = checked_timeout(timeout)
        rule = answers.own_constraint(constraint, self.vocab)
        options = sampling if sampling is not None else self.sampling
        answers.check_processors(logits_processors, sampler)
        if sampler is None:
            is_own = sampling is None and not logits_processors
            sampler = self._sampler if is_own else chain_for(options, self.vocab, logits_processors)
        sampler.set_history(self._source.history)
        self._abandon()  # only now: an error above must not end the current answer
        self._source.decoded.settle()
        n_cached = self.n_tokens - self.n_pending
        begun = Progress(self.n_tokens, n_cached, options.max_tokens, options.stop, time_left_s=seconds)
        control = Control(stopping_criteria or (), on_event, progress)
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
        return self._source.next_logits(cancelled, expected=expected, progress=progress)

    def prefill(
        self, cancelled: Callable[[], bool] = lambda: False, *, progress: PrefillProgress | None = None
    ) -> NDArray[np.float32] | None:
        """Decode the whole history; returns the next logits like ``next_logits``."""
        row = self.next_logits(cancelled, progress=progress)
        if row is not None and self.n_pending and self._source.decoded.decode(self._source.inputs, cancelled) is None:
            return None  # cancelled before removed tokens were decoded again
        return row

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
            InvalidSequence: fewer than ``beams.width`` sequences of the context are free.
            ContextFull: no room for a single step.
            SamplingError: no answer satisfies the options.
            ConstraintError: the spec of a constraint is invalid or unsupported.
        """
        self._check_settled()
        answers.check_kind("beams", beams, Beams)
        rule = answers.own_constraint(constraint, self.vocab)
        return branching.beam_search(self, beams or Beams(), rule, cancelled, progress, special=special)

    def completions(
        self,
        n: int,
        sampling: Sampling | None = None,
        *,
        best_of: int | None = None,
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
            n: the number of completions.
            sampling: instead of the session's.
            best_of: generate this many, and keep the n with the largest mean log probability.
            logits_processors: change each row of logits of each completion before it is sampled; see
                ``sampling.LogitsProcessor``.
            stopping_criteria: called in order after each token of each completion.
            constraint: restricts the answers; each completion has a copy.
            special: whether control tokens other than EOG become text.
            timeout: seconds after which the completions are cancelled.
            on_event: called with each event, before the iteration yields it.
            progress: called with the number of decoded prompt tokens, and the number of prompt tokens to decode.

        Raises:
            InvalidOption: ``n`` is below 1, or ``best_of`` below ``n``.
            InvalidSequence: the context has too few free sequences.
            SessionError: there is nothing to continue.
            ConstraintError: the spec of a constraint is invalid or unsupported.
        """
        self._check_settled()
        answers.check_kind("sampling", sampling, Sampling)
        options = sampling if sampling is not None else self.sampling
        rule = answers.own_constraint(constraint, self.vocab)
        plan = branching.Plan(options, logits_processors, rule, special=special, timeout=checked_timeout(timeout))
        return branching.completions(
            self, n, best_of, plan, Control(tuple(stopping_criteria), None, progress), on_event
        )

    def score(self, content: str | Sequence[int], *, top: int = 0) -> Score:
        """Log probabilities of a text after the history; the session does not change.

        Args:
            content: text, which is never parsed for control tokens, or tokens. At the start of a history, text gets the
                model's BOS token, which is part of the result.
            top: the number of likeliest tokens to list at each position; see ``Score.top``.

        Raises:
            InvalidOption: ``top`` is out of range.
            ContextFull: no room.
            InvalidToken: a token outside the vocabulary.
        """
        return branching.score(self, content, checked_top(top))

    def follow(self, inputs: Sequence[Held]) -> None:
        """Make ``inputs`` the history: the longest common prefix is kept, later inputs are decoded when needed.

        Inputs are token ids, or records as ``inputs`` of a session has them.

        Raises:
            ContextFull: no room; nothing changed.
            UnsupportedInput, InvalidEmbedding, InvalidOption: as in ``append_rows``.
        """
        self._check_settled()
        common = block_boundary(self._source.inputs, common_prefix(self._source.inputs, inputs))
        check_records(self.context, inputs[common:])
        kept = min(common, self._source.decoded.n_held)
        needed, free = len(inputs) - kept, self.context.n_free + self._source.decoded.n_held - kept
        if needed > free:
            raise ContextFull(needed, free, seq_id=self.seq_id)
        if common < self.n_tokens:
            self.truncate(common)
        if common < len(inputs):
            self._edited(list(inputs))

    # Going back.

    def mark(self) -> Mark:
        """A mark at the end of the history. It becomes stale when tokens before it are removed."""
        self._source.check_open()
        return self._source.marks.add(self.n_tokens)

    def rollback(self, mark: Mark) -> None:
        """Remove all tokens after a mark. A mark can be used any number of times.

        Raises:
            InvalidMark: the mark is stale, or of another session.
        """
        self._source.check_open()
        self.truncate(self._source.marks.place(mark))

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens and embedding rows.

        Raises:
            SessionError: the history has fewer, or ``length`` divides a bidirectional block.
        """
        self._check_settled()
        if not 0 <= length <= self.n_tokens:
            raise SessionError(f"cannot keep {length} tokens (accepted: 0 to {self.n_tokens})")
        self._source.check_boundary(length)
        if length == self.n_tokens:
            return
        if length < self._source.decoded.n_held:
            self._source.decoded.forget_from(length)
        self._edited(self._source.inputs[:length])
        self._source.marks.truncate(length)

    def remove(self, start: Mark, end: Mark, *, exact: bool = False) -> EditLevel:
        """Remove the tokens between two marks.

        Args:
            start: the first removed token.
            end: the end, exclusive.
            exact: decode later tokens again; otherwise the tokens are cut, and later tokens keep their values.

        Returns:
            The edit: CUT, or TRUNCATE / REPLAY if later tokens are decoded again.

        Raises:
            InvalidMark: a mark is stale or of another session, or ``end`` is before ``start``.
        """
        self._source.check_open()
        first, last = self._source.marks.place(start), self._source.marks.place(end)
        if last < first:
            raise InvalidMark(f"the end mark (at {last}) is before the start mark (at {first})")
        return self.remove_span(first, last, exact=exact)

    def remove_span(self, start: int, end: int, *, exact: bool = False) -> EditLevel:
        """Like ``remove``, by positions: remove [start, end) of the history.

        Raises:
            SessionError: the range is outside the history, or divides a bidirectional block.
        """
        self._check_settled()
        if not 0 <= start <= end <= self.n_tokens:
            raise SessionError(f"cannot remove [{start}, {end}) (accepted: within 0 to {self.n_tokens})")
        for boundary in (start, end):
            self._source.check_boundary(boundary)
        level = self._source.take_out(start, end, exact=exact)
        if start < end:
            self._edited(self._source.inputs)
        return level

    # Copies.

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
        twin._sampler = self._sampler.clone()
        return twin

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
        cls, context: Context, vocab: Vocab, data: bytes, *, seq_id: int | None = None, owns_context: bool = False
    ) -> Self:
        """A session that continues a dumped one, also in another context or on another backend.

        The sampler is restored. Pass stopping criteria to ``generate`` again, because dumps contain no code.

        Raises:
            InvalidSnapshot, SnapshotMismatch: damaged bytes, or a dump of another model.
            InvalidSequence: the sequence is taken, or none is free.
            ContextFull: no room.
        """
        state = session_dump.read(data, vocab.size)
        session = cls(context, vocab, seq_id=seq_id, sampling=state.sampling)
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
            self._return_to(inputs, n_held)
            self._source.decoded.keep(row)
            self._generation = generation
            self._sampler.set_state(sampler)
            self._source.marks.bring_back(marks)

    def close(self) -> None:
        """Drop and release the sequence, or close the context if the session owns it. Twice is fine."""
        if self._source.closed:
            return
        self._source.closed = True
        release(self.context, self.seq_id)
        with contextlib.suppress(ContextClosed):
            self._source.decoded.clear()
        if self._owns_context:
            with self._queue:
                self.context.close()

    # Steps that several calls share.

    def _check_settled(self) -> None:
        """Check that the session is open; remove tokens decoded ahead."""
        self._source.check_open()
        self._source.settle()

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
        """Make ``inputs`` the history again, with the first ``n_held`` decoded; the others may have no room now."""
        self._check_settled()
        kept = block_boundary(inputs, min(common_prefix(self._source.inputs, inputs), n_held))
        if kept < self._source.decoded.n_held:
            self._source.decoded.forget_from(kept)
        self._edited(inputs)
        with contextlib.suppress(ContextFull):  # a fork may share the removed tokens, so removing them freed no room
            self._source.decoded.decode(inputs[:n_held], lambda: False)

    def _append(self, inputs: Sequence[Held]) -> None:
        self._check_settled()
        needed = self.n_pending + len(inputs)
        if needed > self.context.n_free:
            raise ContextFull(needed, self.context.n_free, seq_id=self.seq_id)
        if inputs:
            self._edited([*self._source.inputs, *inputs])

    def _edited(self, inputs: list[Held]) -> None:
        self._abandon()
        self._source.decoded.keep(None)
        self._source.inputs = inputs
        self._sampler.set_history(self._source.history)
