"""Ollama's embeddings: POST /api/embed, and the older /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.server.calls import until_lost
from slm_core.server.embeddings import Dimensions, checked, embed, leased, shortened
from slm_core.server.fields import Items
from slm_core.server.large_bodies import LargeBodyRoute
from slm_core.server.ollama import nanoseconds
from slm_core.server.ollama_fields import ModelFields
from slm_core.server.sse import json_response, registry_of
from slm_core.types import States

router = APIRouter(tags=["Ollama"], route_class=LargeBodyRoute)
_Form = Callable[[States, int, float, float], Mapping[str, object]]
"""Makes the JSON of vectors [n, E], the number of their tokens, the seconds of the request and those of loading."""
_NO_VECTORS: States = np.zeros((0, 0), np.float32)


class EmbedRequest(ModelFields):
    """The body of a request for embeddings. Of the options, only ``num_ctx`` has an effect."""

    input: str | Items[str] = Field("", description="A text, or a list of at most 2,048 texts. None: load the model.")
    truncate: bool = Field(True, description="Cut texts that are too long at their end; otherwise refuse them.")
    dimensions: Dimensions = None

    def texts(self) -> Sequence[str]:
        """The texts; none to load the model.

        Raises:
            ApiError: too many texts, or an empty one in a list.
        """
        return checked([self.input] if isinstance(self.input, str) else self.input, "input") if self.input else []


class EmbeddingRequest(ModelFields):
    """The body of an older request for one embedding. Of the options, only ``num_ctx`` has an effect."""

    prompt: str = Field("", description="The text; it is cut at its end if it is too long. None: load the model.")


@router.post("/api/embed")
async def embed_texts(body: EmbedRequest, http: Request) -> Response:
    """Vectors of length 1 for texts; the dot product of two vectors is the cosine."""

    def form(vectors: States, n_tokens: int, total_s: float, load_s: float) -> Mapping[str, object]:
        return {
            "model": registry_of(http).find(body.model_name).name,
            "embeddings": shortened(vectors, body.dimensions).tolist() if len(vectors) else [],
            "total_duration": nanoseconds(total_s),
            "load_duration": nanoseconds(load_s),
            "prompt_eval_count": n_tokens,
        }

    return await _answer(http, body, body.texts(), form, truncate=body.truncate)


@router.post("/api/embeddings")
async def embed_text(body: EmbeddingRequest, http: Request) -> Response:
    """The vector of a text, of any length."""

    def form(vectors: States, n_tokens: int, total_s: float, load_s: float) -> Mapping[str, object]:
        return {"embedding": vectors[0].tolist() if len(vectors) else []}

    return await _answer(http, body, [body.prompt] if body.prompt else [], form, normalize=False)


async def _answer(
    http: Request,
    body: ModelFields,
    texts: Sequence[str],
    form: _Form,
    *,
    truncate: bool = True,
    normalize: bool = True,
) -> Response:
    """The vectors of texts; without texts, the model is loaded, or unloaded if ``keep_alive`` is 0."""
    registry, began = registry_of(http), time.perf_counter()
    n_ctx = body.options.context(registry.find(body.model_name).served.settings.n_ctx)
    if not texts and body.unloads:
        await registry.unload(body.model_name)
        return json_response(form(_NO_VECTORS, 0, time.perf_counter() - began, 0.0))

    async def work() -> Response:
        async with leased(http, body.model_name) as running:
            load_s = time.perf_counter() - began
            n_most = min(n_ctx, running.model.info.n_ctx_train or n_ctx)
            vectors, n_tokens = _NO_VECTORS, 0
            if texts:
                vectors, n_tokens = await embed(running, texts, n_most=n_most, truncate=truncate, normalize=normalize)
            return json_response(form(vectors, n_tokens, time.perf_counter() - began, load_s))

    return await until_lost(http.receive, work)
