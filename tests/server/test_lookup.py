"""Which answers of the server have prompt lookup."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai.types import CompletionUsage

import slm_core as slm
from slm_core.engine import CompletionsStream, Engine
from slm_core.generation.speculation import PromptLookup
from slm_core.generation.speculation.draft_length import AdaptiveDraftLength
from slm_core.server import EngineSettings, ServedModel, create_app

DRAWN: dict[str, Any] = {"temperature": 0.7}
SEEDED: dict[str, Any] = {"temperature": 0.7, "seed": 3}
GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.mark.parametrize(
    ("lookup", "drafting"), [(None, [True, False, False]), (True, [True] * 3), (False, [False] * 3)]
)
def test_answers_that_are_drawn_without_a_seed_have_prompt_lookup_by_default(
    lookup: bool | None, drafting: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_lookup: list[bool] = []
    completions = Engine.completions

    def watched(engine: Engine, *args: Any, **options: Any) -> CompletionsStream:
        speculation = options["speculation"]
        has_lookup.append(speculation is not None and isinstance(speculation.drafter, PromptLookup))
        return completions(engine, *args, **options)

    monkeypatch.setattr(Engine, "completions", watched)
    settings = EngineSettings(n_ctx=512, lookup=lookup)
    app = create_app([ServedModel("demo", lambda: slm.load(slm.demo_model_path()), settings=settings)])

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for options in (DRAWN, SEEDED, GREEDY):
                message = {"role": "user", "content": "Say one, two, one, two."}
                body = {"messages": [message], "max_tokens": 12, **options}
                response = await client.post("/v1/chat/completions", json=body, timeout=60)
                assert response.status_code == 200, response.text
        await app.state.registry.close()

    asyncio.run(ask())
    assert has_lookup == drafting


@pytest.mark.parametrize(("lookup", "drafts"), [(None, True), (False, False)])
def test_a_prediction_is_drafted_and_changes_nothing(
    lookup: bool | None, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usage says how many of its tokens were accepted. --no-lookup holds for predictions, too."""
    monkeypatch.setattr(AdaptiveDraftLength, "length", lambda length: 8)
    settings = EngineSettings(n_ctx=512, lookup=lookup)
    app = create_app([ServedModel("demo", lambda: slm.load(slm.demo_model_path()), settings=settings)])

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def answer(**fields: Any) -> Any:
                body = {"messages": [{"role": "user", "content": "What can you do?"}], "max_tokens": 40, **GREEDY}
                response = await client.post("/v1/chat/completions", json={**body, **fields}, timeout=60)
                assert response.status_code == (400 if fields.get("n") == 2 else 200), response.text
                return response.json()

            plain = await answer()
            text = plain["choices"][0]["message"]["content"]
            for content in (text, [{"type": "text", "text": text}], "Nothing of this comes."):
                predicted = await answer(prediction={"type": "content", "content": content})
                assert predicted["choices"] == plain["choices"]
                usage = CompletionUsage.model_validate(predicted["usage"]).completion_tokens_details
                assert usage is not None and usage.rejected_prediction_tokens is not None
                n_accepted = usage.accepted_prediction_tokens or 0
                assert (n_accepted > 10) == (drafts and content != "Nothing of this comes.")
            refused = await answer(prediction={"type": "content", "content": text}, n=2)
            assert refused["error"]["param"] == "prediction"
            assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
        await app.state.registry.close()

    asyncio.run(ask())
