"""Many requests over one context, a step at a time, in the thread of the caller."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slm_core.closing import Closing
from slm_core.engine.costs import StepCosts, attended
from slm_core.engine.disk import disk_tier
from slm_core.engine.drafting import StepDrafts
from slm_core.engine.notifications import Notifications
from slm_core.engine.options import EngineOptions
from slm_core.engine.plan import ActiveRequest, Piece, WaitingRequest, line_up, plan_step, restore_seconds
from slm_core.engine.recorder import Recorder
from slm_core.engine.requests import Request
from slm_core.engine.restores import Restores
from slm_core.engine.rows import drop_rejected, feed, fill
from slm_core.engine.sequences import Sequences
from slm_core.engine.shares import FairShares
from slm_core.engine.sources import Source, Sources
from slm_core.engine.stats import Positions
from slm_core.engine.store import StoredPrefix
from slm_core.engine.swap import Swap
from slm_core.errors import ContextFull, InvalidOption
from slm_core.generation.events import FinishReason
from slm_core.generation.speculation import in_sequence
from slm_core.protocols import Context
from slm_core.types import EditLevel, Logits

_MOST_DECODING = 64
"""The largest number of pending tokens of a decoding request: its last token, and tokens that a constraint forces.
A request with more pending tokens was preempted: its history is computed in pieces, like a prompt."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Totals:
    """Counters of an engine since its start; see ``engine.EngineStats``."""

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
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class EngineCore(Closing):
    """Answers requests together: ``add`` them, then ``step`` until it returns False.

    A step decodes one batch: a token for every decoding request, and pieces of prompts. An error of one request ends
    only this request.

    Args:
        context: the KV cache; no other code may use it.
        options: how requests share the context.
        recorder: measures requests; None for a new recorder.
        contained: exceptions of callbacks that end only their own request. In the thread of a caller, Ctrl-C is no
            error of a request; an engine's own thread contains every exception.

    Raises:
        InvalidOption: the context lacks a capability that an option needs.

    Attributes:
        totals: counters since the start.
        recorder: measures requests.
        notifications: delays notifications of readers, in an engine's own thread until the backend computes.
    """

    def __init__(
        self,
        context: Context,
        options: EngineOptions,
        recorder: Recorder | None = None,
        *,
        contained: type[BaseException] = Exception,
    ) -> None:
        cuts = options.reuse == "cut"
        if cuts and context.edit_level < EditLevel.CUT:
            raise InvalidOption(
                f"reuse='cut' needs a context that can cut (the edit level is {context.edit_level.name})"
            )
        self.context = context
        self.recorder = recorder if recorder is not None else Recorder()
        self._options = options
        self._costs = StepCosts()
        self._contained = contained
        self._drafts = StepDrafts(context, self._costs, options.step_ms / 1e3, contained)
        self._waiting: list[Request] = []
        self._active: dict[int, Request] = {}  # by request id
        self._restores = Restores(self.recorder.clock)
        self._restores_s = 0.0  # the time of restores in this step
        self._disk = disk_tier(context, options.cache_dir, options.cache_dir_bytes) if options.cache_dir else None
        write_behind = None if self._disk is None else self._disk.write_behind
        self._sequences = Sequences(context, keeps=options.prefix_cache, cuts=cuts, disk=write_behind)
        self._sources = Sources(self._sequences, self._disk, self._costs)
        self._swap = Swap(context, options.swap_bytes)
        self._shares = FairShares()
        self._batch = context.new_batch()
        self.totals = Totals()
        self.notifications = Notifications()

    @property
    def n_waiting(self) -> int:
        """Requests without a sequence."""
        return len(self._waiting)

    @property
    def n_active(self) -> int:
        """Requests with a sequence."""
        return len(self._active) + len(self._restores)

    @property
    def n_cached_sequences(self) -> int:
        """Sequences of answered requests that are kept for later prompts."""
        return self._sequences.n_kept

    def positions(self) -> Positions:
        """How the positions of the context are used."""
        active = [request.seq_id for request in self._started() if request.seq_id is not None]
        n_exclusive = sum(self.context.n_exclusive(seq_id) for seq_id in active)
        free = self.context.n_free
        cached = self._sequences.n_available - free
        return Positions(n_exclusive, self.context.n_ctx - free - n_exclusive - cached, cached, free)

    def add(self, request: Request) -> None:
        """Add a request to the queue.

        Raises:
            ContextFull: the prompt and one more token are longer than the whole context.
            InvalidOption: another request with the same id is not over yet.
        """
        self.check(request)
        self.recorder.admit(request)
        self.totals.n_requests += 1
        self.totals.prompt_tokens += request.n_prompt
        self._shares.begin(request.id, request.key)
        if request.message_ends and not self._sequences.can_fork_inside:  # later prompts can continue here
            request.stop_at(request.message_ends[0])
            request.stop_at(request.message_ends[-1])
        self._waiting.append(request)

    def refuse(self, request: Request, error: Exception) -> None:
        """Fail a request that ``add`` refused."""
        self._fail(request, error)

    def check(self, request: Request) -> None:
        """Refuse a request that the context cannot serve; see ``add``. Any thread may call this.

        Raises:
            ContextFull: a prompt that is longer than the whole context.
            InvalidOption: a drafter that needs another context.
        """
        if request.n_prompt >= self.context.n_ctx:
            raise ContextFull(request.n_prompt + 1, self.context.n_ctx)
        if request.drafts is not None:
            in_sequence(request.drafts.speculation, self.context, 0)

    def step(self) -> bool:
        """Restore parts of dumps, decode one batch, and dump one part to disk; returns whether there is more to do."""
        self._end_interrupted()
        self._admit()
        self._restore_parts()
        if self._active:
            self._compute()
        if not self.n_active:
            self.notifications.flush()
        is_writing = self._disk is not None and self._disk.advance(wait=not self.n_active)
        return bool(self.n_active or self._waiting or is_writing)

    def _restore_parts(self) -> None:
        """Restore parts of dumps in their share of the step. Requests with a complete sequence become active."""
        if not self._restores:
            self._restores_s = 0.0
            return
        self.notifications.flush()
        started = self.recorder.clock()
        pending = [(self._length(request), *self._pending(request)) for request in self._active.values()]
        decoding = [(length, n) for length, n, is_decoding in pending if is_decoding]
        decode_s = 0.0
        if decoding:
            n_attended = sum(attended(length, n) for length, n in decoding)
            decode_s = self._costs.seconds(sum(n for _, n in decoding), n_attended) or 0.0
        has_prompts = len(decoding) < len(pending)
        seconds = restore_seconds(self._options.step_ms / 1e3, decode_s, has_prompts=has_prompts)
        for request, error in self._restores.advance(seconds):
            if error is None:
                self._activate(request)
            else:
                self._fail(request, error)
        self._restores_s = self.recorder.clock() - started

    def _compute(self) -> None:
        self._make_room()
        if any(request.drafts is not None for request in self._active.values()):
            self.notifications.flush()  # drafting may take as long as a step
        # Without a shortage in this step, no request is preempted, and the costs of preemption are not needed.
        is_short = self.context.n_free < max(self.context.n_batch, _MOST_DECODING * len(self._active))
        active = [self._as_active(each, is_short=is_short) for each in self._active.values()]
        states, failed = self._drafts.draft(self._active, active)
        for number, error in failed.items():
            self._fail(self._active[number], error)
        plan = plan_step(states, self.context.n_free, self.context.n_batch, self._affordable)
        for number in plan.preempted:
            self._preempt(self._active[number])
        if plan.full is not None:
            self._end_full(self._active[plan.full])
        if plan.pieces:
            self._run([(self._active[piece.id], piece) for piece in plan.pieces])
            self.totals.n_steps += 1
            self._keep_copies()

    def flush(self, timeout: float | None) -> bool:
        """Wait until all sequences kept so far are on disk, while another thread steps; see ``Engine.flush``."""
        return self._disk is None or self._disk.write_behind.flush(timeout)

    def abort(self, error: BaseException) -> None:
        """Fail all requests with an error that no single request caused, before ``close``.

        Their sequences are not dropped: the context may fail at every call.
        """
        for request in self._requests():
            request.seq_id = None
            self._record_failure(request, error)

    def close(self) -> None:
        """Write kept sequences to disk and close the context. Requests stay unfinished. A second call does nothing."""
        try:
            if self._disk is not None:
                self._disk.close()
        finally:
            self.context.close()

    # Admission and eviction.

    def _started(self) -> list[Request]:
        """The requests with a sequence."""
        return [*self._active.values(), *self._restores.requests]

    def _requests(self) -> list[Request]:
        return [*self._started(), *self._waiting]

    def _end_interrupted(self) -> None:
        for request in self._requests():
            if request.loop.interrupted:
                self._end(request, FinishReason.CANCELLED)
            elif request.loop.progress.n_left == 0:
                self._end(request, FinishReason.LENGTH)

    def _admit(self) -> None:
        """Assign sequences to waiting requests, in order, as long as their histories have room.

        If the first request has no room, no later request is admitted: short prompts cannot starve a long prompt.
        """
        n_slots = min(self._options.n_parallel, self.context.n_seq_max, self.context.n_batch) - self.n_active
        if not self._waiting or n_slots <= 0:
            return
        n_left = self._sequences.n_available
        n_left -= sum(len(request.history.tokens) - self._n_owned(request) + 1 for request in self._started())
        for request in self._in_order_of_admission():
            source = self._source(request)
            if source.is_computed_now:
                continue
            n_left -= len(request.history.tokens) + 1 - source.n_saved
            if n_slots == 0 or (n_left < 0 and self.n_active):
                return
            try:
                self._begin(request, source)
            except Exception as error:  # a backend error in a fork or truncate concerns only this request
                self._fail(request, error)
                continue
            n_slots -= 1

    def _in_order_of_admission(self) -> list[Request]:
        """The waiting requests, in the order of admission."""
        now, by_id = self.recorder.clock(), {request.id: request for request in self._waiting}
        waiting = [
            WaitingRequest(
                number,
                request.priority,
                now - request.arrived_s,
                self._shares.served(request.key),
                request.loop.time_left_s,
            )
            for number, request in by_id.items()
        ]
        return [by_id[number] for number in line_up(waiting, self._options.aging_s)]

    def _source(self, request: Request) -> Source:
        """The source with the most tokens of a request's history; an empty source if the request has a dump."""
        if request.id in self._swap or not self._options.prefix_cache:
            return Source()
        return self._sources.find(request, self._started())

    def _n_spare(self, *starting: Request) -> int:
        """Free positions that neither requests with a sequence nor ``starting`` need for their histories."""
        needs = (len(request.history.tokens) + 1 for request in (*self._started(), *starting))
        n_owned = sum(map(self._n_owned, self._started()))
        return self.context.n_free - sum(needs) + n_owned

    def _begin(self, request: Request, source: Source) -> None:
        """Assign a sequence to a request, with the tokens that its source has, or restore a dump into it."""
        request.seq_id = self._take_sequence(request, source)
        if request.id in self._swap:
            self._waiting.remove(request)
            self._restores.add(request, self._swapped_in(request, request.seq_id))
        elif source.stored is not None:
            self._waiting.remove(request)
            self._restores.add(request, self._from_disk(source.stored, request.seq_id))
        else:
            self._activate(request)
            self._waiting.remove(request)

    def _take_sequence(self, request: Request, source: Source) -> int:
        """Take a sequence for a request, with its adapters; raises if another thread has replaced the adapters."""
        seq_id = self._sequences.take(source.match, self._n_spare(request), request.adapters)
        try:
            request.check_adapters()
        except BaseException:
            self._sequences.drop(seq_id)
            raise
        return seq_id

    def _swapped_in(self, request: Request, seq_id: int) -> Iterator[None]:
        self._sequences.make_room(len(request.history.tokens))
        if (yield from self._swap.bring_back(request.id, seq_id)):
            self._sequences.set_exact(seq_id, request.n_exact)

    def _from_disk(self, stored: StoredPrefix, seq_id: int) -> Iterator[None]:
        assert self._disk is not None, "it has stored the prefix"
        self._sequences.make_room(stored.n_tokens)
        self.totals.disk_tokens += yield from self._disk.restore(stored, seq_id)

    def _activate(self, request: Request) -> None:
        """Compute tokens of a request from now on; its sequence has all the tokens that need not be computed."""
        assert request.seq_id is not None
        if not request.begun and not request.n_preempted:
            request.loop.progress.n_cached = self._length(request)
            request.loop.progress.n_shifted = self._length(request) - self._sequences.n_exact(request.seq_id)
            self.totals.cached_tokens += self._length(request)
        self.recorder.started(request, self._length(request))
        request.loop.start_prefill()
        self._active[request.id] = request

    def _make_room(self) -> None:
        """Drop kept sequences until the next step has room; if that is not enough, give up the newest restores."""
        pending = [self._pending(request) for request in self._active.values()]
        needed = sum(n_pending for n_pending, decoding in pending if decoding)
        needed += min(self.context.n_batch, sum(n_pending for n_pending, decoding in pending if not decoding))
        self._sequences.make_room(needed)
        n_decoding = max(1, sum(n_pending for n_pending, decoding in pending if decoding))
        while self.context.n_free < n_decoding and self._restores:
            self._wait_again(self._restores.requests[-1])

    def _wait_again(self, request: Request) -> None:
        """Take the sequence of a request away; it waits for another one."""
        assert request.seq_id is not None
        self._sequences.drop(request.seq_id)
        request.seq_id = None
        self._active.pop(request.id, None)
        self._restores.remove(request)
        self._waiting.append(request)

    def _keep_copies(self) -> None:
        """Keep copies of sequences that reached a stop, if the context cannot fork a part of a sequence later."""
        for request in self._active.values():
            assert request.seq_id is not None
            if request.stopped(self._length(request)) and not self._sequences.can_fork_inside:
                try:
                    self._sequences.keep_copy(request.seq_id, request.salt, self._n_spare())
                except Exception as error:  # no answer depends on the copy
                    _log.warning("the beginning of request %s is not kept: %s", request.request_id, error)

    # A step.

    def _pending(self, request: Request) -> tuple[int, bool]:
        """The number of pending tokens up to the next stop of a request, and whether it is decoding."""
        n_held = self._length(request)
        n_pending = len(request.history.tokens) - n_held
        if request.begun and n_pending <= _MOST_DECODING:
            return n_pending, True
        stop = request.next_stop(n_held + 1)
        return (n_pending if stop is None else min(n_pending, stop - n_held)), False

    def _as_active(self, request: Request, *, is_short: bool) -> ActiveRequest:
        assert request.seq_id is not None
        n_held = self._length(request)
        n_exclusive = self.context.n_exclusive(request.seq_id) if is_short else 0
        n_pending, decoding = self._pending(request)
        return ActiveRequest(
            id=request.id,
            n_held=n_held,
            n_pending=n_pending,
            decoding=decoding,
            n_exclusive=n_exclusive,
            rank=(request.priority, self._cost_of_preempting(request, n_held, n_exclusive), -request.id),
            last_turn=request.last_turn,
        )

    def _cost_of_preempting(self, request: Request, n_held: int, n_exclusive: int) -> float:
        """Seconds to restore or recompute a request's positions; infinity if preempting it would free none."""
        if not n_exclusive:
            return math.inf
        again, swapped = self._seconds_again(request, n_exclusive), self._swap.seconds(n_held)
        return again if swapped is None else min(again, swapped)

    def _seconds_again(self, request: Request, n_positions: int) -> float:
        """Seconds to compute the last positions of a request again; without measurements, one second per position."""
        seconds = self._costs.seconds(n_positions, attended(self._length(request) - n_positions, n_positions))
        return float(n_positions) if seconds is None else seconds

    def _affordable(self, n_tokens: int, n_attended: int, depth: int, most: int) -> int:
        seconds = self._options.step_ms / 1e3 - self._restores_s
        return self._costs.affordable(seconds, n_tokens, n_attended, depth, most)

    def _run(self, work: Sequence[tuple[Request, Piece]]) -> None:
        """Decode pieces as one batch. If that fails, divide the batch until the failing request is alone."""
        started = time.perf_counter()
        n_attended = sum(attended(self._length(request), piece.n_tokens + piece.n_ahead) for request, piece in work)
        try:
            n_rows = fill(self._batch, self.context, work)
            self.notifications.flush()
            rows = self.context.decode(self._batch)
        except Exception as error:  # a backend error concerns only the requests in the batch
            self._run_apart(work, error)
            return
        seconds = time.perf_counter() - started
        self._costs.note(len(self._batch), n_attended, seconds)
        self.totals.computed_tokens += len(self._batch)
        for request, piece in work:
            request.last_turn = self.totals.n_steps
            request.step_s += seconds
            self._shares.add(request.key, piece.n_tokens + piece.n_ahead)
            if request.drafts is not None:
                request.drafts.decoded(piece.n_ahead, seconds)
        self._hand_out(rows, [(request, n) for (request, _), n in zip(work, n_rows, strict=True)])

    def _run_apart(self, work: Sequence[tuple[Request, Piece]], error: Exception) -> None:
        if len(work) == 1:
            request, piece = work[0]
            if isinstance(error, ContextFull) and piece.n_ahead:
                self._run([(request, replace(piece, n_ahead=0))])
            elif isinstance(error, ContextFull) and request.begun:
                self._end_full(request)
            else:
                self._fail(request, error)
            return
        middle = len(work) // 2
        self._run(work[:middle])
        self._run(work[middle:])

    def _hand_out(self, rows: Logits, shares: Sequence[tuple[Request, int]]) -> None:
        """Feed each request its rows, then end requests: the next call on the context invalidates the rows."""
        first, failed = 0, dict[int, BaseException]()
        for request, n in shares:
            try:
                feed(request, rows[first : first + n], self._count)
            except self._contained as error:  # a sampler, constraint or callback of this request
                failed[request.id] = error
            first += n
        self.recorder.stepped([request for request, n in shares if n], len(self._batch))
        for request, n in shares:
            try:
                if n > 1 and request.id not in failed:
                    drop_rejected(self.context, request)
            except Exception as error:  # a backend error in a truncate concerns only this request
                failed[request.id] = error
            if request.id in failed:
                self._fail(request, failed[request.id])
            elif request.loop.finished:
                self._finish(request)

    def _count(self, request: Request) -> None:
        self.totals.completion_tokens += 1
        self.recorder.token(request)

    def _length(self, request: Request) -> int:
        assert request.seq_id is not None
        return self.context.length(request.seq_id)

    def _n_owned(self, request: Request) -> int:
        """Positions that a request already has: of its tokens, or reserved by its restore."""
        assert request.seq_id is not None
        return self._length(request) or self.context.n_exclusive(request.seq_id)

    # Ends.

    def _end_full(self, request: Request) -> None:
        """End the only active request: the context has no room for one more of its tokens."""
        if request.begun:
            self._end(request, FinishReason.LENGTH)
        else:
            self._fail(request, ContextFull(len(request.history.tokens) + 1, self.context.n_ctx))

    def _end(self, request: Request, reason: FinishReason) -> None:
        try:
            request.loop.end(reason)
        except self._contained as error:  # a callback of this request
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
        self._record_failure(request, error)

    def _record_failure(self, request: Request, error: BaseException) -> None:
        request.error = error
        self.totals.n_failed += 1
        self._release(request, keep=False)

    def _release(self, request: Request, *, keep: bool) -> None:
        """End a request: keep its sequence for later prompts, or drop it."""
        self._swap.forget(request.id)
        if self._disk is not None:
            self._disk.forget(request.id)
        if request.drafts is not None:
            self.totals.drafted_tokens += request.drafts.stats.drafted
            self.totals.accepted_tokens += request.drafts.stats.accepted
        seq_id, request.seq_id = request.seq_id, None
        if request in self._waiting:
            self._waiting.remove(request)
        self._active.pop(request.id, None)
        self._restores.remove(request)
        self._shares.end(request.id)
        try:
            if seq_id is not None and keep:
                request.saved = self._sequences.release(seq_id, request.salt)
            elif seq_id is not None:
                self._sequences.drop(seq_id)
        finally:  # if the context fails at every call, the engine ends, but readers must not wait forever
            self.recorder.ended(request)
            if request.on_end is not None:
                request.on_end()

    def _preempt(self, request: Request) -> None:
        """Preempt a request: its sequence is dumped, or computed again later, whichever is estimated to be faster."""
        assert request.seq_id is not None
        n_exclusive = self.context.n_exclusive(request.seq_id)
        swap_s = self._swap.seconds(self._length(request))
        request.n_exact = self._sequences.n_exact(request.seq_id)
        if swap_s is None or swap_s < self._seconds_again(request, n_exclusive):
            self.totals.n_swapped += self._swap.put(request.id, request.seq_id)
        self._wait_again(request)
        request.waiting_tokens = np.asarray(request.history.tokens, np.int32)
        request.n_preempted += 1
        self.totals.n_preempted += 1
