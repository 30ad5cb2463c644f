"""``create_app``: the ASGI application."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TextIO

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from slm_core.errors import SlmError
from slm_core.server import (
    anthropic_messages,
    embeddings,
    health,
    ollama,
    ollama_embeddings,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_models,
    page,
    responses,
    session_turns,
    sessions,
    tokens,
)
from slm_core.server.bodies import Bodies
from slm_core.server.calls import ClientLost, call_of
from slm_core.server.errors import ApiError, api_error, envelope_for, invalid_json, validation_error
from slm_core.server.keys import Limits
from slm_core.server.log import ServerLog
from slm_core.server.metrics import HttpMetrics
from slm_core.server.middleware import Access, Recording
from slm_core.server.options import ServerOptions
from slm_core.server.registry import ModelRegistry, ServedModel
from slm_core.server.response_store import ResponseStore
from slm_core.server.session_store import SessionStore
from slm_core.server.sse import json_response, log_of

_ROUTERS = (
    page.router,
    openai_chat.router,
    openai_completions.router,
    openai_models.router,
    responses.router,
    sessions.router,
    session_turns.router,
    anthropic_messages.router,
    ollama.router,
    ollama_embeddings.router,
    ollama_models.router,
    embeddings.router,
    tokens.router,
    health.router,
)
_LOST = 499
_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A parameter is invalid, unknown or not supported."},
    401: {"description": "The API key is missing or wrong."},
    403: {"description": "The Host or Origin header is not allowed."},
    404: {"description": "There is no such model."},
    408: {"description": "The body did not arrive in time."},
    413: {"description": "The body is too long."},
    429: {"description": "A limit is reached; Retry-After has the seconds to wait."},
    503: {"description": "The model cannot be loaded, has crashed, or is being unloaded; the disk is full."},
}


def create_app(
    models: Sequence[ServedModel], options: ServerOptions | None = None, *, log: TextIO | None = sys.stderr
) -> FastAPI:
    """The ASGI application. Its lifespan loads the first model, and closes all models at the end.

    Args:
        models: the models; the first one is the default.
        options: who may call, and how it streams.
        log: the file of the log; None for no log.

    Raises:
        InvalidOption: no models, two models with one name, a model larger than the memory budget, or a file in
            ``sessions_dir`` that is not a session.
    """
    options = options if options is not None else ServerOptions()
    registry = ModelRegistry(models, memory_bytes=options.memory_bytes, keep_alive_s=options.keep_alive_s)
    limits = Limits(options.api_keys, options.max_requests, options.max_priority)
    metrics, server_log = HttpMetrics(), ServerLog(log)
    stored = ResponseStore()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await _load_default(app, registry)
            yield
        finally:
            await stored.close(options.grace_s)
            await registry.close()

    app = FastAPI(
        title="slm-core",
        version=importlib.metadata.version("slm-core"),
        lifespan=lifespan,
        docs_url=None,  # these pages would load scripts of another origin
        redoc_url=None,
        middleware=middleware(options, limits, server_log, metrics),
        responses=_REFUSALS,
    )
    app.state.registry, app.state.options, app.state.startup_error = registry, options, None
    app.state.end_answers = registry.close
    app.state.limits, app.state.sessions = limits, SessionStore(options.sessions_dir)
    app.state.metrics, app.state.log, app.state.responses = metrics, server_log, stored
    for router in _ROUTERS:
        app.include_router(router)
    for kind in (SlmError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(ClientLost, _answer_nobody)
    _declare_only_what_is_answered(app)
    return app


async def _load_default(app: FastAPI, registry: ModelRegistry) -> None:
    try:
        async with registry.lease(None):
            pass
    except SlmError as error:
        app.state.startup_error = error
        raise


def middleware(options: ServerOptions, limits: Limits, log: ServerLog, metrics: HttpMetrics) -> list[Middleware]:
    """The middleware, outermost first: the log, access, the body."""
    layers = [
        Middleware(Recording, log=log, metrics=metrics),
        Middleware(Access, options=options, limits=limits),
        Middleware(Bodies, options=options),
    ]
    if options.allowed_origins:
        origins = list(options.allowed_origins)
        layers.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    return layers


async def _refuse(http: Request, error: Exception) -> Response:
    """The answer to a request that failed before its first byte, in the form of its API."""
    if isinstance(error, RequestValidationError):
        refusal = validation_error(error.errors())
    elif isinstance(error, HTTPException) and isinstance(error.__cause__, ApiError):
        refusal = error.__cause__  # of a large body
    elif isinstance(error, HTTPException) and isinstance(error.__cause__, (ValueError, RecursionError)):
        refusal = invalid_json()  # fastapi: bytes that are not UTF-8, an integer that is too long, or deep nesting
    elif isinstance(error, HTTPException):
        refusal = ApiError(error.status_code, str(error.detail), "http_error", headers=error.headers)
    else:
        refusal = api_error(error)
    call = call_of(http.scope)
    call.facts["error"] = refusal.code
    if refusal.status >= 500:
        log_of(http).failure(call, error)
    return json_response(envelope_for(http.url.path)(refusal, call.request_id), refusal.status, refusal.headers)


async def _answer_nobody(http: Request, error: Exception) -> Response:
    return Response(status_code=_LOST)


def _declare_only_what_is_answered(app: FastAPI) -> None:
    """Remove status 422 from the OpenAPI document: an invalid body is answered with 400."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's way to change the document
