"""The state and counters of an engine at one moment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from slm_core.engine.metrics import WINDOW_S, Latency, Rate
from slm_core.engine.requests import Request

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A request that is not over.

    Attributes:
        request_id: its id.
        state: "waiting" for a sequence, in "prefill", or in "decode".
        prompt_tokens: tokens of its prompt.
        cached_tokens: tokens of its prompt that were cached.
        completion_tokens: tokens of its answer so far.
        n_preempted: how often it was preempted.
        age_s: seconds since the call.
    """

    request_id: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    n_preempted: int
    age_s: float

    @classmethod
    def of(cls, request: Request, now: float) -> RequestStatus:
        """The status of a request.

        Args:
            request: the request.
            now: the time on the request's clock.
        """
        state = "waiting" if request.seq_id is None else "decode" if request.begun else "prefill"
        return cls(
            request.request_id,
            state,
            request.n_prompt,
            request.n_cached,
            len(request.times.tokens),
            request.n_preempted,
            now - request.times.arrived,
        )


@dataclass(frozen=True, slots=True)
class Positions:
    """How the positions of a context are used; the four numbers add up to ``n_ctx``.

    Attributes:
        own: positions that one active request alone uses.
        shared: positions that several sequences share.
        cached: positions that one kept prefix alone uses; they are freed when requests need room.
        free: free positions.
    """

    own: int
    shared: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True, repr=False)
class EngineStats:
    """The state of an engine, and its counters since the start. ``print`` shows them as a table.

    Attributes:
        n_active: requests with a sequence.
        n_waiting: requests that wait for a sequence, or for room.
        n_requests: requests so far.
        n_finished: requests with a complete answer.
        n_cancelled: requests that were cancelled, or reached their timeout.
        n_failed: requests that failed.
        n_preempted: preemptions.
        n_swapped: preemptions with a dump in memory, so that nothing is computed again.
        n_steps: batches decoded.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were cached, in memory or on disk.
        disk_tokens: prompt tokens that were read from disk.
        completion_tokens: tokens of all answers.
        computed_tokens: tokens decoded, including tokens that were computed again.
        drafted_tokens: draft tokens that were decoded, of requests that are over.
        accepted_tokens: draft tokens that were accepted, of requests that are over.
        n_ctx: positions of the context.
        n_free: free positions.
        n_cached_sequences: sequences of answered requests that are kept for later prompts.
        positions: how the positions are used, at most 0.1 seconds ago, or when the engine last became idle.
        rss_bytes: resident memory of the whole process; None if the system does not provide it.
        requests_per_s: rate of requests that ended.
        prompt_tokens_per_s: rate of prompt tokens of requests that got their sequences, including cached tokens.
        completion_tokens_per_s: rate of tokens of answers.
        queue_s: time from the call to the request's sequence.
        prefill_s: time from the sequence to the first token.
        first_token_s: time from the call to the first token.
        inter_token_s: time between two tokens of an answer.
        total_s: time from the call to the end.
        requests: the requests that are not over, oldest first.
    """

    n_active: int
    n_waiting: int
    n_requests: int
    n_finished: int
    n_cancelled: int
    n_failed: int
    n_preempted: int
    n_swapped: int
    n_steps: int
    prompt_tokens: int
    cached_tokens: int
    disk_tokens: int
    completion_tokens: int
    computed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    n_ctx: int
    n_free: int
    n_cached_sequences: int
    positions: Positions
    rss_bytes: int | None
    requests_per_s: Rate
    prompt_tokens_per_s: Rate
    completion_tokens_per_s: Rate
    queue_s: Latency
    prefill_s: Latency
    first_token_s: Latency
    inter_token_s: Latency
    total_s: Latency
    requests: tuple[RequestStatus, ...]

    def __repr__(self) -> str:
        p, rates, latencies = self.positions, [], []
        for field in fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", " ")
            if isinstance(value, Rate):
                rates.append(f"    {name.removesuffix(' per s') + '/s':<20} {value}")
            elif isinstance(value, Latency):
                latencies.append(f"    {name.removesuffix(' s'):<20} {value}")
        memory = "unknown" if self.rss_bytes is None else f"{self.rss_bytes / 2**20:.0f} MiB"
        lines = [
            "EngineStats",
            f"  requests  {self.n_active} active, {self.n_waiting} waiting; so far {self.n_requests}:"
            f" {self.n_finished} answered, {self.n_cancelled} cancelled, {self.n_failed} failed,"
            f" {self.n_preempted} preemptions ({self.n_swapped} by dump)",
            f"  tokens    {self.prompt_tokens} of prompts ({self.cached_tokens} cached),"
            f" {self.completion_tokens} of answers; {self.computed_tokens} computed in {self.n_steps} steps;"
            f" {self.accepted_tokens} of {self.drafted_tokens} drafted ones accepted",
            f"  positions {self.n_ctx}: {p.own} own, {p.shared} shared, {p.cached} cached, {p.free} free",
            f"  memory    {memory}",
            f"  last {WINDOW_S:.0f} s",
            *rates,
            *latencies,
        ]
        lines += [
            f"  {r.request_id}: {r.state}, {r.prompt_tokens} + {r.completion_tokens} tokens, {r.age_s:.1f} s"
            for r in self.requests[:_SHOWN]
        ]
        if len(self.requests) > _SHOWN:
            lines.append(f"  and {len(self.requests) - _SHOWN} more")
        return "\n".join(lines)


_SHOWN = 16
"""The largest number of requests that a repr lists."""


def rss_bytes() -> int | None:
    """Resident memory of this process; None if the system does not provide it."""
    if sys.platform != "linux":
        return None
    try:
        n_pages = int(_STATM.read_text(encoding="utf-8").split()[1])
    except FileNotFoundError:
        return None
    return n_pages * int(os.sysconf("SC_PAGE_SIZE"))
