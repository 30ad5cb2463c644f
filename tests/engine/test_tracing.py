"""An engine's spans: one for each request, and those of its phases."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

import slm_core as slm
from measured_engine import SPAN, STEP_S, WAIT_S, Bench, tokens
from slm_core.errors import DecodeFailed, InvalidOption
from slm_core.sampling import Sampling
from slm_core.types import Message, Role


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_each_request_has_a_span(bench: Bench) -> None:
    with bench.provider.get_tracer("caller").start_as_current_span("caller") as caller:
        stream = bench.engine.submit("a prompt", tokens(6, seed=4), request_id="mine")
    stream.run()
    bench.at_rest()
    metrics = stream.metrics
    (span,) = bench.spans(SPAN)
    assert span.kind is SpanKind.INTERNAL
    assert span.parent is not None
    assert span.parent.span_id == caller.get_span_context().span_id
    assert span.status.status_code is StatusCode.UNSET
    assert seconds(span) == metrics.total_s  # the last token ends it
    parts = {name: bench.spans(name)[0] for name in ("queue", "prefill", "decode")}
    for name, part in parts.items():
        assert part.parent is not None
        assert part.parent.span_id == span.context.span_id
        assert seconds(part) == getattr(metrics, f"{name}_s")
    assert parts["queue"].start_time == span.start_time
    assert parts["queue"].end_time == parts["prefill"].start_time
    assert parts["prefill"].end_time == parts["decode"].start_time
    assert parts["decode"].end_time == span.end_time
    assert span.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "slm_core",
        "gen_ai.request.model": 'the "model"',
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.top_p": 0.95,
        "gen_ai.request.seed": 4,
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": STEP_S,
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 6,
        "slm.preemptions": 0,
        "slm.inter_token.p50": STEP_S,
        "slm.inter_token.p95": STEP_S,
    }


def test_span_attributes_follow_the_semantic_conventions(bench: Bench) -> None:
    bench.engine.submit("a prompt", tokens(3)).run()
    bench.at_rest()
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
    (span,) = bench.spans(SPAN)
    assert {name for name in span.attributes or () if name.startswith("gen_ai.")} <= known


def test_a_chat_has_the_operation_name_chat(bench: Bench) -> None:
    bench.engine.submit([Message(Role.USER, "hello")], tokens(3)).run()
    bench.at_rest()
    assert len(bench.spans('chat the "model"')) == 1


def test_spans_of_requests_that_end_early() -> None:
    bench = Bench(n_parallel=1)
    with bench.engine:
        bench.context.held = True
        first, second = bench.engine.submit("a", tokens(3)), bench.engine.submit("never begins", tokens(3))
        bench.context.begun.acquire(timeout=WAIT_S)
        second.cancel()
        bench.context.held = False
        bench.context.permits.release(9)
        first.run()
        second.run()
        with pytest.raises(DecodeFailed):
            last = bench.engine.submit("says one and fails", Sampling(temperature=0, logit_bias={ord("!"): 1e9}))
            last.run()
        bench.at_rest()
    assert (last.metrics.first_token_s, last.metrics.total_s) == (STEP_S, 2 * STEP_S)
    spans = {s.attributes["gen_ai.response.finish_reasons"]: s for s in bench.spans(SPAN) if s.attributes}
    cancelled, failed = spans["cancelled",], spans["error",]
    assert seconds(cancelled) == second.metrics.total_s
    assert cancelled.status.status_code is StatusCode.UNSET
    all_spans = bench.exporter.get_finished_spans()
    assert [s.name for s in all_spans if s.parent and s.parent.span_id == cancelled.context.span_id] == ["queue"]
    assert seconds(failed) == last.metrics.total_s  # later than its last token
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "DecodeFailed")
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "DecodeFailed"


def test_a_provider_that_fails_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(SimpleSpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise ZeroDivisionError

    bench = Bench()
    bench.provider.add_span_processor(Refusing(bench.exporter))
    with bench.engine:
        assert bench.engine.submit("a", tokens(3), request_id="mine").run().usage.completion_tokens == 3
        assert bench.engine.submit("b", tokens(3)).run().usage.completion_tokens == 3
    assert "request mine could not be traced" in caplog.text


def test_an_invalid_provider_is_refused() -> None:
    with pytest.raises(InvalidOption, match="tracer_provider"), slm.load(slm.demo_model_path()) as model:
        model.engine(n_ctx=64, tracer_provider="global")  # type: ignore[arg-type]


def test_the_global_provider_traces_nothing_by_default() -> None:
    provider = trace.get_tracer_provider()
    with slm.load(slm.demo_model_path()) as model, model.engine(n_ctx=64, tracer_provider=provider) as engine:
        engine.submit("a", Sampling(temperature=0, max_tokens=2)).run()
