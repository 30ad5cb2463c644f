"""What an engine does and has done, at one moment."""

from __future__ import annotations

import os
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
        cached_tokens: of those, tokens that did not have to be computed.
        completion_tokens: tokens of its answer so far.
        n_preempted: how often it gave up its sequence.
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
            now: the time on its clock.
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
    """Who holds the positions of a context; together they are ``n_ctx``.

    Attributes:
        own: each held by one active request alone.
        shared: held by several sequences.
        cached: each held by one kept prefix alone; they are given up where requests need room.
        free: held by nobody.
    """

    own: int
    shared: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True, repr=False)
class EngineStats:
    """What an engine does, and has done since it was made. ``print`` shows it as a table.

    Attributes:
        n_active: requests that are computed now.
        n_waiting: requests that wait for a sequence, or for room.
        n_requests: requests so far.
        n_finished: of those, answered.
        n_cancelled: cancelled, or out of time.
        n_failed: failed.
        n_preempted: times that a request gave up its sequence to others.
        n_swapped: of those, times that it was dumped in place of being computed again.
        n_steps: batches decoded.
        prompt_tokens: tokens of all prompts.
        cached_tokens: of those, tokens that did not have to be computed.
        disk_tokens: of those, tokens that were read from disk.
        completion_tokens: tokens of all answers.
        computed_tokens: tokens decoded, those computed again included.
        n_ctx: positions of the context.
        n_free: of those, free ones.
        n_cached_sequences: sequences kept for prompts that begin alike.
        positions: who holds the positions, after one of the last steps: at most 0.1 seconds ago, or before the engine
            came to rest.
        rss_bytes: memory of the whole process; None where the system does not say.
        requests_per_s: requests that ended.
        prompt_tokens_per_s: tokens of the prompts of requests that got their sequences, cached ones included.
        completion_tokens_per_s: tokens of answers.
        queue_s: from the call to the request's sequence.
        prefill_s: from its sequence to the first token.
        first_token_s: from the call to the first token.
        inter_token_s: from one token of an answer to the next.
        total_s: from the call to the end, of requests that ended.
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
            f" {self.completion_tokens} of answers; {self.computed_tokens} computed in {self.n_steps} steps",
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
"""Requests that a repr lists."""


def rss_bytes() -> int | None:
    """Resident memory of this process; None where the system does not say."""
    try:
        n_pages = int(_STATM.read_text().split()[1])
    except FileNotFoundError:
        return None
    return n_pages * os.sysconf("SC_PAGE_SIZE")
