"""/v1/rerank with a model that has a head for it."""

from __future__ import annotations

from io import StringIO

import pytest

import slm_core as slm
from core.test_ranking import HEADS, QUERY, TEXTS, write_reranker
from server.conftest import Client
from slm_core.server import EngineSettings, ServedModel, create_app


def test_a_reranker_scores_documents(tmp_path) -> None:
    """More documents than one batch has. The scores are those of ``Model.rerank``."""
    path, log = write_reranker(tmp_path, "qwen3", HEADS["qwen3"]), StringIO()
    served = ServedModel("ranker", lambda: slm.load(path, backend="native"), settings=EngineSettings(n_ctx=512))
    client, documents = Client(create_app([served], log=log), log), [*TEXTS, *(f"text {i}" for i in range(8))]
    try:
        body = client.post("/v1/rerank", {"query": QUERY, "documents": documents, "top_n": 5}).json()
    finally:
        client.run(client.app.state.registry.close())
    with slm.load(path, backend="native") as model:
        ranking = model.rerank(QUERY, documents)
    assert [result["index"] for result in body["results"]] == ranking.order[:5]
    assert [result["relevance_score"] for result in body["results"]] == pytest.approx(
        [float(ranking.scores[i]) for i in ranking.order[:5]], rel=1e-4
    )
    assert body["usage"]["prompt_tokens"] == sum(ranking.n_tokens)
