"""Random requests, as the OpenAPI document allows them or not: each answer is declared, and never 5xx."""

from __future__ import annotations

from io import StringIO
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

import slm_core as slm
from slm_core.server import EngineSettings, ServedModel, create_app

LOG = StringIO()
APP = create_app(
    [ServedModel("demo", lambda: slm.load(slm.demo_model_path()), settings=EngineSettings(n_ctx=512, n_parallel=4))],
    log=LOG,
)
schema = schemathesis.openapi.from_asgi("/openapi.json", APP, headers={"host": "localhost"})
OPERATIONS = [(method, path) for path, operations in APP.openapi()["paths"].items() for method in operations]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


def bounded(body: Any) -> Any:
    """A body for the demo model, with short answers."""
    if isinstance(body, dict):
        if "model" in body:
            body["model"] = "demo"
        for name, limit in (("max_tokens", 4), ("max_completion_tokens", 4), ("max_output_tokens", 4), ("n", 2)):
            if isinstance(body.get(name), int) and body[name] > limit:
                body[name] = limit
        if isinstance(body.get("options"), dict) and isinstance(body["options"].get("num_predict"), int):
            body["options"]["num_predict"] = min(body["options"]["num_predict"], 4)
    return body


# Not schema.parametrize: it gives all operations the same node id, and pytest-xdist runs one test of an id.
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_declared(method: str, path: str) -> None:
    operation = schema[path][method]
    allowed, others = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)
    limits = hypothesis.settings(
        max_examples=20,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @limits
    @hypothesis.given(allowed | others)
    def ask(case: schemathesis.Case) -> None:
        case.body = bounded(case.body)
        case.call_and_validate(headers={"host": "localhost"}, checks=CHECKS)

    ask()


@pytest.fixture(scope="module", autouse=True)
def no_failure() -> Any:
    yield
    assert '"event": "failure"' not in LOG.getvalue()
