"""An engine's statistics, ids and metrics of streams, and Prometheus series. None of it contains text."""

from __future__ import annotations

import gc
import logging
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

import slm_core as slm
from measured_engine import SPAN, STEP_S, WAIT_S, Bench, tokens
from slm_core.constraints import Choice
from slm_core.engine import RequestStream
from slm_core.errors import DecodeFailed, EngineClosed, InvalidOption
from slm_core.generation import Event, StoppingAction
from slm_core.generation.speculation import DraftFunction, Speculation
from slm_core.sampling import Sampling
from slm_core.types import Message, Role

# Streams.


def test_a_stream_has_its_metrics(bench: Bench) -> None:
    stream = bench.engine.submit("a prompt", tokens(6), request_id="mine")
    answer = stream.run()
    metrics = stream.metrics
    assert stream.request_id == metrics.request_id == "mine"
    assert metrics.finish_reason == answer.finish_reason == "length"
    assert metrics.prompt_tokens == answer.usage.prompt_tokens
    assert metrics.completion_tokens == answer.usage.completion_tokens
    assert (metrics.queue_s, metrics.prefill_s, metrics.decode_s, metrics.total_s) == (
        0,
        STEP_S,
        5 * STEP_S,
        6 * STEP_S,
    )
    assert (metrics.inter_token_p50_s, metrics.inter_token_p95_s) == (STEP_S, STEP_S)


def test_concurrent_requests_have_different_ids(bench: Bench) -> None:
    bench.context.held = True
    first = bench.engine.submit("first", tokens(2), request_id="mine")
    with pytest.raises(InvalidOption, match="'mine'"):
        bench.engine.submit("second", tokens(2), request_id="mine")
    bench.context.permits.release(2)
    first.run()
    bench.context.permits.release(2)
    assert bench.engine.submit("third", tokens(2), request_id="mine").run().usage.completion_tokens == 2
    assert bench.engine.stats().n_requests == 2


def test_an_id_can_be_reused_after_a_refused_request(bench: Bench) -> None:
    with pytest.raises(slm.SlmError, match="full"):
        bench.engine.submit("x" * 3000, request_id="mine")
    bench.engine.submit("x", tokens(1), request_id="mine").run()
    bench.engine.close()
    with pytest.raises(EngineClosed):
        bench.engine.submit("x", request_id="mine")
    assert not bench.engine.recorder.living


def test_an_error_names_its_request(bench: Bench) -> None:
    with pytest.raises(DecodeFailed) as failed:
        bench.engine.submit("fails!", tokens(2), request_id="mine").run()
    assert failed.value.__notes__ == ["request mine"]


def test_completions_have_ids_and_metrics_of_their_own(bench: Bench) -> None:
    stream = bench.engine.completions("a prompt", 3, tokens(4, seed=1), request_id="mine")
    stream.run()
    assert [metrics.request_id for metrics in stream.metrics] == ["mine-0", "mine-1", "mine-2"]
    assert [metrics.completion_tokens for metrics in stream.metrics] == [4, 4, 4]
    bench.at_rest()
    assert len(bench.spans(SPAN)) == 3
    other = bench.engine.completions("a prompt", 2, tokens(2))
    other.run()
    assert other.metrics[0].request_id.removesuffix("-0") == other.metrics[1].request_id.removesuffix("-1")


def test_completions_are_submitted_all_or_none(bench: Bench) -> None:
    bench.context.held = True
    stream = bench.engine.submit("held", tokens(2), request_id="mine-1")
    for bad in ("", 3):
        with pytest.raises(InvalidOption, match="request_id"):
            bench.engine.completions("a prompt", 3, tokens(4), request_id=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="'mine-1'"):
        bench.engine.completions("a prompt", 3, tokens(4), request_id="mine")
    assert [request.request_id for request in bench.engine.recorder.living] == ["mine-1"]
    bench.context.held = False
    bench.context.permits.release(9)
    stream.run()
    bench.engine.completions("a prompt", 3, tokens(4), request_id="mine").run()
    assert bench.engine.stats().n_requests == 4


# Statistics.


def test_statistics_of_unfinished_requests() -> None:
    bench = Bench(n_parallel=2)
    with bench.engine:
        bench.context.held = True
        streams = [bench.engine.submit(text, tokens(4), request_id=text[0]) for text in ("a", "b" * 250, "c")]
        bench.context.begun.acquire(timeout=WAIT_S)
        bench.context.permits.release(2)  # the prompt "b" takes four steps
        bench.context.begun.acquire(timeout=WAIT_S)
        bench.context.begun.acquire(timeout=WAIT_S)
        by_id = {status.request_id: status for status in bench.engine.stats().requests}
        states = {name: (status.state, status.completion_tokens) for name, status in by_id.items()}
        assert states == {"a": ("decode", 2), "b": ("prefill", 0), "c": ("waiting", 0)}
        assert by_id["a"].age_s == 2 * STEP_S
        bench.context.held = False
        bench.context.permits.release(1)
        for stream in streams:
            stream.run()
        assert bench.at_rest().requests == ()


def test_statistics_add_up(bench: Bench) -> None:
    began_s = bench.clock()
    streams = [bench.engine.submit(f"{'a beginning in common ' * 2}{i}", tokens(5 + i)) for i in range(6)]
    answers = [stream.run() for stream in streams]
    stats = bench.at_rest()
    metrics = [stream.metrics for stream in streams]
    seconds = bench.clock() - began_s
    assert stats.n_finished == 6
    assert stats.completion_tokens == sum(answer.usage.completion_tokens for answer in answers)
    assert stats.requests_per_s.window == 6 / seconds
    assert stats.prompt_tokens_per_s.window == sum(m.prompt_tokens for m in metrics) / seconds
    assert stats.completion_tokens_per_s.window == stats.completion_tokens / seconds
    assert stats.completion_tokens_per_s.ewma > 0
    for name in ("queue_s", "prefill_s", "first_token_s", "total_s"):
        latency, exact = getattr(stats, name), sorted(getattr(m, name) for m in metrics)
        assert latency.n == 6
        assert latency.mean == pytest.approx(sum(exact) / 6)
        for rank, value in ((0.5, latency.p50), (0.95, latency.p95), (0.99, latency.p99)):
            assert value == pytest.approx(exact[math.ceil(6 * rank) - 1], rel=0.0101, abs=2e-7)
    assert stats.inter_token_s.n == stats.completion_tokens - 6
    assert stats.inter_token_s.p95 == pytest.approx(STEP_S, rel=0.0101)


def test_positions_add_up_to_n_ctx(bench: Bench) -> None:
    bench.context.held = True
    shared = "a beginning that two requests have in common"
    first = bench.engine.submit(shared + "1", tokens(40))
    bench.context.permits.release(2)
    next(first)
    second = bench.engine.submit(shared + "2", tokens(40))
    bench.context.permits.release(4)
    next(second)
    p = bench.until(lambda s: s.positions.shared > 0).positions
    assert p.shared == len(shared)
    assert p.own > 0
    assert p.own + p.shared + p.cached + p.free == 2000
    bench.context.held = False
    bench.context.permits.release(9)
    first.run()
    second.run()
    stats = bench.at_rest()
    p = stats.positions
    assert (p.own, p.free) == (0, stats.n_free)
    assert p.cached > 0
    assert p.shared + p.cached + p.free == 2000


def test_positions_at_rest_are_those_of_the_last_step(bench: Bench) -> None:
    """This holds for the shortest steps, too."""
    bench.context.step_s = 0.0
    n = bench.engine.submit("a prompt whose prefix is kept", tokens(4)).run().usage
    p = bench.until(lambda s: s.positions.cached > 0).positions
    # The last token of the answer is sampled, but never decoded.
    assert (p.own, p.shared, p.cached) == (0, 0, n.prompt_tokens + n.completion_tokens - 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_memory_of_the_process(bench: Bench) -> None:
    grown = list[int]()
    arrays = list[NDArray[np.float64]]()
    for _ in range(5):  # meanwhile, the allocator may return memory of earlier tests
        gc.collect()
        before = bench.engine.stats().rss_bytes
        arrays.append(np.ones(2**23))  # 64 MiB
        after = bench.engine.stats().rss_bytes
        assert before is not None
        assert after is not None
        grown.append(after - before)
        if grown[-1] > arrays[-1].nbytes / 2:
            break
    assert grown[-1] > arrays[-1].nbytes / 2, grown


def test_the_repr_is_a_table(bench: Bench) -> None:
    streams = [bench.engine.submit(f"{i}", tokens(4)) for i in range(3)]
    for stream in streams:
        stream.run()
    bench.at_rest()
    bench.context.held = True
    requests = [bench.engine.submit("held", tokens(3), request_id=f"held-{i}") for i in range(20)]
    text = repr(bench.until(lambda s: s.n_active + s.n_waiting == 20))
    assert re.search(r"\d+ active, \d+ waiting; so far \d+: 3 answered", text)
    assert re.search(r"inter token +p50 2\d\d ms", text)
    assert "held-0: " in text
    assert "and 4 more" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    bench.context.held = False
    bench.context.permits.release(99)
    for stream in requests:
        stream.run()


def test_agrees_with_a_callers_clock() -> None:
    """A real model and real time. The engine's thread calls a stopping criterion just before it counts a token.

    So a token is counted between the criterion's call for it and the next call. A request arrives during
    ``submit``, and ends between the last call and the end of ``run``.
    """
    called_at: list[float] = []

    def note(event: Event, draft: object) -> StoppingAction:
        called_at.append(time.monotonic())
        return StoppingAction.NEXT

    with slm.load(slm.demo_model_path()) as model, model.engine(n_ctx=512) as engine:
        eog = dict.fromkeys(model.vocab.eog_ids, -1e9)
        before = time.monotonic()
        stream = engine.submit(
            "Once upon a time", Sampling(temperature=0, max_tokens=30, logit_bias=eog), stopping_criteria=[note]
        )
        submitted = time.monotonic()
        stream.run()
        over = time.monotonic()
        metrics, stats = stream.metrics, engine.stats()
    assert len(called_at) == 30
    assert metrics.first_token_s is not None
    assert metrics.decode_s is not None
    assert metrics.total_s is not None
    assert metrics.inter_token_p95_s is not None
    assert called_at[0] - submitted <= metrics.first_token_s <= called_at[1] - before
    assert called_at[-1] - called_at[1] <= metrics.decode_s <= over - called_at[0]
    assert called_at[-1] - submitted <= metrics.total_s <= over - before
    assert 0 < metrics.inter_token_p95_s <= max(b - a for a, b in zip(called_at, [*called_at[2:], over], strict=False))
    assert (metrics.queue_s or 0) + (metrics.prefill_s or 0) == pytest.approx(metrics.first_token_s, abs=1e-9)
    assert stats.first_token_s.mean == metrics.first_token_s
    assert stats.total_s.mean == metrics.total_s
    assert stats.inter_token_s.mean == pytest.approx(metrics.decode_s / 29)


# Prometheus.


def known_drafts(answer: Sequence[int]) -> Speculation:
    """Drafts the known answer to a prompt of one token, and a wrong token after its end."""
    drafter = DraftFunction(lambda tokens, n: [*answer[len(tokens) - 1 :], 0][:n])
    return Speculation(drafter, n_max=4, adaptive=False)


def test_each_series_agrees_with_the_callers_counts() -> None:
    """One scrape before, one while requests are held, one after. The test counts the events itself."""
    bench = Bench(n_ctx=300, n_seq_max=4, n_parallel=2)
    with bench.engine:
        before = bench.series()
        assert all(value == 0 for name, value in before.items() if not re.search("memory|state=free", name))
        # 1. Answered, failed, cancelled, complete by a constraint, ended by the model; one finds its prefix cached.
        shared = "a beginning that two prompts have in common: "
        ways: dict[str, Callable[[], RequestStream]] = {
            "plain": lambda: bench.engine.submit("d", tokens(9)),
            "drafts": lambda: bench.engine.submit("d", tokens(9), speculation=known_drafts(streams[-1].run().tokens)),
            "length": lambda: bench.engine.submit(shared + "1", tokens(7)),
            "hit": lambda: bench.engine.submit(shared + "2", tokens(3)),
            "error": lambda: bench.engine.submit("fails!", tokens(2)),
            "constraint": lambda: bench.engine.submit("c", tokens(9), constraint=Choice(["ab", "cd"])),
            "stop": lambda: bench.engine.submit("s", Sampling(temperature=0, logit_bias={257: 1e9})),
        }
        streams = []
        for way, submit in ways.items():
            streams.append(submit())
            if way == "error":
                with pytest.raises(DecodeFailed):
                    streams[-1].run()
            else:
                streams[-1].run()
        # 2. Two are computed, and three wait. One waiting request is cancelled, one running request is preempted.
        bench.at_rest()
        bench.context.held = True
        steps = bench.context.permits
        held = [bench.engine.submit(f"{i}" * 90, tokens(70)) for i in range(5)]
        steps.release(1)  # for the first step, which may have begun before all requests had arrived
        bench.until(lambda s: s.n_active == 2 and s.n_waiting == 3)
        steps.release(3)
        bench.until(lambda s: s.positions.own > 0)
        during = bench.series()
        held[4].cancel()
        bench.context.held = False
        steps.release(9)
        answers = [stream.run() for stream in held]
        streams += held
        assert answers[4].finish_reason == "cancelled"
        stats = bench.at_rest()
        after = bench.series()
    metrics = [stream.metrics for stream in streams]
    assert {k: during[f"slm:num_requests_{k}"] for k in ("running", "waiting")} == {"running": 2, "waiting": 3}
    assert during["slm:kv_cache_positions state=own"] > 0
    assert during["slm:kv_cache_usage_perc"] == pytest.approx(
        (during["slm:kv_cache_positions state=own"] + during["slm:kv_cache_positions state=shared"]) / 300
    )
    assert sum(during[f"slm:kv_cache_positions state={s}"] for s in ("own", "shared", "cached", "free")) == 300
    assert stats.n_preempted == sum(m.n_preempted for m in metrics) == after["slm:num_preemptions_total"] > 0
    assert stats.n_swapped == after["slm:num_swaps_total"] > 0  # the first preempted request is always dumped
    assert after["slm:prompt_tokens_total"] == sum(m.prompt_tokens for m in metrics)
    assert after["slm:generation_tokens_total"] == sum(m.completion_tokens for m in metrics)
    assert after["slm:prefix_cache_hits_total"] == sum(m.cached_tokens for m in metrics) >= len(shared)
    started = [m for m in metrics if m.queue_s is not None]
    assert after["slm:prefix_cache_queries_total"] == sum(m.prompt_tokens for m in started)
    assert after["slm:steps_total"] == stats.n_steps
    drafts = streams[1].run().speculation
    assert after["slm:spec_decode_num_draft_tokens_total"] == stats.drafted_tokens == drafts.drafted
    assert after["slm:spec_decode_num_accepted_tokens_total"] == stats.accepted_tokens == drafts.accepted > 0
    assert after["slm:computed_tokens_total"] == stats.computed_tokens == after["slm:iteration_tokens_total_sum"]
    reasons = {"length": 8, "error": 1, "constraint": 1, "stop": 1, "cancelled": 1}
    assert {r: after[f"slm:request_success_total finished_reason={r}"] for r in reasons} == reasons
    for name, values in {
        "e2e_request_latency_seconds": [m.total_s for m in metrics],
        "time_to_first_token_seconds": [m.first_token_s for m in metrics],
        "request_queue_time_seconds": [m.queue_s for m in metrics],
        "request_prefill_time_seconds": [m.prefill_s for m in metrics],
        "request_decode_time_seconds": [m.decode_s for m in metrics],
        "request_inference_time_seconds": [(m.prefill_s or 0) + m.decode_s for m in metrics if m.decode_s is not None],
        "request_prompt_tokens": [m.prompt_tokens for m in metrics],
        "request_generation_tokens": [m.completion_tokens for m in metrics],
        "request_time_per_output_token_seconds": [
            (m.decode_s or 0) / (m.completion_tokens - 1) for m in metrics if m.completion_tokens > 1
        ],
    }.items():
        known = [value for value in values if value is not None]
        assert after[f"slm:{name}_count"] == len(known), name
        assert after[f"slm:{name}_sum"] == pytest.approx(sum(known)), name
        assert after[f"slm:{name}_bucket le=+Inf"] == len(known), name
        for key in (k for k in after if k.startswith(f"slm:{name}_bucket le=")):
            assert after[key] == sum(value <= float(key.partition("le=")[2]) for value in known), key
    gaps = after["slm:inter_token_latency_seconds_count"]
    assert gaps == sum(max(0, m.completion_tokens - 1) for m in metrics)
    assert after["slm:inter_token_latency_seconds_sum"] == pytest.approx(sum(m.decode_s or 0 for m in metrics))
    unmoved = {n for n in after if "_bucket" not in n and before[n] == during[n] == after[n]}
    assert unmoved <= {"slm:resident_memory_bytes"}  # `test_memory_of_the_process` tests it
    assert "slm:prefix_cache_sequences" in after


def test_series_have_the_buckets_of_vllm(bench: Bench) -> None:
    """The number of buckets in the metrics of vLLM 0.25: the boundaries, and +Inf."""
    bounds = [name for name in bench.series() if "_bucket" in name]
    n_bounds = {
        "time_to_first_token_seconds": 22,
        "inter_token_latency_seconds": 19,
        "e2e_request_latency_seconds": 21,
        "request_queue_time_seconds": 21,
        "request_prefill_time_seconds": 21,
        "request_decode_time_seconds": 21,
        "request_inference_time_seconds": 21,
    }
    for name, n in n_bounds.items():
        assert sum(bound.startswith(f"slm:{name}_bucket") for bound in bounds) == n + 1


def test_engines_have_registries_of_their_own(bench: Bench) -> None:
    import prometheus_client

    other = Bench()
    with other.engine:
        other.engine.submit("a", tokens(3)).run()
        assert bench.engine.registry is not other.engine.registry
        assert bench.engine.registry is bench.engine.registry
        assert bench.series()["slm:generation_tokens_total"] == 0
        assert other.series()["slm:generation_tokens_total"] == 3
    assert b"slm:" not in prometheus_client.generate_latest(prometheus_client.REGISTRY)


def test_scrapes_while_requests_run(bench: Bench) -> None:
    """In every scrape, counters never fall, and each histogram's buckets rise to its count."""
    over, failed = threading.Event(), []

    def scrape() -> None:
        last: dict[str, float] = {}
        while not over.is_set():
            now = bench.series()
            failed.extend(n for n, v in last.items() if re.search("_total|_count|_bucket", n) and now[n] < v)
            failed.extend(n for n in now if n.endswith("_count") and now[n] != now[f"{n[:-6]}_bucket le=+Inf"])
            last = now

    thread = threading.Thread(target=scrape)
    thread.start()
    for stream in [bench.engine.submit(f"{i}", tokens(20)) for i in range(20)]:
        stream.run()
    over.set()
    thread.join(WAIT_S)
    assert failed == []


# Without the extras, and without text.


@pytest.mark.parametrize(
    ("library", "extra", "call"),
    [
        ("prometheus_client", "metrics", "engine.metrics_text()"),
        ("prometheus_client", "metrics", "engine.registry"),
        ("opentelemetry", "otel", "model.engine(n_ctx=64, tracer_provider=object())"),
    ],
)
def test_a_missing_extra_is_reported(library: str, extra: str, call: str) -> None:
    code = f"""
import sys
sys.modules[{library!r}] = None
import slm_core as slm
with slm.load(slm.demo_model_path()) as model, model.engine(n_ctx=64) as engine:
    engine.submit("a", slm.Sampling(max_tokens=1)).run()
    engine.stats()
    for _ in range(2):
        try:
            {call}
        except slm.SlmError as error:
            assert isinstance(error, ImportError)
            print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [f"slm-core[{extra}]" in line for line in done.stdout.splitlines()] == [True, True]


def test_no_metric_span_or_log_line_contains_text(caplog: pytest.LogCaptureFixture) -> None:
    """A canary text in a prompt, a message, a stop string, a constraint, a key, a salt, an answer and an error."""
    canary = "CANARY"

    def refuse(event: Event, draft: object) -> StoppingAction:
        raise ValueError(f"{canary} was said")

    bench = Bench()
    with bench.engine, caplog.at_level(logging.DEBUG):
        submit = bench.engine.submit
        streams = [
            submit(f"{canary} in a prompt", tokens(4, stop=(canary,)), key=canary, salt=canary),
            submit([Message(Role.USER, canary)], tokens(4)),
            submit("to be answered with it", tokens(9), constraint=Choice([canary])),
            submit(f"{canary} that raises", tokens(4), stopping_criteria=[refuse]),
            submit(f"{canary}!", tokens(4)),
        ]
        bench.context.held = True
        living = submit(f"{canary} that is not over", tokens(50))
        shown = [repr(bench.engine.stats()), repr(living.metrics), repr(living), repr(bench.engine)]
        bench.context.held = False
        bench.context.permits.release(9)
        for stream in streams:
            try:
                stream.run()
            except (ValueError, DecodeFailed) as error:
                shown += error.__notes__
        living.run()
        assert streams[2].answer.text == canary
        bench.at_rest()
        shown += [repr(bench.engine.stats()), repr(bench.engine.stats().requests), bench.engine.metrics_text().decode()]
        shown += [repr(stream.metrics) + repr(stream) for stream in [*streams, living]]
        shown += [span.to_json() for span in bench.exporter.get_finished_spans()]
        shown += [record.getMessage() + (record.exc_text or "") for record in caplog.records]
    assert len(bench.exporter.get_finished_spans()) >= 6
    assert [record.getMessage() for record in caplog.records]
    for text in shown:
        assert canary not in text
