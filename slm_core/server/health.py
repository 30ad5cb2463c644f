"""The state of the server: /health, /ready and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from slm_core.server.metrics import metrics_page
from slm_core.server.sse import json_response, registry_of

router = APIRouter(tags=["Server"])


@router.get("/health")
async def health() -> Response:
    """Whether the server answers."""
    return json_response({"status": "ok"})


@router.get("/ready", responses={503: {"description": "No model is loaded yet."}})
async def ready(http: Request) -> Response:
    """Whether a model is loaded."""
    names = [running.name for running in registry_of(http).running]
    return json_response({"status": "ready" if names else "loading", "models": names}, 200 if names else 503)


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    """Metrics of all requests and engines, for Prometheus."""
    page = metrics_page(http.app.state.metrics, registry_of(http))
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
