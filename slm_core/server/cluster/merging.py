"""Answers for all replicas, merged from the answer of each replica."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from slm_core.server.cluster.forwarding import Whole
from slm_core.server.metrics import HttpMetrics
from slm_core.server.sse import json_response

_HTTP = "slm:http_"
"""The series of HTTP requests; the front has its own."""


def _health(answers: Sequence[Whole], _: HttpMetrics) -> Response:
    """One replica that answers is enough: the others get no requests until they are back."""
    states: list[dict[str, Any]] = [json.loads(answer.body) for answer in answers]
    n_well = sum(answer.status == 200 for answer in answers)
    status = "failed" if not n_well else "ok" if n_well == len(answers) else "degraded"
    models = sorted({name for state in states for name in state["models"]})
    content = {
        "status": status,
        "models": {name: _worst([state["models"].get(name, "ok") for state in states]) for name in models},
        "replicas": {answer.tag: state["status"] for answer, state in zip(answers, states, strict=True)},
    }
    return json_response(content, 200 if n_well else 503)


def _worst(states: Sequence[str]) -> str:
    return next((state for state in states if state != "ok"), "ok")


def _ready(answers: Sequence[Whole], _: HttpMetrics) -> Response:
    states = [json.loads(answer.body) for answer in answers if answer.status == 200]
    names = sorted({name for state in states for name in state["models"]})
    return json_response({"status": "ready" if names else "loading", "models": names}, 200 if names else 503)


def _sessions(answers: Sequence[Whole], _: HttpMetrics) -> Response:
    listed: list[dict[str, Any]] = [each for answer in answers for each in json.loads(answer.body)["data"]]
    listed.sort(key=lambda session: session["created"])
    return json_response({"object": "list", "data": listed})


class _AllReplicas(CollectorRegistry):
    """The series of the front, and the series of the engines with a label for their replica."""

    def __init__(self, answers: Sequence[Whole], front: HttpMetrics) -> None:
        super().__init__()
        self._answers = answers
        self._front = front

    def collect(self) -> Iterator[Metric]:
        yield from self._front.registry.collect()
        families: dict[str, Metric] = {}
        for answer in self._answers:
            for family in text_string_to_metric_families(answer.body.decode()):
                if not family.name.startswith(_HTTP):
                    kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                    for sample in family.samples:
                        kept.samples.append(sample._replace(labels={**sample.labels, "replica": answer.tag}))
        yield from families.values()


def _metrics(answers: Sequence[Whole], front: HttpMetrics) -> Response:
    page = generate_latest(_AllReplicas(answers, front))
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


MERGED: Mapping[tuple[str, str], Callable[[Sequence[Whole], HttpMetrics], Response]] = {
    ("GET", "/health"): _health,
    ("GET", "/ready"): _ready,
    ("GET", "/metrics"): _metrics,
    ("GET", "/v1/sessions"): _sessions,
}
"""Requests that all replicas answer."""
