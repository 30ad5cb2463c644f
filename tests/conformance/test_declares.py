"""An adopter names what its backend declares, so that no capability gets lost in silence."""

from __future__ import annotations

import pytest

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.suite.meta import Verdict, play


class Fixtures(BackendFixtures):
    backend = "slm_conformance.toy:PlainToyBackend"
    models = ("llama-f32",)
    kv_types = ("f32",)


@pytest.mark.parametrize(
    ("declares", "reason"),
    [
        (
            ("replay", "embeddings"),
            "not declared any more: ['embeddings', 'replay']; declared, but not expected: ['cut']",
        ),
        (("cut", "embeddings"), "not declared any more: ['embeddings']; declared, but not expected: []"),
        ((), ""),
        (("cut",), ""),
    ],
)
def test_contexts_declare_what_the_adopter_names(monkeypatch, declares, reason) -> None:
    monkeypatch.setattr(Fixtures, "declares", declares)
    outcome = play(Fixtures(), "TestDeclarations::test_are_of_the_contract")
    assert outcome.verdict is (Verdict.FAILS if reason else Verdict.HOLDS)
    assert reason in outcome.reason
