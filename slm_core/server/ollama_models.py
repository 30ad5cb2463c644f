"""Ollama's lists of models: /api/tags, /api/ps, /api/show, /api/version."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from slm_core.errors import TemplateError
from slm_core.server.large_bodies import LargeBodyRoute
from slm_core.server.ollama_fields import ShowRequest
from slm_core.server.registry import Leased, ModelRegistry, RegistryEntry, Running
from slm_core.server.sse import json_response, registry_of
from slm_core.types import ModelInfo

router = APIRouter(tags=["Ollama"], route_class=LargeBodyRoute)
_UNKNOWN = {"format": "gguf", "family": "", "families": None, "parameter_size": "", "quantization_level": ""}
"""Details of a model that is not loaded."""


@router.get("/api/version")
async def version() -> Response:
    """The version of slm-core."""
    return json_response({"version": importlib.metadata.version("slm-core")})


@router.get("/api/tags")
async def tags(http: Request) -> Response:
    """The models. Size and details of a model are known when it is loaded."""
    registry = registry_of(http)
    running = {each.name: each for each in registry.running}
    names = [name for served in registry.models.values() for name in served.own_names]
    models = map(registry.find, names)
    return json_response({"models": [_listed(registry, each, running.get(each.served.name)) for each in models]})


@router.get("/api/ps")
async def ps(http: Request) -> Response:
    """The loaded models."""
    registry = registry_of(http)
    models = [
        {
            **_listed(registry, registry.find(each.name), each),
            "expires_at": datetime.max.replace(tzinfo=UTC).isoformat(),
            "size_vram": 0,
            "context_length": registry.models[each.name].settings.n_ctx,
        }
        for each in registry.running
    ]
    return json_response({"models": models})


@router.post("/api/show")
async def show(body: ShowRequest, http: Request) -> Response:
    """The properties of a model, which is loaded for them."""
    registry = registry_of(http)
    async with registry.lease(body.model_name) as running:
        info = running.model.info
        return json_response(
            {
                "modelfile": "",
                "parameters": "",
                "template": info.chat_template or "",
                "details": {**_details(info), "parent_model": registry.find(body.model_name).parent or ""},
                "model_info": _metadata(info),
                "capabilities": capabilities(running),
                "modified_at": _since(registry),
            }
        )


def _listed(registry: ModelRegistry, entry: RegistryEntry, running: Running | None) -> Mapping[str, object]:
    info = None if running is None else running.model.info
    details = _UNKNOWN if info is None else _details(info)
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": _since(registry),
        "size": 0 if info is None else info.n_bytes,
        "digest": "" if info is None else info.fingerprint,
        "details": {**details, "parent_model": entry.parent or ""},
    }


def _since(registry: ModelRegistry) -> str:
    return datetime.fromtimestamp(registry.started, UTC).isoformat()


def _details(info: ModelInfo) -> Mapping[str, object]:
    millions = info.n_params / 1e6
    return {
        "format": "gguf",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": f"{millions / 1000:.1f}B" if millions >= 1000 else f"{millions:.1f}M",
        "quantization_level": info.quantization,
    }


def _metadata(info: ModelInfo) -> Mapping[str, object]:
    """Metadata under the keys of GGUF."""
    return {
        "general.architecture": info.architecture,
        "general.name": info.name,
        "general.parameter_count": info.n_params,
        f"{info.architecture}.block_count": info.n_layers,
        f"{info.architecture}.context_length": info.n_ctx_train,
        f"{info.architecture}.embedding_length": info.n_embd,
        f"{info.architecture}.vocab_size": info.n_vocab,
    }


def capabilities(running: Leased) -> list[str]:
    """What a model can do, in Ollama's words."""
    if running.model.info.pooling is not None:
        return ["embedding"]
    try:
        formatter = running.model.formatter
    except TemplateError:
        return ["completion"]
    has = {
        "completion": True,
        "tools": formatter.call_format is not None,
        "thinking": formatter.reasoning_end(thinking=True) is not None,
    }
    return [name for name, is_there in has.items() if is_there]
