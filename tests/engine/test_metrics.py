"""An engine's metrics, with a clock that the test controls, so that every number is exact."""

from __future__ import annotations

import itertools
import logging
import math
import random

import pytest

from scripted import ByteVocab, ScriptedContext
from slm_core.engine.core import EngineCore
from slm_core.engine.metrics import (
    ACCURACY,
    EWMA_S,
    SLOT_S,
    WINDOW_S,
    Histogram,
    LatencyMeter,
    RateMeter,
    RequestMetrics,
    nearest_rank,
)
from slm_core.engine.options import EngineOptions
from slm_core.engine.recorder import FINISH_REASONS, Recorder, metrics_of
from slm_core.engine.requests import Request
from slm_core.errors import DecodeFailed, InvalidOption
from slm_core.protocols import Batch
from slm_core.sampling import Sampling
from slm_core.types import Logits

VOCAB = ByteVocab()
STEP_S = 0.25
"""Duration of a step in seconds. Its multiples are exact in binary, so sums and differences are, too."""
NO_END = {257: -1e9, ord("!"): -1e9}
"""Bias against EOS and against the byte at which a decode fails, so that no answer contains them."""


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now


class TimedContext(ScriptedContext):
    """Each decode takes ``STEP_S``; it fails if the batch contains the byte ``fails_at``."""

    def __init__(self, clock: Clock, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.clock, self.fails_at = clock, -1

    def _engine_decode(self, batch: Batch) -> Logits:
        self.clock.now += STEP_S
        if self.fails_at in batch.tokens.tolist():
            raise DecodeFailed("as the test wants it")
        return super()._engine_decode(batch)


class Bench:
    """An engine core on the test's clock."""

    def __init__(self, *, n_ctx: int = 1000, n_seq_max: int = 8, n_batch: int = 64, **options: object) -> None:
        self.clock = Clock()
        self.context = TimedContext(self.clock, n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        self.recorder = Recorder(self.clock)
        self.core = EngineCore(self.context, EngineOptions(**options), self.recorder)  # type: ignore[arg-type]

    def request(self, text: str, n_tokens: int = 8, **options: object) -> Request:
        sampling = Sampling(temperature=0, max_tokens=n_tokens, logit_bias=NO_END)
        return Request(VOCAB, list(text.encode()), sampling, clock=self.clock, **options)  # type: ignore[arg-type]

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.core.add(request)
        while self.core.step():
            pass


def test_the_times_of_a_request() -> None:
    bench = Bench(n_batch=16)
    request = bench.request("x" * 40, 6)
    bench.clock.now += 3  # created, but not yet added
    bench.run(request)
    assert request.metrics == RequestMetrics(
        request_id=request.request_id,
        finish_reason="length",
        prompt_tokens=40,
        cached_tokens=0,
        completion_tokens=6,
        n_preempted=0,
        queue_s=3.0,
        prefill_s=3 * STEP_S,  # 40 tokens in batches of 16
        first_token_s=3 + 3 * STEP_S,
        decode_s=5 * STEP_S,
        inter_token_p50_s=STEP_S,
        inter_token_p95_s=STEP_S,
        total_s=3 + 8 * STEP_S,
    )


def test_the_times_of_a_request_that_waits_for_another() -> None:
    bench = Bench(n_parallel=1, prefix_cache=False)
    first, second = bench.request("first", 4), bench.request("second", 4)
    bench.run(first, second)
    assert first.metrics is not None
    assert second.metrics is not None
    assert (first.metrics.queue_s, first.metrics.total_s) == (0, 4 * STEP_S)
    assert (second.metrics.queue_s, second.metrics.total_s) == (4 * STEP_S, 8 * STEP_S)


def test_inter_token_times_agree_with_a_callers_clock() -> None:
    """The callback of each event reads the same clock; steps have different durations."""
    bench, event_times, chosen = Bench(), list[float](), random.Random(3)

    def step() -> None:
        bench.clock.now += chosen.randrange(1, 64) / 64

    bench.context.on_decode = step
    request = bench.request("some prompt", 30, on_event=lambda event: event_times.append(bench.clock()))
    bench.run(request)
    gaps = sorted(b - a for a, b in itertools.pairwise(event_times))
    metrics = request.metrics
    assert metrics is not None
    assert metrics.first_token_s == event_times[0] - request.times.arrived
    assert metrics.decode_s == event_times[-1] - event_times[0]
    assert metrics.inter_token_p50_s == gaps[math.ceil(0.5 * 29) - 1]
    assert metrics.inter_token_p95_s == gaps[math.ceil(0.95 * 29) - 1]


def test_a_request_that_never_got_a_sequence() -> None:
    bench = Bench(n_parallel=1)
    bench.core.add(bench.request("first", 4))
    bench.core.step()
    second = bench.request("second", 4)
    bench.core.add(second)
    second.loop.cancel()
    bench.run()
    metrics = second.metrics
    assert metrics is not None
    assert metrics.finish_reason == "cancelled"
    assert (metrics.queue_s, metrics.first_token_s, metrics.decode_s) == (None, None, None)
    assert metrics.total_s == 0.0  # cancelled before the next step ran


def test_metrics_of_an_unfinished_request() -> None:
    bench = Bench()
    request = bench.request("a prompt", 10)
    assert metrics_of(request).queue_s is None
    bench.core.add(request)
    for _ in range(3):
        bench.core.step()
    metrics = metrics_of(request)
    assert (metrics.finish_reason, metrics.total_s, metrics.completion_tokens) == (None, None, 3)
    assert (metrics.first_token_s, metrics.decode_s) == (STEP_S, 2 * STEP_S)


def test_preemptions_and_cached_tokens() -> None:
    bench = Bench(n_ctx=110, n_seq_max=4, n_batch=16)
    requests = [bench.request(f"{i}" + "y" * 20, 20) for i in range(4)]
    bench.run(*requests)
    assert sum(r.metrics.n_preempted for r in requests if r.metrics) == bench.core.totals.n_preempted > 0
    again = bench.request("0" + "y" * 20, 2)
    bench.run(again)
    assert again.metrics is not None
    assert again.metrics.cached_tokens == again.answer.usage.cached_tokens


# The recorder's totals.


def test_counts_and_histograms_of_many_requests() -> None:
    bench = Bench(n_ctx=4000, n_seq_max=16)
    shared = "what they have in common "
    requests = [bench.request(f"{shared}{i}", 5 + i) for i in range(6)]
    bench.run(*requests)
    recorded = bench.recorder.recorded()
    metrics = [r.metrics for r in requests if r.metrics]
    assert len(metrics) == 6
    assert recorded.finished == dict.fromkeys(map(str, FINISH_REASONS), 0) | {"length": 6}
    assert recorded.cache_queries == sum(m.prompt_tokens for m in metrics) == bench.core.totals.prompt_tokens
    for name in ("queue_s", "prefill_s", "decode_s", "total_s", "first_token_s"):
        histogram = recorded.histograms[name]
        assert sum(histogram.counts) == recorded.latencies[name].n == 6
        assert histogram.total == sum(getattr(m, name) for m in metrics)
    assert sum(recorded.histograms["inter_token_s"].counts) == sum(m.completion_tokens - 1 for m in metrics)
    assert recorded.histograms["inter_token_s"].total == sum(m.decode_s or 0 for m in metrics)
    assert recorded.histograms["inference_s"].total == sum((m.prefill_s or 0) + (m.decode_s or 0) for m in metrics)
    assert recorded.histograms["token_s"].total == 6 * STEP_S
    assert recorded.histograms["prompt_tokens"].total == sum(m.prompt_tokens for m in metrics)
    assert recorded.histograms["completion_tokens"].total == sum(m.completion_tokens for m in metrics)
    assert recorded.histograms["step_tokens"].total == bench.core.totals.computed_tokens
    assert sum(recorded.histograms["step_tokens"].counts) == bench.core.totals.n_steps
    elapsed = bench.clock() - 1024
    assert elapsed < WINDOW_S - SLOT_S
    assert recorded.rates["requests"].window == 6 / elapsed
    assert recorded.rates["completion_tokens"].window == sum(m.completion_tokens for m in metrics) / elapsed
    assert recorded.rates["prompt_tokens"].window == sum(m.prompt_tokens for m in metrics) / elapsed


def test_every_finished_request_is_counted_once() -> None:
    bench = Bench()
    bench.context.fails_at = ord("!")
    stopped = Request(VOCAB, [65], Sampling(temperature=0, logit_bias={257: 1e9}), clock=bench.clock)
    cancelled, failed, long = bench.request("c"), bench.request("fails!"), bench.request("l")
    cancelled.loop.cancel()
    bench.run(stopped, cancelled, failed, long)
    finished = bench.recorder.recorded().finished
    assert finished == {"stop": 1, "length": 1, "constraint": 0, "cancelled": 1, "error": 1}
    assert failed.metrics is not None
    assert failed.metrics.finish_reason == "error"
    assert not bench.recorder.living
    unfinished = bench.request("left")
    bench.core.add(unfinished)
    bench.core.abort(error := DecodeFailed("all of them"))
    assert not hasattr(error, "__notes__"), "the error is not about one request"
    assert bench.recorder.recorded().finished["error"] == 2


@pytest.mark.slow
def test_memory_does_not_grow_with_requests() -> None:
    """After 100,000 requests the recorder has the same size as after 1,000."""
    clock = Clock()
    recorder = Recorder(clock)
    sampling = Sampling(temperature=0, max_tokens=3)
    request = Request(VOCAB, [65], sampling, clock=clock)
    request.loop.end(FINISH_REASONS[0])  # type: ignore[arg-type]

    def n_slots() -> int:
        return max(len(m._slots._slots) for m in [*recorder._latencies.values(), *recorder._rates.values()])

    def n_values() -> int:
        slots = [slot for meter in recorder._latencies.values() for slot in meter._slots._slots]
        return max(len(slot.counts) + len(slot.pending) for slot in slots)

    sizes = []
    for i in range(100_000):
        request.times = type(request.times)(clock.now)
        recorder.admit(request)
        recorder.started(request, 0)
        for _ in range(2):
            clock.now += 0.001 * (i % 7)
            recorder.token(request)
        recorder.stepped([request], 1)
        recorder.ended(request)
        if i % 10_000 == 9_999:
            sizes.append((n_slots(), n_values(), len(recorder.living)))
    assert clock.now > 1024 + 5 * WINDOW_S
    n_different = 16  # buckets of the values that occur
    assert all(
        n <= WINDOW_S / SLOT_S and values <= n_different + 1024 and not n_unfinished
        for n, values, n_unfinished in sizes
    )
    assert recorder.recorded().finished["stop"] == 100_000


# Ids.


def test_ids_are_new_or_chosen_by_the_caller() -> None:
    bench = Bench()
    requests = [bench.request("a") for _ in range(1000)]
    assert len({r.request_id for r in requests}) == 1000
    assert bench.request("a", request_id="mine").request_id == "mine"


@pytest.mark.parametrize("bad", ["", "a\nb", "x" * 129, 3, b"a"])
def test_invalid_ids_are_refused(bad: object) -> None:
    with pytest.raises(InvalidOption, match="request_id"):
        Bench().request("a", request_id=bad)


def test_an_id_can_be_reused_after_its_request() -> None:
    bench = Bench()
    bench.core.add(bench.request("a", request_id="mine"))
    with pytest.raises(InvalidOption, match="'mine'"):
        bench.core.add(bench.request("b", request_id="mine"))
    assert bench.core.totals.n_requests == 1
    bench.run()
    bench.run(bench.request("b", request_id="mine"))
    assert bench.core.totals.n_finished == 2


def test_an_error_names_its_request() -> None:
    bench = Bench()
    bench.context.fails_at = ord("!")
    failed = bench.request("fails!", request_id="mine")
    bench.run(failed)
    assert failed.error is not None
    assert failed.error.__notes__ == ["request mine"]


def test_a_log_line_names_its_request(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.INFO, "slm_core.engine"):
        bench.run(bench.request("CANARY", request_id="mine"))
    assert len(caplog.messages) == 1
    assert "mine" in caplog.text
    assert "length" in caplog.text
    assert "CANARY" not in caplog.text


# Meters.


def lognormal(n: int) -> list[float]:
    chosen = random.Random(7)
    return [chosen.lognormvariate(-3, 2) for _ in range(n)]


@pytest.mark.parametrize("n", [1, 2, 10, 1000, 5000])
def test_percentiles_are_within_their_accuracy(n: int) -> None:
    values = lognormal(n)
    meter = LatencyMeter(0.0, (1,))
    for i in range(0, n, 100):
        meter.add(1.0, values[i : i + 100])
    latency, ordered = meter.latency(1.0), sorted(values)
    assert latency.n == n
    assert latency.mean == pytest.approx(sum(values) / n, rel=1e-12)
    for rank, value in [(0.5, latency.p50), (0.95, latency.p95), (0.99, latency.p99)]:
        exact = ordered[math.ceil(rank * n - 1e-9) - 1]
        assert value is not None
        assert abs(value - exact) <= ACCURACY * exact * (1 + 1e-9)


def test_percentiles_are_nearest_ranks() -> None:
    assert [nearest_rank(n, 0.5) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert [nearest_rank(n, 0.95) for n in (1, 19, 20, 21, 100)] == [0, 18, 18, 19, 94]


def test_a_latency_without_values() -> None:
    latency = LatencyMeter(0.0, (1,)).latency(0.0)
    assert (latency.n, latency.p50, latency.ewma) == (0, None, None)
    assert str(latency) == "none"


def test_values_leave_the_window() -> None:
    meter = LatencyMeter(0.0, (1,))
    meter.add(2.0, [1.0, 1.0])
    meter.add(WINDOW_S - SLOT_S, [3.0])
    assert meter.latency(WINDOW_S - 1).n == 3
    assert meter.latency(WINDOW_S).n == 1  # the slot from 0 to 5 is out
    assert meter.latency(10 * WINDOW_S).n == 0
    assert sum(meter.histogram.counts) == 3
    meter.add(11 * WINDOW_S, [5.0])
    latency = meter.latency(11 * WINDOW_S)
    assert (latency.n, latency.mean) == (1, 5.0)


def test_rates_are_those_of_the_window() -> None:
    meter = RateMeter(100.0)
    for second in range(100, 300):
        meter.add(second, 3)
    now = 300.0
    assert meter.rate(now).window == 3 * (WINDOW_S - SLOT_S) / (WINDOW_S - SLOT_S)
    assert meter.rate(now + 10 * WINDOW_S).window == 0.0
    assert RateMeter(5.0).rate(5.0).window == 0.0


def test_ewma_of_a_rate() -> None:
    """The EWMA by its definition, as a sum over all events."""
    chosen = random.Random(5)
    meter, times, now = RateMeter(0.0), list[float](), 0.0
    for _ in range(200):
        now += chosen.expovariate(3.0)
        meter.add(now, 2)
        times.append(now)
    for later in (now, now + 4):
        expected = sum(2 * math.exp((t - later) / EWMA_S) for t in times) / (EWMA_S * (1 - math.exp(-later / EWMA_S)))
        assert meter.rate(later).ewma == pytest.approx(expected, rel=1e-9)


def test_ewma_of_a_latency() -> None:
    values = [(t, v) for t, v in enumerate(lognormal(50))]
    meter = LatencyMeter(0.0, (1,))
    for t, value in values:
        meter.add(t, [value])
    weights = [math.exp((t - 49) / EWMA_S) for t, _ in values]
    expected = sum(w * v for w, (_, v) in zip(weights, values, strict=True)) / sum(weights)
    assert meter.latency(49.0).ewma == pytest.approx(expected, rel=1e-12)
    assert meter.latency(1e6).ewma == pytest.approx(expected, rel=1e-12)
    meter.add(1e6, [1.0])
    assert meter.latency(1e6).ewma == 1.0


@pytest.mark.parametrize("n", [10, 5000])
def test_histograms_count_all_values(n: int) -> None:
    values, bounds = lognormal(n), (0.01, 0.05, 0.1, 1.0)
    meter, single = LatencyMeter(0.0, bounds), Histogram(bounds)
    for i, value in enumerate(values):
        meter.add(i / 10, [value])
        single.add(value)
    pairs = itertools.pairwise((0.0, *bounds, math.inf))
    expected = [sum(lower < value <= upper for value in values) for lower, upper in pairs]
    assert list(meter.histogram.counts) == list(single.snapshot().counts) == expected
    assert meter.histogram.total == pytest.approx(sum(values))


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    meter = LatencyMeter(0.0, (0.25, 0.5))
    meter.add(0.0, [0.25, 0.5, 0.75])
    assert meter.histogram.counts == (1, 1, 1)


def test_a_step_reads_the_clock_once_per_token() -> None:
    bench, n_readings = Bench(), 0

    def counted() -> float:
        nonlocal n_readings
        n_readings += 1
        return bench.clock()

    bench.recorder.clock = counted
    bench.run(*(bench.request(f"{i}", 50) for i in range(8)))
    totals = bench.core.totals
    assert n_readings <= totals.completion_tokens + totals.n_steps + 3 * totals.n_requests


def test_values_are_counted_in_batches() -> None:
    """A slot never has more pending values than one batch plus the values of one step."""
    meter = LatencyMeter(0.0, (1,))
    for i in range(10_000):
        meter.add(i / 1000, [0.1] * 16)
        assert len(meter._slot.pending) <= 1024 + 16
    assert sum(meter.histogram.counts) == 160_000
