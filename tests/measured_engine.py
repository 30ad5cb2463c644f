"""An engine on a clock that only decodes move, with its spans and its Prometheus series."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from scripted import ByteVocab, ScriptedContext, TagFormatter
from slm_core.engine import Engine, EngineOptions, EngineStats
from slm_core.errors import DecodeFailed
from slm_core.protocols import Batch, Formatter
from slm_core.sampling import Sampling
from slm_core.types import Logits

WAIT_S = 60
STEP_S = 0.25
"""Duration of a step in seconds on the test's clock: exact in binary."""
NO_END = {257: -1e9, ord("!"): -1e9}
"""Bias against EOS and against the byte at which a decode fails, so that no answer contains them."""
VOCAB = ByteVocab()
SPAN = 'text_completion the "model"'


def tokens(n: int | None, **options: object) -> Sampling:
    return Sampling(temperature=0, max_tokens=n, logit_bias=NO_END, **options)  # type: ignore[arg-type]


class Clock:
    """A clock that only decodes move."""

    def __init__(self) -> None:
        self.now = 512.0

    def __call__(self) -> float:
        return self.now


class HeldContext(ScriptedContext):
    """Each decode takes ``step_s``, and waits for a permit while ``held``; it fails if the batch contains a "!"."""

    def __init__(self, clock: Clock, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.clock, self.held, self.step_s = clock, False, STEP_S
        self.permits, self.begun = threading.Semaphore(0), threading.Semaphore(0)

    def _engine_decode(self, batch: Batch) -> Logits:
        self.begun.release()
        if self.held:
            assert self.permits.acquire(timeout=WAIT_S)
        self.clock.now += self.step_s
        if ord("!") in batch.tokens.tolist():
            raise DecodeFailed("as the test wants it")
        return super()._engine_decode(batch)


class Bench:
    """An engine on the test's clock, with its spans and its Prometheus series."""

    def __init__(self, *, n_ctx: int = 2000, n_seq_max: int = 16, **options: object) -> None:
        self.clock = Clock()
        self.context = HeldContext(self.clock, n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=64)
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

        def formatter() -> Formatter:
            return TagFormatter()  # type: ignore[return-value]

        self.engine = Engine(
            self.context,
            VOCAB,
            formatter,
            EngineOptions(**options),  # type: ignore[arg-type]
            model_name='the "model"',
            tracer_provider=self.provider,
            clock=self.clock,
        )

    def until(self, condition: Callable[[EngineStats], bool]) -> EngineStats:
        deadline = time.monotonic() + WAIT_S
        while not condition(stats := self.engine.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.001)
        return stats

    def at_rest(self) -> EngineStats:
        return self.until(lambda s: s.n_active + s.n_waiting + s.positions.own == 0)

    def series(self) -> dict[str, float]:
        """Each sample of the exposition text, by its name and its labels, except the model's label."""
        samples = {}
        for family in text_string_to_metric_families(self.engine.metrics_text().decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == 'the "model"'
                samples[sample.name + "".join(f" {key}={value}" for key, value in sorted(labels.items()))] = (
                    sample.value
                )
        return samples

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]
