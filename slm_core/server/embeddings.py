"""Embeddings and ranking: POST /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, cast

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.model import Model
from slm_core.server.calls import call_of, until_lost
from slm_core.server.errors import ApiError
from slm_core.server.fields import Items, Strict
from slm_core.server.large_bodies import LargeBodyRoute
from slm_core.server.registry import Leased
from slm_core.server.sse import json_response, limits_of, registry_of
from slm_core.types import States

router = APIRouter(tags=["Embeddings"], route_class=LargeBodyRoute)
_NO_EFFECT = "Without effect."
_MOST_TEXTS = 2048
_TOGETHER = 8
"""Texts that are computed in one call. If the client is lost, the work ends after the current call."""

Text = str | list[int]


class EmbeddingsRequest(Strict):
    """The body of a request for embeddings."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    input: str | Items[int] | Items[str] | Items[Items[int]] = Field(
        description=f"A text or its tokens, or a list of at most {_MOST_TEXTS:,} of them."
    )
    encoding_format: Literal["float", "base64"] = Field("float", description='"base64": little-endian float32.')
    dimensions: int | None = Field(None, ge=1, description="Only the model's own number.")
    user: str | None = Field(None, description=_NO_EFFECT)

    def texts(self) -> Sequence[Text]:
        """The texts.

        Raises:
            ApiError: none, too many, or an empty one.
        """
        value = self.input
        is_one = isinstance(value, str) or all(isinstance(each, int) for each in value)
        return _checked(cast("Sequence[Text]", [value] if is_one and value else value), "input")


class Document(Strict):
    """A text to rank."""

    text: str


class RerankRequest(Strict):
    """The body of a request to rank documents."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    query: str
    documents: Items[str | Document] = Field(description=f"At most {_MOST_TEXTS - 1:,} texts.")
    top_n: int | None = Field(None, ge=1, description="How many results; all by default.")
    return_documents: bool = Field(False, description="Whether results have the text.")
    user: str | None = Field(None, description=_NO_EFFECT)

    def texts(self) -> Sequence[str]:
        """The texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsRequest, http: Request) -> Response:
    """Vectors of length 1 for texts; the dot product of two vectors is the cosine."""
    texts = body.texts()

    async def work() -> Response:
        async with _leased(http, body.model) as running:
            vectors, n_tokens = await _embed(running, texts)
            width = vectors.shape[1]
            if body.dimensions not in (None, width):
                message = f"dimensions is {body.dimensions}, but the model's vectors have {width}"
                raise ApiError(400, message, param="dimensions")
            return json_response(
                {
                    "object": "list",
                    "data": [
                        {"object": "embedding", "index": i, "embedding": _vector(vector, body.encoding_format)}
                        for i, vector in enumerate(vectors)
                    ],
                    "model": running.name,
                    "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
                }
            )

    return await until_lost(http.receive, work)


@router.post("/v1/rerank")
@router.post("/rerank")
async def rerank(body: RerankRequest, http: Request) -> Response:
    """Documents, best first: by a reranker's scores, or by the cosine of their embedding and the query's."""
    documents = body.texts()
    texts = _checked([body.query, *documents], "query or documents")

    async def work() -> Response:
        async with _leased(http, body.model) as running:
            if running.model.info.ranks:
                scores, n_tokens = await _rank(running, body.query, documents)
            else:
                vectors, n_tokens = await _embed(running, texts)
                scores = vectors[1:] @ vectors[0]
            best = np.argsort(-scores, kind="stable")[: body.top_n]
            results: list[dict[str, object]] = [{"index": int(i), "relevance_score": float(scores[i])} for i in best]
            if body.return_documents:
                for result, i in zip(results, best, strict=True):
                    result["document"] = {"text": documents[i]}
            usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
            return json_response({"model": running.name, "results": results, "usage": usage})

    return await until_lost(http.receive, work)


@asynccontextmanager
async def _leased(http: Request, model: str | None) -> AsyncIterator[Leased]:
    """A model for a request, which counts as one request, however many texts it has.

    Raises:
        ApiError: there is no place for a request, or no such model.
    """
    with limits_of(http).place(call_of(http.scope).key):
        async with registry_of(http).lease(model) as running:
            yield running


def _checked(texts: Sequence[Text], where: str) -> Sequence[Text]:
    if not 0 < len(texts) <= _MOST_TEXTS:
        raise ApiError(400, f"{where} has {len(texts)} texts (accepted: 1 to {_MOST_TEXTS})", param=where)
    if not all(texts):
        raise ApiError(400, f"{where} has a text without tokens", param=where)
    return texts


async def _embed(running: Leased, texts: Sequence[Text]) -> tuple[States, int]:
    """The vectors of texts, float32 [n, E], and the number of their tokens."""
    n_ctx, model = running.engine.stats().n_ctx, running.model
    vectors, n_tokens = [], 0
    for first in range(0, len(texts), _TOGETHER):
        group = [await to_thread.run_sync(_tokens, model, text) for text in texts[first : first + _TOGETHER]]
        longest = max(map(len, group))
        if longest > n_ctx:
            message = f"a text has {longest} tokens, but the context has room for {n_ctx}"
            raise ApiError(400, message, "context_length_exceeded", "input")
        async with running.apart:
            embeddings = await to_thread.run_sync(partial(model.embed, group, adapters=running.adapters))
        vectors.append(embeddings.vectors)
        n_tokens += sum(embeddings.n_tokens)
    return np.concatenate(vectors), n_tokens


async def _rank(running: Leased, query: str, documents: Sequence[str]) -> tuple[States, int]:
    """The scores of documents, float32 [n], and the number of tokens of all pairs."""
    scores, n_tokens = [], 0
    for first in range(0, len(documents), _TOGETHER):
        group = documents[first : first + _TOGETHER]
        rerank = partial(running.model.rerank, query, group, adapters=running.adapters)
        async with running.apart:
            ranking = await to_thread.run_sync(rerank)
        scores.append(ranking.scores)
        n_tokens += sum(ranking.n_tokens)
    return np.concatenate(scores), n_tokens


def _tokens(model: Model, text: Text) -> list[int]:
    return model.vocab.encode(text, add_special=True, parse_special=False) if isinstance(text, str) else text


def _vector(vector: States, encoding: str) -> object:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
