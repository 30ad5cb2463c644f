"""OpenAI's list of models: GET /v1/models."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from slm_core.server.registry import ModelRegistry, RegistryEntry
from slm_core.server.sse import json_response, registry_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def models(http: Request) -> Response:
    """The models that can be requested. Adapters are models, too, which name their ``parent``."""
    registry = registry_of(http)
    names = [name for served in registry.models.values() for name in served.own_names]
    return json_response({"object": "list", "data": [_model(registry, registry.find(name)) for name in names]})


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> Response:
    """One model, by its name or an alias."""
    registry = registry_of(http)
    return json_response(_model(registry, registry.find(name)))


@router.post("/v1/models/{name:path}/load", tags=["Server"])
async def load(name: str, http: Request) -> Response:
    """Load a model, if it is not loaded."""
    registry = registry_of(http)
    async with registry.lease(name):
        return json_response(_model(registry, registry.find(name)))


@router.post("/v1/models/{name:path}/unload", tags=["Server"])
async def unload(name: str, http: Request) -> Response:
    """Unload a model after its running requests. Its next request loads it again."""
    registry = registry_of(http)
    await registry.unload(name)
    return json_response(_model(registry, registry.find(name)))


def _model(registry: ModelRegistry, entry: RegistryEntry) -> Mapping[str, object]:
    served = entry.served
    running = {each.name: each for each in registry.running}.get(served.name)
    fields: dict[str, object] = {
        "id": entry.name,
        "object": "model",
        "created": registry.started,
        "owned_by": "slm-core",
        "parent": entry.parent,
        "aliases": () if entry.adapters else served.aliases,
        "loaded": running is not None,
        "context_length": served.settings.n_ctx,
        "reuse": served.settings.reuse,
    }
    if running is not None:
        info = running.model.info
        fields["meta"] = {
            "backend": info.backend,
            "architecture": info.architecture,
            "quantization": info.quantization,
            "n_params": info.n_params,
            "n_bytes": info.n_bytes,
            "n_vocab": info.n_vocab,
            "n_ctx_train": info.n_ctx_train,
        }
    return fields
