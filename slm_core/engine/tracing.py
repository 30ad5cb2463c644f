"""A span for each request, with OpenTelemetry. Attributes follow its conventions for generative AI and contain no text.

Source: OpenTelemetry, semantic conventions for generative client AI spans. Needs the extra ``otel``: the module is
imported when an engine has a tracer provider.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slm_core.engine.metrics import RequestMetrics
from slm_core.engine.recorder import FAILED
from slm_core.engine.requests import Request
from slm_core.errors import InvalidOption, MissingExtra
from slm_core.generation.events import FinishReason

try:
    from opentelemetry import context, trace
except ImportError as error:
    raise MissingExtra(
        'opentelemetry-api, which traces requests, is not installed: pip install "slm-core[otel]"'
    ) from error

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a request.

    Attributes:
        parent: the trace context of the caller.
        operation: "chat", or "text_completion".
    """

    parent: Context
    operation: str


class RequestTracer:
    """Makes a span for each request that is over, with one child for each phase: "queue", "prefill" and "decode".

    Spans are made when a request is over, in the engine's thread. The provider's processor should export them in
    another thread, like ``BatchSpanProcessor``.

    Args:
        provider: creates the tracer.
        model_name: the name of the model in names and attributes of spans.

    Raises:
        InvalidOption: ``provider`` is not a tracer provider.
    """

    def __init__(self, provider: trace.TracerProvider, model_name: str) -> None:
        if not isinstance(provider, trace.TracerProvider):
            raise InvalidOption(f"tracer_provider={provider!r:.80} (accepted: a TracerProvider of OpenTelemetry)")
        self._tracer = provider.get_tracer("slm_core.engine")
        self._model_name = model_name

    def origin(self, *, chat: bool) -> Origin:
        """The origin of a request that this thread and task submits now."""
        return Origin(context.get_current(), "chat" if chat else "text_completion")

    def trace(self, request: Request, metrics: RequestMetrics) -> None:
        """Make the spans of a request that is over."""
        origin, times, now = request.origin, request.times, time.time_ns()
        if not isinstance(origin, Origin) or times.ended is None:
            return
        ended = times.ended

        def at(seconds: float) -> int:
            return now - round((ended - seconds) * 1e9)

        answered = metrics.finish_reason not in (FAILED, FinishReason.CANCELLED)
        last = times.tokens[-1] if answered and times.tokens else ended
        span = self._tracer.start_span(
            f"{origin.operation} {self._model_name}".rstrip(),
            origin.parent,
            trace.SpanKind.INTERNAL,
            self._attributes(request, metrics, origin.operation),
            start_time=at(times.arrived),
        )
        inside = trace.set_span_in_context(span, origin.parent)
        started, first = times.started, times.tokens[0] if times.tokens else None
        for name, start, end in (
            ("queue", times.arrived, started),
            ("prefill", started, first),
            ("decode", first, times.tokens[-1] if times.tokens else None),
        ):
            if start is not None:
                child = self._tracer.start_span(name, inside, start_time=at(start))
                child.end(at(last if end is None else end))
        if request.error is not None:  # only the type: a message may contain text
            span.set_status(trace.StatusCode.ERROR, type(request.error).__name__)
        span.end(at(last))

    def _attributes(self, request: Request, metrics: RequestMetrics, operation: str) -> dict[str, AttributeValue]:
        sampling = request.sampling
        attributes: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "slm_core",
            "gen_ai.request.model": self._model_name or None,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.top_p": float(sampling.top_p),
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.response.id": metrics.request_id,
            "gen_ai.response.finish_reasons": [metrics.finish_reason or FAILED],
            "gen_ai.response.time_to_first_chunk": metrics.first_token_s,
            "gen_ai.usage.input_tokens": metrics.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens,
            "gen_ai.usage.output_tokens": metrics.completion_tokens,
            "slm.preemptions": metrics.n_preempted,
            "slm.inter_token.p50": metrics.inter_token_p50_s,
            "slm.inter_token.p95": metrics.inter_token_p95_s,
            "error.type": None if request.error is None else type(request.error).__name__,
        }
        return {name: value for name, value in attributes.items() if value is not None}
