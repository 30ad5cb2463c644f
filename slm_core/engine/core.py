"""Many requests over one context, a step at a time, in the thread of the caller."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.closing import Closing
from slm_core.engine.costs import StepCosts, attended
from slm_core.engine.disk import disk_tier
from slm_core.engine.plan import ActiveRequest, Piece, WaitingRequest, line_up, plan_step
from slm_core.engine.prefixes import LEAST_SHARED, NO_MATCH, Match, longest
from slm_core.engine.recorder import Recorder
from slm_core.engine.requests import Request
from slm_core.engine.sequences import Sequences
from slm_core.engine.stats import Positions
from slm_core.engine.store import StoredPrefix
from slm_core.engine.swap import Swap
from slm_core.errors import ContextFull, InvalidOption
from slm_core.generation.events import FinishReason
from slm_core.protocols import Context
from slm_core.types import Logits, Pos

_MOST_DECODING = 64
"""Pending tokens of a request that decodes: its last one, and those that a constraint forces. A request with more was
preempted: its history is computed in pieces, as a prompt is."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine shares a context.

    Attributes:
        n_parallel: the most requests that are computed together; ``n_seq_max`` and ``n_batch`` bound it, too.
        step_ms: milliseconds that a step may take: pieces of prompts are cut so that requests that are decoding get a
            token at least so often. A step that would take longer without any prompt has one prompt token.
        aging_s: seconds of waiting that count as one step of priority.
        prefix_cache: whether sequences of answered requests are kept for prompts that begin alike.
        swap_bytes: memory for dumps of requests that gave up their sequences to others; 0 computes all of them again.
        cache_dir: a directory for dumps of kept sequences, which later prompts go on from, after a restart, too; None
            for none. Other processes may use it, too.
        cache_dir_bytes: of all dumps there together.

    Raises:
        InvalidOption: a number that is not above 0.
    """

    n_parallel: int = 16
    step_ms: float = 100
    aging_s: float = 10
    prefix_cache: bool = True
    swap_bytes: int = 1 << 30
    cache_dir: Path | None = None
    cache_dir_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name in ("step_ms", "aging_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidOption(f"{name}={value!r} (accepted: a number above 0)")
        for name, least in (("n_parallel", 1), ("swap_bytes", 0), ("cache_dir_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidOption(f"{name}={value!r} (accepted: an integer from {least} on)")


@dataclass(frozen=True, slots=True)
class _Source:
    """The sequence that holds most of a history.

    Attributes:
        match: which one, and how many tokens of the history it begins with.
        n_saved: positions that sharing saves. A kept sequence saves none: its positions count as free, as they would be
            if it were dropped.
        is_computed_now: whether an active request is about to compute them: whoever waits for it computes them once.
        stored: a dump on disk, in place of a sequence.
    """

    match: Match
    n_saved: int = 0
    is_computed_now: bool = False
    stored: StoredPrefix | None = None


@dataclass(slots=True)
class Totals:
    """What an engine has done since it was made; see ``engine.EngineStats``."""

    n_requests: int = 0
    n_finished: int = 0
    n_cancelled: int = 0
    n_failed: int = 0
    n_preempted: int = 0
    n_swapped: int = 0
    n_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: int = 0


class EngineCore(Closing):
    """Answers requests together: ``add`` them, then ``step`` until it returns False.

    A step decodes one batch: a token for every request that is decoding, and pieces of prompts. Whatever goes wrong
    with one request ends that request alone.

    Args:
        context: the KV cache; nobody else uses it.
        options: how it is shared.
        recorder: what measures requests; None for one of its own.

    Attributes:
        totals: what was done.
        recorder: what measures requests.
    """

    def __init__(self, context: Context, options: EngineOptions, recorder: Recorder | None = None) -> None:
        self.context = context
        self.recorder = recorder if recorder is not None else Recorder()
        self._options = options
        self._costs = StepCosts()
        self._waiting: list[Request] = []
        self._active: dict[int, Request] = {}  # by request id
        self._disk = disk_tier(context, options.cache_dir, options.cache_dir_bytes) if options.cache_dir else None
        behind = None if self._disk is None else self._disk.behind
        self._sequences = Sequences(context, keeps=options.prefix_cache, disk=behind)
        self._swap = Swap(context, options.swap_bytes)
        self._served: dict[str, float] = {}
        self._batch = context.new_batch()
        self.totals = Totals()

    @property
    def n_waiting(self) -> int:
        """Requests that have no sequence yet."""
        return len(self._waiting)

    @property
    def n_active(self) -> int:
        """Requests that have one."""
        return len(self._active)

    @property
    def n_cached_sequences(self) -> int:
        """Sequences that are kept for prompts that begin alike."""
        return self._sequences.n_kept

    def positions(self) -> Positions:
        """Who holds the positions of the context."""
        active = [request.seq_id for request in self._active.values() if request.seq_id is not None]
        own = sum(self.context.n_exclusive(seq_id) for seq_id in active)
        free = self.context.n_free
        cached = self._sequences.n_available - free
        return Positions(own, self.context.n_ctx - free - own - cached, cached, free)

    def add(self, request: Request) -> None:
        """Take a request; it is over at once where no token may follow.

        Raises:
            ContextFull: its prompt and one more token are longer than the whole context.
            InvalidOption: another request of its id is not over yet.
        """
        self.check(request)
        self.recorder.admit(request)
        self.totals.n_requests += 1
        self.totals.prompt_tokens += request.n_prompt
        if not any(other.key == request.key for other in self._requests()):  # no credit for times without requests
            least = min((self._served.get(other.key, 0.0) for other in self._requests()), default=0.0)
            self._served[request.key] = max(self._served.get(request.key, 0.0), least)
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Refuse what the context could never hold; see ``add``. From any thread."""
        if request.n_prompt >= self.context.n_ctx:
            raise ContextFull(request.n_prompt + 1, self.context.n_ctx)

    def step(self) -> bool:
        """Decode one batch, and write a part of what is kept to disk; returns whether there is more to do."""
        self._end_interrupted()
        self._admit()
        if self._active:
            self._compute()
        is_writing = self._disk is not None and self._disk.advance(wait=not self._active)
        return bool(self._active or self._waiting or is_writing)

    def _compute(self) -> None:
        self._make_room()
        plan = plan_step(
            [self._as_active(request) for request in self._active.values()],
            self.context.n_free,
            self.context.n_batch,
            self._affordable,
        )
        for number in plan.preempted:
            self._preempt(self._active[number])
        if plan.full is not None:
            self._end_full(self._active[plan.full])
        if plan.pieces:
            self._run([(self._active[piece.id], piece) for piece in plan.pieces])
            self.totals.n_steps += 1

    def flush(self, timeout: float | None) -> bool:
        """Wait until what is kept so far is on disk, while another thread steps; see ``Engine.flush``."""
        return self._disk is None or self._disk.behind.flush(timeout)

    def abort(self, error: BaseException) -> None:
        """Fail all requests with an error that is not about one of them."""
        for request in self._requests():
            self._lose(request, error)

    def close(self) -> None:
        """Write what is kept to disk, and close the context. Twice is fine. What is not over by then stays so."""
        if self._disk is not None:
            self._disk.close()
        self.context.close()

    # Admission and eviction.

    def _requests(self) -> list[Request]:
        return [*self._active.values(), *self._waiting]

    def _end_interrupted(self) -> None:
        for request in self._requests():
            if request.loop.interrupted:
                self._end(request, FinishReason.CANCELLED)
            elif request.loop.progress.n_left == 0:
                self._end(request, FinishReason.LENGTH)

    def _admit(self) -> None:
        """Give sequences to waiting requests, in order, as long as their histories have room.

        The first in line is never passed over for want of room: short prompts do not keep a long one waiting.
        """
        n_places = min(self._options.n_parallel, self.context.n_seq_max, self.context.n_batch) - len(self._active)
        if not self._waiting or n_places <= 0:
            return
        n_left = self._sequences.n_available
        n_left -= sum(len(request.history.tokens) - self._length(request) + 1 for request in self._active.values())
        for request in self._line():
            source = self._source(request)
            if source.is_computed_now:
                continue
            n_left -= len(request.history.tokens) + 1 - source.n_saved
            if n_places == 0 or (n_left < 0 and self._active):
                return
            try:
                self._begin(request, source)
            except Exception as error:  # a fork or a truncate that the engine refuses is this request's matter
                self._fail(request, error)
                continue
            n_places -= 1

    def _line(self) -> list[Request]:
        """The waiting requests, first in line first."""
        now, by_id = self.recorder.clock(), {request.id: request for request in self._waiting}
        waiting = [
            WaitingRequest(
                number,
                request.priority,
                now - request.arrived_s,
                self._served.get(request.key, 0.0),
                request.loop.time_left_s,
            )
            for number, request in by_id.items()
        ]
        return [by_id[number] for number in line_up(waiting, self._options.aging_s)]

    def _source(self, request: Request) -> _Source:
        """What holds the longest prefix of a request's history, where it has no dump of its own."""
        if request.id in self._swap or not self._options.prefix_cache:
            return _Source(NO_MATCH)
        source = self._source_here(request)
        if self._disk is None or source.is_computed_now:
            return source
        stored = self._disk.find(request.id, request.waiting_tokens, request.salt)
        n_more = 0 if stored is None else stored.n_shared - source.match.n_shared
        if stored is None or n_more < LEAST_SHARED or stored.n_tokens > self._sequences.n_available:
            return source
        read_s = self._disk.seconds(stored)
        compute_s = self._costs.seconds(n_more, attended(source.match.n_shared, n_more))
        pays = read_s is None or compute_s is None or read_s < compute_s
        return _Source(NO_MATCH, stored=stored) if pays else source

    def _source_here(self, request: Request) -> _Source:
        kept = self._sequences.match(request.waiting_tokens, request.salt)
        if not self._sequences.can_fork_inside:
            return _Source(kept)
        active = longest(
            ((other.id, other.waiting_tokens) for other in self._active.values() if other.salt == request.salt),
            request.waiting_tokens,
        )
        if active.seq_id is None or active.n_shared < kept.n_shared + LEAST_SHARED:
            return _Source(kept)
        other = self._active[active.seq_id]
        return _Source(
            Match(other.seq_id, active.n_shared),
            n_saved=active.n_shared if self._sequences.shares_forks else 0,
            is_computed_now=self._length(other) < active.n_shared,
        )

    def _begin(self, request: Request, source: _Source) -> None:
        """Give a request a sequence, with what another one holds of its history."""
        request.seq_id = self._sequences.take(source.match)
        if request.id in self._swap:
            self._sequences.make_room(len(request.history.tokens))
            self._swap.bring_back(request.id, request.seq_id)
        if source.stored is not None and self._disk is not None:
            self._sequences.make_room(source.stored.n_tokens)
            self.totals.disk_tokens += self._disk.restore(source.stored, request.seq_id)
        if not request.begun and not request.n_preempted:
            request.loop.progress.n_cached = self._length(request)
            self.totals.cached_tokens += self._length(request)
        self.recorder.started(request, self._length(request))
        request.loop.start_prefill()
        self._waiting.remove(request)
        self._active[request.id] = request

    def _make_room(self) -> None:
        """Drop kept sequences until the next step has room."""
        pending = [self._as_active(request) for request in self._active.values()]
        needed = sum(request.n_pending for request in pending if request.decoding)
        needed += min(self.context.n_batch, sum(request.n_pending for request in pending if not request.decoding))
        self._sequences.make_room(needed)

    # A step.

    def _as_active(self, request: Request) -> ActiveRequest:
        assert request.seq_id is not None
        n_held = self.context.length(request.seq_id)
        n_pending = len(request.history.tokens) - n_held
        return ActiveRequest(
            id=request.id,
            n_held=n_held,
            n_pending=n_pending,
            decoding=request.begun and n_pending <= _MOST_DECODING,
            n_exclusive=self.context.n_exclusive(request.seq_id),
            rank=(request.priority, self._cost_of_preempting(request, n_held), -request.id),
            last_turn=request.last_turn,
        )

    def _cost_of_preempting(self, request: Request, n_held: int) -> float:
        """Seconds that it takes to bring back what a request holds; infinity where nothing would be freed."""
        assert request.seq_id is not None
        n_exclusive = self.context.n_exclusive(request.seq_id)
        if not n_exclusive:
            return math.inf
        again, swapped = self._seconds_again(request, n_exclusive), self._swap.seconds(n_held)
        return again if swapped is None else min(again, swapped)

    def _seconds_again(self, request: Request, n_positions: int) -> float:
        """What computing the last positions of a request again takes; before steps were measured, one for each."""
        seconds = self._costs.seconds(n_positions, attended(self._length(request) - n_positions, n_positions))
        return float(n_positions) if seconds is None else seconds

    def _affordable(self, n_tokens: int, n_attended: int, depth: int, most: int) -> int:
        return self._costs.affordable(self._options.step_ms / 1e3, n_tokens, n_attended, depth, most)

    def _run(self, work: Sequence[tuple[Request, Piece]]) -> None:
        """Decode pieces of requests as one batch; where that fails, as two, until the one at fault is alone."""
        started = time.perf_counter()
        n_attended = sum(attended(self._length(request), piece.n_tokens) for request, piece in work)
        try:
            n_rows = self._fill(work)
            rows = self.context.decode(self._batch)
        except Exception as error:  # whatever an engine raises is the matter of the requests in its batch
            self._run_apart(work, error)
            return
        seconds = time.perf_counter() - started
        self._costs.note(len(self._batch), n_attended, seconds)
        self.totals.computed_tokens += len(self._batch)
        for request, piece in work:
            request.last_turn = self.totals.n_steps
            request.step_s += seconds
            self._served[request.key] = self._served.get(request.key, 0.0) + piece.n_tokens
        self._hand_out(rows, [(request, n) for (request, _), n in zip(work, n_rows, strict=True)])

    def _run_apart(self, work: Sequence[tuple[Request, Piece]], error: Exception) -> None:
        if len(work) == 1:
            request = work[0][0]
            if isinstance(error, ContextFull) and request.begun:
                self._end_full(request)
            else:
                self._fail(request, error)
            return
        middle = len(work) // 2
        self._run(work[:middle])
        self._run(work[middle:])

    def _fill(self, work: Sequence[tuple[Request, Piece]]) -> list[int]:
        """Fill the batch; returns how many rows of logits each piece gives."""
        self._batch.clear()
        room = min(self._batch.capacity, self.context.n_free) - sum(piece.n_tokens for _, piece in work)
        n_rows = []
        for request, piece in work:
            assert request.seq_id is not None
            start, tokens = self._length(request), request.history.tokens
            last = start + piece.n_tokens == len(tokens)
            self._batch.extend(
                tokens[start : start + piece.n_tokens], Pos(request.seq_id, start), logits="last" if last else "none"
            )
            ahead = request.loop.expected[:room] if last and room > 0 else ()
            if ahead:
                self._batch.extend(ahead, Pos(request.seq_id, start + piece.n_tokens), logits="all")
                room -= len(ahead)
            n_rows.append(len(ahead) + 1 if last else 0)
        return n_rows

    def _hand_out(self, rows: Logits, shares: Sequence[tuple[Request, int]]) -> None:
        """Give each request its rows. Requests end after that: rows are valid until the next call on the context."""
        first, failed = 0, dict[int, Exception]()
        for request, n in shares:
            try:
                self._feed(request, rows[first : first + n])
            except Exception as error:  # a sampler, constraint or callback of this request
                failed[request.id] = error
            first += n
        self.recorder.stepped([request for request, n in shares if n], len(self._batch))
        for request, _ in shares:
            if request.id in failed:
                self._fail(request, failed[request.id])
            elif request.loop.finished:
                self._finish(request)

    def _feed(self, request: Request, rows: NDArray[np.float32]) -> None:
        for row in rows:
            request.loop.step(row, request.step_s)
            request.step_s = 0.0
            self.totals.completion_tokens += 1
            self.recorder.token(request)
            if request.loop.paused:
                raise InvalidOption("a stopping criterion paused a request of an engine (accepted: FINISH or STOP)")
            if request.loop.finished:
                return

    def _length(self, request: Request) -> int:
        assert request.seq_id is not None
        return self.context.length(request.seq_id)

    # Ends.

    def _end_full(self, request: Request) -> None:
        """The context has no room for one more token of a request that has it to itself."""
        if request.begun:
            self._end(request, FinishReason.LENGTH)
        else:
            self._fail(request, ContextFull(len(request.history.tokens) + 1, self.context.n_ctx))

    def _end(self, request: Request, reason: FinishReason) -> None:
        try:
            request.loop.end(reason)
        except Exception as error:  # a callback of this request
            self._fail(request, error)
            return
        self._finish(request)

    def _finish(self, request: Request) -> None:
        cancelled = request.loop.answer.finish_reason is FinishReason.CANCELLED
        self.totals.n_cancelled += cancelled
        self.totals.n_finished += not cancelled
        self._release(request, keep=not cancelled)

    def _fail(self, request: Request, error: BaseException) -> None:
        error.add_note(f"request {request.request_id}")
        self._lose(request, error)

    def _lose(self, request: Request, error: BaseException) -> None:
        request.error = error
        self.totals.n_failed += 1
        self._release(request, keep=False)

    def _release(self, request: Request, *, keep: bool) -> None:
        """A request is over: keep its sequence for others, or drop it."""
        self._swap.forget(request.id)
        if self._disk is not None:
            self._disk.forget(request.id)
        seq_id, request.seq_id = request.seq_id, None
        if request in self._waiting:
            self._waiting.remove(request)
        self._active.pop(request.id, None)
        if seq_id is not None:
            if keep:
                request.saved = self._sequences.release(seq_id, request.salt)
            else:
                self._sequences.drop(seq_id)
        self.recorder.ended(request)
        if request.on_end is not None:
            request.on_end()

    def _preempt(self, request: Request) -> None:
        """Take a request's sequence away: it is dumped, or computed again later, whichever is sooner."""
        assert request.seq_id is not None
        n_exclusive = self.context.n_exclusive(request.seq_id)
        swap_s = self._swap.seconds(self._length(request))
        if swap_s is None or swap_s < self._seconds_again(request, n_exclusive):
            self.totals.n_swapped += self._swap.put(request.id, request.seq_id)
        self._sequences.drop(request.seq_id)
        request.seq_id = None
        del self._active[request.id]
        request.waiting_tokens = np.asarray(request.history.tokens, np.int32)
        self._waiting.append(request)
        request.n_preempted += 1
        self.totals.n_preempted += 1
