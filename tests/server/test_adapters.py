"""Adapters by name: a request that names one is answered as by the model with it."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import slm_core as slm
from server.conftest import QUESTION, Client
from slm_core.adapters import write_control_vector
from slm_core.cli.app import app
from slm_core.cli.serve import _adapter
from slm_core.generation.scoring import score_tokens
from slm_core.server import EngineSettings, ServedAdapter, ServedModel, create_app

POLITE = Path(__file__).parents[1] / "adapters" / "polite.gguf"
ADAPTERS = (ServedAdapter("pirate", slm.demo_adapter_path()), ServedAdapter("half", POLITE, 0.5))


@pytest.fixture(scope="module")
def vector(tmp_path_factory: pytest.TempPathFactory) -> ServedAdapter:
    """A control vector, in two of its layers."""
    rng, path = np.random.default_rng(1), tmp_path_factory.mktemp("vector") / "vector.gguf"
    write_control_vector({layer: rng.standard_normal(192).astype(np.float32) for layer in range(1, 6)}, path)
    return ServedAdapter("vector", path, 25.0, layers=(2, 3))


@pytest.fixture(scope="module")
def served(vector: ServedAdapter) -> Iterator[Client]:
    """A server with the demo model, two adapters of it, and a control vector."""
    log = StringIO()
    model = ServedModel(
        "demo",
        lambda: slm.load(slm.demo_model_path()),
        aliases=("gpt-test",),
        settings=EngineSettings(n_ctx=2048),
        adapters=(*ADAPTERS, vector),
    )
    client = Client(create_app([model], log=log), log)
    yield client
    client.run(client.app.state.registry.close())


@pytest.fixture(scope="module")
def adapted(demo: slm.Model, vector: ServedAdapter) -> slm.Model:
    """The demo model with the same adapters."""
    for adapter in (*ADAPTERS, vector):
        demo.adapters.load(adapter.path, adapter.name, layers=adapter.layers)
    return demo


def expected(model: slm.Model, adapters: dict[str, float]) -> str:
    with model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0), adapters=adapters) as chat:
        return chat.send(QUESTION["messages"]).text


@pytest.mark.parametrize(
    ("name", "scales"), [("demo", {}), ("gpt-test", {}), ("pirate", {"pirate": 1.0}), ("half", {"half": 0.5})]
)
def test_each_name_is_answered_with_its_adapter(
    served: Client, adapted: slm.Model, name: str, scales: dict[str, float]
) -> None:
    answer = expected(adapted, scales)
    body = served.chat(model=name)
    assert body["model"] == ("demo" if name == "gpt-test" else name)
    assert body["choices"][0]["message"]["content"] == answer
    streamed = served.stream(model=name)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed) == answer
    messages = {**QUESTION, "max_tokens": 100, "model": name}
    assert served.post("/v1/messages", messages).json()["content"][0]["text"] == answer
    ollama = {"messages": QUESTION["messages"], "model": name, "stream": False, "options": {"temperature": 0}}
    assert served.post("/api/chat", ollama).json()["message"]["content"] == answer
    responses = {"input": QUESTION["messages"][0]["content"], "model": name, "temperature": 0}
    assert served.post("/v1/responses", responses).json()["output"][0]["content"][0]["text"] == answer


def test_the_answers_differ(adapted: slm.Model) -> None:
    """Otherwise the test above could not fail."""
    assert len({expected(adapted, scales) for scales in ({}, {"pirate": 1.0}, {"half": 0.5})}) >= 2


def test_a_session_keeps_its_adapter(served: Client, adapted: slm.Model) -> None:
    session = served.post("/v1/sessions", {"model": "pirate"}).json()
    assert session["model"] == "pirate"
    turn = f"/v1/sessions/{session['id']}/messages"
    answer = served.post(turn, QUESTION).json()
    assert answer["choices"][0]["message"]["content"] == expected(adapted, {"pirate": 1.0})
    assert answer["model"] == "pirate"
    assert served.post(turn, {**QUESTION, "model": "demo"}).status_code == 400
    assert served.post(turn, {**QUESTION, "model": "pirate"}).status_code == 200
    assert served.get(f"/v1/sessions/{session['id']}/cells").status_code == 200


def test_lists_name_adapters_and_their_model(served: Client) -> None:
    served.chat()  # the model is loaded
    listed = {model["id"]: model for model in served.get("/v1/models").json()["data"]}
    assert {name: model["parent"] for name, model in listed.items()} == {
        "demo": None,
        "pirate": "demo",
        "half": "demo",
        "vector": "demo",
    }
    assert (listed["demo"]["aliases"], listed["pirate"]["aliases"]) == (["gpt-test"], [])
    assert served.get("/v1/models/half").json()["loaded"] is True
    tags = {model["name"]: model["details"]["parent_model"] for model in served.get("/api/tags").json()["models"]}
    assert tags == {"demo": "", "pirate": "demo", "half": "demo", "vector": "demo"}
    assert served.post("/api/show", {"model": "half"}).json()["details"]["parent_model"] == "demo"
    assert [model["name"] for model in served.get("/api/ps").json()["models"]] == ["demo"]


def test_embeddings_and_scores_are_those_of_the_adapter(served: Client, adapted: slm.Model) -> None:
    texts = ["the dog", "a longer text about a ship"]
    plain = adapted.embed(texts).vectors
    for name, scales in (("demo", {}), ("pirate", {"pirate": 1.0}), ("vector", {"vector": 25.0})):
        body = served.post("/v1/embeddings", {"model": name, "input": texts}).json()
        assert body["model"] == name
        vectors = np.array([each["embedding"] for each in body["data"]], np.float32)
        np.testing.assert_allclose(vectors, adapted.embed(texts, adapters=scales).vectors, atol=1e-4)
        assert (np.abs(vectors - plain).max() > 1e-2) == bool(scales)
        ranked = served.post("/v1/rerank", {"model": name, "query": texts[0], "documents": texts[1:]}).json()
        assert ranked["results"][0]["relevance_score"] == pytest.approx(float(vectors[1] @ vectors[0]), abs=1e-4)

    prompt = adapted.vocab.encode("My dog is old.", add_special=True, parse_special=False)
    with adapted.new_context(n_ctx=64) as context:
        context.set_adapters(0, {"pirate": 1.0})
        scored = score_tokens(context, 0, prompt, None)
    echoed = {"model": "pirate", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    logprobs = served.post("/v1/completions", echoed).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs[1 : len(prompt)] == pytest.approx(scored.logprobs[1:], abs=1e-3)


def test_requests_of_different_adapters_share_no_prefix(served: Client) -> None:
    question = {"messages": [{"role": "user", "content": "What is 77 + 11? Think of nothing else."}]}
    first = [served.chat(**question, model=name)["usage"] for name in ("demo", "pirate", "half")]
    again = [served.chat(**question, model=name)["usage"] for name in ("demo", "pirate", "half")]
    n_prompt = first[0]["prompt_tokens"]
    assert max(usage["prompt_tokens_details"]["cached_tokens"] for usage in first) < n_prompt - 8
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in again] == [n_prompt - 1] * 3


def test_names_are_unique() -> None:
    twice = ServedModel("demo", slm.load, adapters=(ServedAdapter("demo", POLITE),))  # type: ignore[arg-type]
    with pytest.raises(slm.InvalidOption, match="two models have the name 'demo'"):
        create_app([twice])


@pytest.mark.parametrize(
    ("text", "parent", "adapter"),
    [
        ("a=b.gguf", "", ServedAdapter("a", Path("b.gguf").absolute())),
        ("a=b.gguf:0.5", "", ServedAdapter("a", Path("b.gguf").absolute(), 0.5)),
        ("demo/a=/some/b:-1", "demo", ServedAdapter("a", Path("/some/b"), -1.0)),
    ],
)
def test_the_option(text: str, parent: str, adapter: ServedAdapter) -> None:
    assert _adapter(text) == (parent, adapter)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("b.gguf", "error: --lora 'b.gguf' (accepted: NAME=PATH, NAME=PATH:SCALE, MODEL/NAME=PATH)"),
        ("none/a=b.gguf", "error: --lora 'none/a=b.gguf': there is no model 'none' (there are: demo)"),
        ("demo=b.gguf", "error: two models have the name 'demo'"),
        ("a=missing.gguf", "error: the model 'demo' cannot be loaded: "),
    ],
)
def test_a_wrong_option_is_one_line(option: str, message: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--lora", option])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)
