"""An engine's metrics for Prometheus, with the names of vLLM's metrics and the prefix ``slm:`` instead of ``vllm:``.

Source: vLLM, docs/usage/metrics.md. Needs the extra ``metrics``: the module is imported when metrics are requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

from slm_core.engine.metrics import HistogramCounts
from slm_core.engine.recorder import Recorder
from slm_core.engine.stats import EngineStats
from slm_core.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtra(
        'prometheus-client, which writes metrics, is not installed: pip install "slm-core[metrics]"'
    ) from error

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token_s", "From the call to the first token."),
    "inter_token_latency_seconds": ("inter_token_s", "From one token of an answer to the next."),
    "request_time_per_output_token_seconds": ("token_s", "Mean time between two tokens of an answer."),
    "e2e_request_latency_seconds": ("total_s", "From the call to the end of the request."),
    "request_queue_time_seconds": ("queue_s", "From the call to the request's sequence."),
    "request_prefill_time_seconds": ("prefill_s", "From the request's sequence to its first token."),
    "request_decode_time_seconds": ("decode_s", "From the first token to the last."),
    "request_inference_time_seconds": ("inference_s", "From the request's sequence to its last token."),
    "request_prompt_tokens": ("prompt_tokens", "Tokens of the prompts of requests that are over."),
    "request_generation_tokens": ("completion_tokens", "Tokens of the answers of requests that are over."),
    "iteration_tokens_total": ("step_tokens", "Tokens of a step."),
}
"""From the name of a series to its key in ``Recorded.histograms`` and its help text."""


class MeasuredEngine(Protocol):
    """The part of an engine that a collector reads."""

    @property
    def recorder(self) -> Recorder:
        """Measures the requests."""
        ...

    def stats(self) -> EngineStats:
        """The engine's state and counters."""
        ...


class EngineCollector(Collector):
    """The metrics of one engine, for any registry.

    Args:
        engine: the engine.
        model_name: the label ``model_name`` of each series.
    """

    def __init__(self, engine: MeasuredEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """The metrics at this moment."""
        stats, recorded = self._engine.stats(), self._engine.recorder.recorded()
        p = stats.positions
        yield self._gauge("num_requests_running", "Requests that are computed now.", stats.n_active)
        yield self._gauge("num_requests_waiting", "Requests that wait for a sequence, or for room.", stats.n_waiting)
        used = (p.own + p.shared) / stats.n_ctx
        yield self._gauge("kv_cache_usage_perc", "Share of positions that active requests hold: 0 to 1.", used)
        positions = GaugeMetricFamily(
            "slm:kv_cache_positions", "Positions of the context, by who holds them.", labels=("model_name", "state")
        )
        for state in ("own", "shared", "cached", "free"):
            positions.add_metric((self._model_name, state), getattr(p, state))
        yield positions
        yield self._gauge("prefix_cache_sequences", "Sequences kept for later prompts.", stats.n_cached_sequences)
        if stats.rss_bytes is not None:
            yield self._gauge("resident_memory_bytes", "Resident memory of the whole process.", stats.rss_bytes)
        yield self._counter("num_preemptions", "Times that a request gave up its sequence.", stats.n_preempted)
        yield self._counter("num_swaps", "Preemptions in which the request was dumped.", stats.n_swapped)
        yield self._counter("prompt_tokens", "Tokens of all prompts.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens of all answers.", stats.completion_tokens)
        yield self._counter(
            "computed_tokens", "Tokens decoded, including tokens that were computed again.", stats.computed_tokens
        )
        drafted = "Drafted tokens that were decoded, of requests that are over."
        yield self._counter("spec_decode_num_draft_tokens", drafted, stats.drafted_tokens)
        accepted = "Draft tokens that were accepted."
        yield self._counter("spec_decode_num_accepted_tokens", accepted, stats.accepted_tokens)
        yield self._counter("steps", "Batches decoded.", stats.n_steps)
        queries = "Tokens of prompts that were looked up in the prefix cache."
        yield self._counter("prefix_cache_queries", queries, recorded.cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens that were cached.", stats.cached_tokens)
        over = CounterMetricFamily(
            "slm:request_success",
            'Requests that are over, by finish reason; "error" where they failed.',
            labels=("model_name", "finished_reason"),
        )
        for reason, n in recorded.finished.items():
            over.add_metric((self._model_name, reason), n)
        yield over
        for series, (name, text) in _HISTOGRAMS.items():
            yield self._histogram(series, text, recorded.histograms[name])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"slm:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"slm:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _histogram(self, name: str, text: str, histogram: HistogramCounts) -> Metric:
        family = HistogramMetricFamily(f"slm:{name}", text, labels=("model_name",))
        ends = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(histogram.counts), strict=True))
        family.add_metric((self._model_name,), buckets, sum_value=histogram.total)
        return family


def registry_of(engine: MeasuredEngine, model_name: str) -> CollectorRegistry:
    """A registry with the metrics of one engine only."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name))
    return registry


def metrics_text(registry: CollectorRegistry) -> bytes:
    """The metrics in the text format of Prometheus, UTF-8."""
    return generate_latest(registry)
