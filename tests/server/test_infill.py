"""Text with a gap: ``suffix`` of /v1/completions and of Ollama's /api/generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

import slm_core as slm
from server.conftest import Body, Client, frames
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.server import EngineSettings, ServedModel, create_app

PREFIX, SUFFIX = "def add(a, b):\n", "\nprint(add(1, 2))"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama").write(tmp_path_factory.mktemp("infill") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny(path: Path) -> Iterator[Client]:
    log = StringIO()
    served = ServedModel("tiny", lambda: slm.load(path, backend="native"), settings=EngineSettings(n_ctx=512))
    client = Client(create_app([served], log=log), log)
    yield client
    client.run(client.app.state.registry.close())


@pytest.fixture(scope="module")
def answers(path: Path) -> list[list[int]]:
    """The tokens of the answers to the gap, and to the prefix alone."""
    prompts = [slm.Infill(PREFIX, SUFFIX), slm.Infill(PREFIX + "#", SUFFIX)]
    with slm.load(path, backend="native") as model:
        return [list(answer.tokens) for answer in model.generate(prompts, slm.Sampling(temperature=0, max_tokens=8))]


def completion(client: Client, **fields: object) -> Body:
    options = {"prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    response = client.post("/v1/completions", {**options, **fields})
    assert response.status_code == 200, response.text
    body: Body = response.json()
    return body


def test_completions(tiny: Client, answers: list[list[int]]) -> None:
    body = completion(tiny)
    assert body["choices"][0]["token_ids"] == answers[0]
    several = completion(tiny, prompt=[PREFIX, PREFIX + "#"])
    assert [choice["token_ids"] for choice in several["choices"]] == answers


def test_a_stream_joins_to_the_answer(tiny: Client, answers: list[list[int]]) -> None:
    options = {"prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    *chunks, done = frames(tiny.post("/v1/completions", {**options, "stream": True}).text)
    assert done == "[DONE]"
    assert [token for chunk in chunks for token in json.loads(chunk)["choices"][0]["token_ids"]] == answers[0]


def test_ollama(tiny: Client, answers: list[list[int]], path: Path) -> None:
    options = {"temperature": 0, "num_predict": 8}
    body = {"model": "tiny", "prompt": PREFIX, "suffix": SUFFIX, "stream": False, "options": options}
    response = tiny.post("/api/generate", body)
    assert response.status_code == 200, response.text
    with slm.load(path, backend="native") as model:
        assert response.json()["response"] == model.vocab.decode(answers[0])


@pytest.mark.parametrize("fields", [{"prompt": [1, 2]}, {"prompt": [[1, 2]]}, {"echo": True}])
def test_what_does_not_go_with_a_gap(tiny: Client, fields: Body) -> None:
    response = tiny.post("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "suffix"


def test_a_model_that_was_not_trained_for_it(client: Client) -> None:
    response = client.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert response.status_code == 400
    assert "no tokens for text with a gap" in response.json()["error"]["message"]
