"""The state of the server: /health, /ready and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from slm_core.server.metrics import metrics_page
from slm_core.server.registry import Running
from slm_core.server.sse import json_response, options_of, registry_of

router = APIRouter(tags=["Server"])


@router.get("/health", responses={503: {"description": "A model has crashed or hangs, and is not back yet."}})
async def health(http: Request) -> Response:
    """Whether the server answers requests."""
    hang_s = options_of(http).hang_s
    models = {running.name: _state(running, hang_s) for running in registry_of(http).running}
    restarting = registry_of(http).restarting
    is_ok = set(models.values()) <= {"ok"} and not restarting
    states = {**models, **dict.fromkeys(restarting, "restarting")}
    return json_response({"status": "ok" if is_ok else "failed", "models": states}, 200 if is_ok else 503)


@router.get("/ready", responses={503: {"description": "No model is loaded yet."}})
async def ready(http: Request) -> Response:
    """Whether a model is loaded."""
    names = [running.name for running in registry_of(http).running if not running.has_failed]
    return json_response({"status": "ready" if names else "loading", "models": names}, 200 if names else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Metrics of all requests and engines, for Prometheus."""
    page = metrics_page(http.app.state.metrics, registry_of(http))
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


def _state(running: Running, hang_s: float) -> str:
    if running.has_failed:
        return "failed"
    return "hangs" if running.engine.step_s > hang_s else "ok"
