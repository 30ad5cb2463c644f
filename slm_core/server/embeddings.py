"""Embeddings and ranking: POST /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Literal, TypeAlias, TypeVar, cast

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.embedding import normalized
from slm_core.numerics import common_prefix
from slm_core.protocols import Vocab
from slm_core.server.calls import call_of, until_lost
from slm_core.server.errors import ApiError
from slm_core.server.fields import Items, Strict, Tokens
from slm_core.server.large_bodies import LargeBodyRoute
from slm_core.server.registry import Leased
from slm_core.server.sse import json_response, limits_of, registry_of
from slm_core.types import States

router = APIRouter(tags=["Embeddings"], route_class=LargeBodyRoute)
_NO_EFFECT = "Without effect."
_MOST_TEXTS = 2048
_TOGETHER = 8
"""Texts that are computed in one call. If the client is lost, the work ends after the current call."""

Dimensions: TypeAlias = Annotated[
    int | None, Field(ge=1, description="Keep so many numbers of each vector, scaled to length 1 again.")
]
Text = str | list[int]
_T = TypeVar("_T", bound=Text)


class EmbeddingsRequest(Strict):
    """The body of a request for embeddings."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    input: str | Tokens | Items[str] | Items[Tokens] = Field(
        description=f"A text or its tokens, or a list of at most {_MOST_TEXTS:,} of them."
    )
    encoding_format: Literal["float", "base64"] = Field("float", description='"base64": little-endian float32.')
    dimensions: Dimensions = None
    user: str | None = Field(None, description=_NO_EFFECT)

    def texts(self) -> Sequence[Text]:
        """The texts.

        Raises:
            ApiError: none, too many, or an empty one.
        """
        value = self.input
        is_one = isinstance(value, str) or isinstance(next(iter(value), None), int)
        return checked(cast("Sequence[Text]", [value] if is_one and value else value), "input")


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
        async with leased(http, body.model) as running:
            vectors, n_tokens = await embed(running, texts)
            vectors = shortened(vectors, body.dimensions)
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
    texts = checked([body.query, *documents], "query or documents")

    async def work() -> Response:
        async with leased(http, body.model) as running:
            if running.model.info.ranks:
                scores, n_tokens = await _rank(running, body.query, documents)
            else:
                vectors, n_tokens = await embed(running, texts)
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
async def leased(http: Request, model: str | None) -> AsyncIterator[Leased]:
    """A model for a request, which counts as one request, however many texts it has.

    Raises:
        ApiError: there is no place for a request, or no such model.
    """
    with limits_of(http).place(call_of(http.scope).key):
        async with registry_of(http).lease(model) as running:
            yield running


def checked(texts: Sequence[_T], where: str) -> Sequence[_T]:
    """The texts of a parameter, or their tokens.

    Raises:
        ApiError: none, too many, or an empty one.
    """
    if not 0 < len(texts) <= _MOST_TEXTS:
        raise ApiError(400, f"{where} has {len(texts)} texts (accepted: 1 to {_MOST_TEXTS})", param=where)
    if not all(texts):
        raise ApiError(400, f"{where} has a text without tokens", param=where)
    return texts


async def embed(
    running: Leased,
    texts: Sequence[Text],
    *,
    n_most: int | None = None,
    truncate: bool = False,
    normalize: bool = True,
) -> tuple[States, int]:
    """The vectors of texts, float32 [n, E], and the number of their tokens.

    Args:
        running: the model.
        texts: the texts, or their tokens.
        n_most: the longest text, in tokens; None for the context.
        truncate: cut longer texts at their end; otherwise they are refused.
        normalize: divide vectors by their length.

    Raises:
        ApiError: a text is too long.
    """
    vocab, n_most = running.model.vocab, n_most or running.engine.stats().n_ctx
    vectors, n_tokens = [], 0
    for first in range(0, len(texts), _TOGETHER):
        group = [await to_thread.run_sync(_tokens, vocab, text) for text in texts[first : first + _TOGETHER]]
        if truncate:
            group = [truncated(vocab, tokens, n_most) for tokens in group]
        longest = max(map(len, group))
        if longest > n_most:
            message = f"a text has {longest} tokens, but there is room for {n_most}"
            raise ApiError(400, message, "context_length_exceeded", "input")
        async with running.apart:
            compute = partial(running.model.embed, group, normalize=normalize, adapters=running.adapters)
            embeddings = await to_thread.run_sync(compute)
        vectors.append(embeddings.vectors)
        n_tokens += sum(embeddings.n_tokens)
    return np.concatenate(vectors), n_tokens


def shortened(vectors: States, dimensions: int | None) -> States:
    """The first numbers of vectors [n, E], scaled to length 1 again; None for all numbers.

    Raises:
        ApiError: vectors have fewer numbers.
    """
    width = vectors.shape[1]
    if dimensions is None or dimensions == width:
        return vectors
    if dimensions > width:
        message = f"dimensions is {dimensions}, but the model's vectors have {width}"
        raise ApiError(400, message, param="dimensions")
    return normalized(vectors[:, :dimensions])


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


def _tokens(vocab: Vocab, text: Text) -> list[int]:
    return vocab.encode(text, add_special=True, parse_special=False) if isinstance(text, str) else text


def truncated(vocab: Vocab, tokens: list[int], n_most: int) -> list[int]:
    """The tokens of a text, cut before the special tokens at its end; as they are if no token of the text remains."""
    special = vocab.encode("", add_special=True, parse_special=False)
    n_last = common_prefix(tokens[::-1], special[::-1])
    if len(tokens) <= n_most or n_most <= len(special):
        return tokens
    return tokens[: n_most - n_last] + tokens[len(tokens) - n_last :]


def _vector(vector: States, encoding: str) -> object:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
