"""A session: one sequence of a context, and the text around it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from slm_core.chat import session_dump
from slm_core.chat.prompt import encode_segments
from slm_core.errors import ContextClosed, ContextFull, InvalidMark, InvalidSequence, SessionError
from slm_core.generation import Brake, Generation
from slm_core.generation.loop import Progress
from slm_core.protocols import Constraint, Context, Sampler, Vocab
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import Capability, EditLevel, Logits, Pos, Segment

_owners: weakref.WeakKeyDictionary[Context, dict[int, weakref.ref[Session]]] = weakref.WeakKeyDictionary()


class Mark:
    """A place in a session to come back to. Opaque; made by ``Session.mark``."""

    __slots__ = ("__weakref__", "_session")

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)

    def belongs_to(self, session: Session) -> bool:
        """Whether ``session`` made it."""
        return self._session() is session


class Session:
    """One token history and what was said.

    Text is decoded lazily: ``append`` only queues tokens, ``generate`` decodes them. Not for concurrent use.

    Args:
        context: the KV cache; sessions may share one, each with a sequence of its own.
        vocab: the model's vocabulary.
        seq_id: an empty sequence that no other session has; None for the first such.
        sampling: for answers that bring no sampling of their own.
        owns_context: whether closing the session closes the context.

    Raises:
        InvalidSequence: the sequence is taken, or none is left.
    """

    def __init__(
        self,
        context: Context,
        vocab: Vocab,
        *,
        seq_id: int | None = None,
        sampling: Sampling | None = None,
        owns_context: bool = False,
    ) -> None:
        self.context = context
        self._owns_context = owns_context
        self.vocab = vocab
        self.sampling = sampling if sampling is not None else Sampling()
        self.seq_id = _claim(context, seq_id, self)
        self._sampler: Sampler = SamplerChain(self.sampling)
        self._tokens: list[int] = []
        self._logits: NDArray[np.float32] | None = None
        self._marks: weakref.WeakKeyDictionary[Mark, int] = weakref.WeakKeyDictionary()
        self._generation: Generation | None = None
        self._closed = False

    # What it holds.

    @property
    def tokens(self) -> tuple[int, ...]:
        """The history, decoded or not."""
        return tuple(self._tokens)

    @property
    def text(self) -> str:
        """The history as text, control tokens spelled out."""
        return self.vocab.decode(self._tokens, special=True)

    @property
    def n_tokens(self) -> int:
        """Tokens of the history."""
        return len(self._tokens)

    @property
    def n_pending(self) -> int:
        """Those of them that have yet to be decoded."""
        return len(self._tokens) - self._n_held

    @property
    def _n_held(self) -> int:
        return self.context.length(self.seq_id)

    # Growing.

    def append(self, content: str | Sequence[Segment]) -> int:
        """Add text, which is never parsed for control tokens, or segments; returns the number of tokens.

        A text that begins the history gets what the model puts before a text (BOS).

        Raises:
            ContextFull: no room; nothing changed.
        """
        if isinstance(content, str):
            ids = self.vocab.encode(content, add_special=not self._tokens, parse_special=False)
        else:
            ids = encode_segments(self.vocab, content)
        self.append_tokens(ids)
        return len(ids)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens.

        Raises:
            ContextFull: no room; nothing changed.
        """
        self._check_open()
        needed = self.n_pending + len(tokens)
        if needed > self.context.n_free:
            raise ContextFull(needed, self.context.n_free)
        if tokens:
            self._edited([*self._tokens, *tokens])

    def generate(
        self,
        sampling: Sampling | None = None,
        *,
        brakes: Sequence[Brake] | None = None,
        constraint: Constraint | None = None,
        sampler: Sampler | None = None,
        special: bool = False,
    ) -> Generation:
        """Let the model continue; iterate the result for events.

        After a pause, called without arguments (other than brakes), it goes on as if there had been none.

        Args:
            sampling: instead of the session's.
            brakes: asked in order after each token.
            constraint: what may be said.
            sampler: instead of the chain that ``sampling`` describes, which then gives length and stops only.
            special: whether control tokens other than EOG become text.

        Raises:
            SessionError: there is nothing to continue, or a paused generation is to go on with other options.
        """
        self._check_open()
        if not self._tokens:
            raise SessionError("there is nothing to continue: append text first")
        if self._generation is not None and self._generation.paused:
            if sampling is not None or constraint is not None or sampler is not None or special:
                raise SessionError("a generation is paused: go on without options, or roll back first")
            return self._generation.resume(brakes)
        self._abandon()
        options = sampling if sampling is not None else self.sampling
        if sampler is None:
            sampler = self._sampler if sampling is None else SamplerChain(sampling)
        sampler.set_history(self._tokens)
        self._generation = Generation(
            self,
            self.vocab,
            sampler,
            Progress(self.n_tokens, self._n_held, options.max_tokens, options.stop),
            brakes=brakes or (),
            constraint=constraint,
            special=special,
        )
        return self._generation

    def next_logits(self, cancelled: Callable[[], bool] = lambda: False) -> NDArray[np.float32] | None:
        """Decode what is pending, then the logits that follow, float32 [V]; None where ``cancelled`` came true."""
        self._check_open()
        if not self._tokens:
            raise SessionError("there is nothing to continue: append text first")
        if self._logits is not None and not self.n_pending:
            return self._logits
        if not self.n_pending:
            self._forget_held(len(self._tokens) - 1)
        rows = self._decode_until(len(self._tokens), cancelled)
        self._logits = None if rows is None else rows[0].copy()
        return self._logits

    def take(self, token: int) -> None:
        """Add a token that was chosen; for generations."""
        self._tokens.append(token)
        self._logits = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Make ``tokens`` the history: the longest common prefix is kept, the rest is decoded when it is needed.

        Raises:
            ContextFull: no room; nothing changed.
        """
        self._check_open()
        common = _common_prefix(self._tokens, tokens)
        kept = min(common, self._n_held)
        needed, free = len(tokens) - kept, self.context.n_free + self._n_held - kept
        if needed > free:
            raise ContextFull(needed, free)
        if common < len(self._tokens):
            self.truncate(common)
        if common < len(tokens):
            self._edited(list(tokens))

    # Going back.

    def mark(self) -> Mark:
        """Remember this place. Marks after it go stale when the history before them is taken away."""
        self._check_open()
        mark = Mark(self)
        self._marks[mark] = len(self._tokens)
        return mark

    def rollback(self, mark: Mark) -> None:
        """Forget everything after a mark; any number of times.

        Raises:
            InvalidMark: of another session, or stale.
        """
        self._check_open()
        self.truncate(self._place(mark))

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens.

        Raises:
            SessionError: there are fewer.
        """
        self._check_open()
        if not 0 <= length <= len(self._tokens):
            raise SessionError(f"cannot keep {length} tokens (accepted: 0 to {len(self._tokens)})")
        if length == len(self._tokens):
            return
        if length < self._n_held:
            self._forget_held(length)
        self._edited(self._tokens[:length])
        for mark, place in list(self._marks.items()):
            if place > length:
                del self._marks[mark]

    def remove(self, start: Mark, end: Mark, *, exact: bool = False) -> EditLevel:
        """Forget what lies between two marks.

        Args:
            start: where it begins.
            end: where it ends, exclusive.
            exact: compute what remains afresh; otherwise it is cut, and what follows keeps what it saw.

        Returns:
            The edit that was made: CUT, or TRUNCATE / REPLAY where what follows is computed again.

        Raises:
            InvalidMark: of another session, stale, or end before start.
        """
        self._check_open()
        first, last = self._place(start), self._place(end)
        if last < first:
            raise InvalidMark(f"the end mark (at {last}) is before the start mark (at {first})")
        return self.remove_span(first, last, exact=exact)

    def remove_span(self, start: int, end: int, *, exact: bool = False) -> EditLevel:
        """``remove`` by positions: forget [start, end) of the history."""
        self._check_open()
        if not 0 <= start <= end <= len(self._tokens):
            raise SessionError(f"cannot remove [{start}, {end}) (accepted: within 0 to {len(self._tokens)})")
        level = self.context.edit_level
        if start < end:
            held = self._n_held
            if start >= held:
                pass  # nothing of it was decoded
            elif level is EditLevel.CUT and not exact:
                self.context.cut(Pos(self.seq_id, start), Pos(self.seq_id, min(end, held)))
            else:
                level = min(level, EditLevel.TRUNCATE)
                self._forget_held(start)
            self._edited(self._tokens[:start] + self._tokens[end:])
            self._move_marks(start, end)
        return min(level, EditLevel.TRUNCATE) if exact else level

    # Copies.

    def fork(self, seq_id: int | None = None) -> Session:
        """An independent copy in another sequence of the same context; marks stay with the original.

        Raises:
            InvalidSequence: the sequence is taken, or none is left.
            ContextFull: no room for a copy where storage is not shared.
        """
        self._check_open()
        twin = Session(self.context, self.vocab, seq_id=seq_id, sampling=self.sampling)
        try:
            self.context.fork(self.seq_id, twin.seq_id)
        except BaseException:
            twin.close()
            raise
        twin._tokens = list(self._tokens)
        twin._sampler = self._sampler.clone()
        return twin

    def dump(self) -> bytes:
        """Everything: tokens and KV cache, sampler, and a paused answer with its pending text.

        Raises:
            SessionError: an answer is unfinished whose constraint or custom sampler cannot be dumped.
        """
        self._check_open()
        return session_dump.write(
            session_dump.SessionState(
                sequence=self.context.dump(self.seq_id),
                tokens=tuple(self._tokens),
                sampling=self.sampling,
                sampler=self._sampler.state(),
                answer=self._unfinished_answer(),
            )
        )

    @classmethod
    def restore(
        cls, context: Context, vocab: Vocab, data: bytes, *, seq_id: int | None = None, owns_context: bool = False
    ) -> Self:
        """A session that goes on where a dumped one stood; in another context, or on another backend, too.

        The sampler is the session's own chain. Brakes are code and are not in a dump: pass them to ``generate``.

        Raises:
            InvalidSnapshot, SnapshotMismatch: damaged bytes, or of another model.
            InvalidSequence: the sequence is taken, or none is left.
            ContextFull: no room.
        """
        state = session_dump.read(data)
        session = cls(context, vocab, seq_id=seq_id, sampling=state.sampling)
        try:
            session._load(state)
        except BaseException:
            session.close()
            raise
        session._owns_context = owns_context
        return session

    @contextlib.contextmanager
    def detour(self) -> Iterator[Session]:
        """A session to go elsewhere in: whatever is done with it, also where it raises, leaves no trace in this one.

        A fork where forks share storage and a sequence is left; else this session itself, taken back afterwards.
        """
        self._check_open()
        if Capability.SHARED_FORK in self.context.capabilities and _free_sequences(self.context):
            with self.fork() as twin:
                yield twin
            return
        tokens, n_held, logits = list(self._tokens), self._n_held, self._logits
        generation, sampler, marks = self._generation, self._sampler.state(), dict(self._marks)
        self._generation = None
        try:
            yield self
        finally:
            self.follow(tokens)
            if self._n_held > n_held:
                self._forget_held(n_held)
            self._decode_until(n_held, lambda: False)
            self._tokens, self._logits, self._generation = tokens, logits, generation
            self._sampler.set_state(sampler)
            self._marks.update(marks)

    def close(self) -> None:
        """Forget the sequence and give it back, or close the context that is the session's own. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        _owners.get(self.context, {}).pop(self.seq_id, None)
        with contextlib.suppress(ContextClosed):
            self.context.drop(self.seq_id)
        if self._owns_context:
            self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Steps that several calls share.

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("the session is closed")

    def _load(self, state: session_dump.SessionState) -> None:
        self.context.restore(self.seq_id, state.sequence)
        session_dump.check_history(state, self.context.tokens(self.seq_id), self.vocab.size, self.context.n_free)
        self._tokens = list(state.tokens)
        self._sampler.set_state(state.sampler)
        if state.answer is not None:
            chain = self._sampler
            if state.answer.sampler is not None:
                chain = SamplerChain(state.answer.sampler.sampling)
                chain.set_state(state.answer.sampler.state)
            self._generation = Generation(
                self, self.vocab, chain, state.answer.progress, special=state.answer.special, paused=True
            )

    def _unfinished_answer(self) -> session_dump.UnfinishedAnswer | None:
        running = self._generation
        if running is None or running.finished:
            return None
        if running.constrained:
            raise SessionError("an answer under a constraint cannot be dumped: let it end, or roll back")
        own = None
        if running.sampler is not self._sampler:
            if not isinstance(running.sampler, SamplerChain):
                raise SessionError("an answer with a custom sampler cannot be dumped: let it end, or roll back")
            own = session_dump.OwnSampler(running.sampler.sampling, running.sampler.state())
        return session_dump.UnfinishedAnswer(running.progress, own, special=running.special)

    def _decode_until(self, length: int, cancelled: Callable[[], bool]) -> Logits | None:
        """Decode pending tokens up to ``length``; the last one's logits, or None where ``cancelled`` came true."""
        batch = self.context.new_batch()
        rows = None
        while self._n_held < length:
            if cancelled():
                return None
            held = self._n_held
            chunk = self._tokens[held : min(held + batch.capacity, length)]
            batch.clear()
            batch.extend(chunk, Pos(self.seq_id, held), logits="last" if held + len(chunk) == length else "none")
            rows = self.context.decode(batch)
        return rows

    def _abandon(self) -> None:
        """An unfinished answer can no longer go on: the history it belongs to changes."""
        if self._generation is not None:
            self._generation.cancel()
            self._generation = None

    def _edited(self, tokens: list[int]) -> None:
        self._abandon()
        self._logits = None
        self._tokens = tokens
        self._sampler.set_history(tokens)

    def _forget_held(self, length: int) -> None:
        """Take decoded tokens from ``length`` on out of the context; they are decoded again where still wanted."""
        if self.context.edit_level >= EditLevel.TRUNCATE:
            self.context.truncate(Pos(self.seq_id, length))
        else:
            self.context.drop(self.seq_id)

    def _place(self, mark: Mark) -> int:
        if not mark.belongs_to(self):
            raise InvalidMark("the mark is of another session")
        if mark not in self._marks:
            raise InvalidMark("the mark is stale: what it marked was taken away since")
        return self._marks[mark]

    def _move_marks(self, start: int, end: int) -> None:
        for mark, place in list(self._marks.items()):
            if start < place < end:
                del self._marks[mark]
            elif place >= end:
                self._marks[mark] = place - (end - start)


def _free_sequences(context: Context) -> list[int]:
    """Sequences that are empty and have no session."""
    owners = _owners.setdefault(context, {})
    owned = {seq_id for seq_id, owner in owners.items() if owner() is not None}
    return [s for s in range(context.n_seq_max) if s not in owned and context.length(s) == 0]


def _claim(context: Context, seq_id: int | None, session: Session) -> int:
    """Take an empty sequence for a session."""
    free = _free_sequences(context)
    if seq_id is None and not free:
        raise InvalidSequence(
            f"no sequence is left (n_seq_max is {context.n_seq_max}): close a session, or create the context with more"
        )
    chosen = free[0] if seq_id is None else seq_id
    if chosen not in free:
        raise InvalidSequence(f"sequence {chosen} is taken or does not exist (free: {free or 'none'})")
    _owners[context][chosen] = weakref.ref(session)
    return chosen


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
