"""Measures the requests of an engine. Measurements never contain text or tokens of a request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slm_core.engine.metrics import (
    Histogram,
    HistogramCounts,
    Latency,
    LatencyMeter,
    Rate,
    RateMeter,
    RequestMetrics,
    RequestTimes,
)
from slm_core.engine.requests import Request
from slm_core.errors import InvalidOption
from slm_core.generation.events import FinishReason

_log = logging.getLogger(__name__)

FAILED = "error"
"""The finish reason of a request that failed."""
FINISH_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONSTRAINT, FinishReason.CANCELLED, FAILED)

# Buckets are vLLM's, so that its dashboards fit.
_SUBSECOND = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_FIRST_TOKEN_S = (*_SUBSECOND, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

Observer = Callable[[Request, RequestMetrics], None]
"""Called with each request that is over, in the engine's thread."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The measurements of a recorder at one moment.

    Attributes:
        rates: rates of the last minute: "requests" that ended, "prompt_tokens" of requests that started,
            "completion_tokens".
        latencies: latencies of the last minute, named as in ``RequestMetrics``; "inference_s" is the time from a
            request's sequence to its last token, "token_s" the mean time between two tokens of an answer.
        histograms: histograms since the start, of the latencies and of numbers of tokens.
        finished: the number of requests that are over, by finish reason.
        cache_queries: tokens of prompts that were looked up in the prefix cache.
    """

    rates: dict[str, Rate]
    latencies: dict[str, Latency]
    histograms: dict[str, HistogramCounts]
    finished: dict[str, int]
    cache_queries: int


class Recorder:
    """Measures the requests of one engine.

    Any thread may call ``admit``, ``living`` and ``recorded``; only the engine's thread may call the other methods.

    Args:
        clock: the clock of the requests, in seconds.
        observer: called with each request that is over.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, observer: Observer | None = None) -> None:
        self.clock = clock
        self._observer = observer
        self._living: dict[str, Request] = {}
        self._lock = threading.Lock()
        now = clock()
        self._rates = {name: RateMeter(now) for name in ("requests", "prompt_tokens", "completion_tokens")}
        self._latencies = {
            "queue_s": LatencyMeter(now, _REQUEST_S),
            "prefill_s": LatencyMeter(now, _REQUEST_S),
            "decode_s": LatencyMeter(now, _REQUEST_S),
            "inference_s": LatencyMeter(now, _REQUEST_S),
            "total_s": LatencyMeter(now, _REQUEST_S),
            "first_token_s": LatencyMeter(now, _FIRST_TOKEN_S),
            "inter_token_s": LatencyMeter(now, _TOKEN_S),
            "token_s": LatencyMeter(now, _TOKEN_S),
        }
        self._histograms = {
            "step_tokens": Histogram(_STEP_TOKENS),
            "prompt_tokens": Histogram(_REQUEST_TOKENS),
            "completion_tokens": Histogram(_REQUEST_TOKENS),
        }
        self._cache_queries = 0
        self._finished = dict.fromkeys(map(str, FINISH_REASONS), 0)

    @property
    def living(self) -> Sequence[Request]:
        """The requests that are not over, oldest first."""
        return list(self._living.values())

    def admit(self, *requests: Request) -> None:
        """Register new requests, all or none; a request that is registered already is skipped.

        Raises:
            InvalidOption: another request with the same id is not over yet.
        """
        for i, request in enumerate(requests):
            if self._living.setdefault(request.request_id, request) is not request:
                for other in requests[:i]:
                    del self._living[other.request_id]
                raise InvalidOption(
                    f"request_id={request.request_id!r} belongs to a request that is not over"
                    " (accepted: another id, or None for a new id)"
                )

    def started(self, request: Request, n_cached: int) -> None:
        """Record the first sequence of a request, with ``n_cached`` tokens of its prompt. Later calls do nothing."""
        times = request.times
        if times.started is not None:
            return
        request.n_cached = n_cached
        times.started = now = self.clock()
        with self._lock:
            self._cache_queries += request.n_prompt
            self._rates["prompt_tokens"].add(now, request.n_prompt)
            self._latencies["queue_s"].add(now, (now - times.arrived,))

    def token(self, request: Request) -> None:
        """Record a token of a request."""
        request.times.tokens.append(self.clock())

    def stepped(self, requests: Sequence[Request], n_tokens: int) -> None:
        """Record a step of ``n_tokens``, in which ``requests`` got tokens."""
        first: list[RequestTimes] = []
        gaps: list[float] = []
        for request in requests:
            times = request.times
            tokens, n_counted = times.tokens, times.n_counted
            times.n_counted = len(tokens)
            if n_counted == 0 and tokens:
                first.append(times)
                n_counted = 1
            for i in range(n_counted, len(tokens)):
                gaps.append(tokens[i] - tokens[i - 1])
        now = self.clock()
        with self._lock:
            self._histograms["step_tokens"].add(n_tokens)
            if first:
                self._latencies["prefill_s"].add(now, [times.prefill_s or 0.0 for times in first])
                self._latencies["first_token_s"].add(now, [times.first_token_s or 0.0 for times in first])
            if first or gaps:
                self._rates["completion_tokens"].add(now, len(first) + len(gaps))
                self._latencies["inter_token_s"].add(now, gaps)

    def ended(self, request: Request) -> None:
        """Record the end of a request."""
        times, now = request.times, self.clock()
        times.ended = now
        request.metrics = metrics = metrics_of(request)
        if self._living.get(request.request_id) is request:
            del self._living[request.request_id]
        with self._lock:
            reason = metrics.finish_reason or FAILED
            self._finished[reason] = self._finished.get(reason, 0) + 1
            self._rates["requests"].add(now, 1)
            self._histograms["prompt_tokens"].add(metrics.prompt_tokens)
            self._histograms["completion_tokens"].add(metrics.completion_tokens)
            self._latencies["total_s"].add(now, (now - times.arrived,))
            if times.tokens and times.started is not None:
                self._latencies["decode_s"].add(now, (times.tokens[-1] - times.tokens[0],))
                self._latencies["inference_s"].add(now, (times.tokens[-1] - times.started,))
            if len(times.tokens) > 1:
                self._latencies["token_s"].add(now, ((times.tokens[-1] - times.tokens[0]) / (len(times.tokens) - 1),))
        _log.info("request %s is over: %s", request.request_id, metrics)
        if self._observer is None:
            return
        try:
            self._observer(request, metrics)
        except Exception:  # an error of an observer must not end the request
            _log.exception("request %s could not be traced", request.request_id)

    def recorded(self) -> Recorded:
        """The measurements at this moment."""
        with self._lock:
            now = self.clock()
            histograms = {name: meter.histogram for name, meter in self._latencies.items()}
            histograms |= {name: histogram.snapshot() for name, histogram in self._histograms.items()}
            return Recorded(
                {name: meter.rate(now) for name, meter in self._rates.items()},
                {name: meter.latency(now) for name, meter in self._latencies.items()},
                histograms,
                dict(self._finished),
                self._cache_queries,
            )


def metrics_of(request: Request) -> RequestMetrics:
    """The metrics of a request; final when it is over."""
    times, reason = request.times, None
    if times.ended is not None:
        reason = FAILED if request.error is not None else str(request.loop.answer.finish_reason)
    p50, p95 = times.inter_token_s(0.5, 0.95)
    return RequestMetrics(
        request_id=request.request_id,
        finish_reason=reason,
        prompt_tokens=request.n_prompt,
        cached_tokens=request.n_cached,
        completion_tokens=len(times.tokens),
        n_preempted=request.n_preempted,
        queue_s=times.queue_s,
        prefill_s=times.prefill_s,
        first_token_s=times.first_token_s,
        decode_s=times.decode_s,
        inter_token_p50_s=p50,
        inter_token_p95_s=p95,
        total_s=times.total_s,
    )
