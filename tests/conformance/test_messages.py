"""What the suite says about backends that are broken in ways that beginners meet."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.suite import spec
from slm_conformance.suite.meta import Verdict, play
from slm_conformance.suite.workshop import Workshop
from slm_conformance.toy.backend import ToyBackend
from slm_conformance.toy.context import ToyContext
from slm_core.hookspecs import Entry, hookimpl
from slm_core.plugins import Registry
from slm_core.types import ModelOptions, ModelSource


class Fixtures(BackendFixtures):
    backend = "slm_conformance.toy.backend:ToyBackend"
    models = ("shallow_llama-f32",)
    kv_types = ("f32",)


@pytest.mark.parametrize(
    ("call", "scenario", "what"),
    [
        ("decode", "TestDecode::test_a_prompt_in_one_batch", "logits are a list"),
        ("embed", "TestEmbeddings::test_as_declared", "hidden states are a list"),
        ("layer_states", "TestLayerStates::test_as_declared", "states of layers are a list"),
    ],
)
def test_rows_that_are_no_arrays(monkeypatch: pytest.MonkeyPatch, call: str, scenario: str, what: str) -> None:
    whole = getattr(ToyContext, call)
    monkeypatch.setattr(ToyContext, call, lambda *args: whole(*args).tolist())
    outcome = play(Fixtures(), scenario)
    assert (outcome.verdict, outcome.reason.splitlines()[0]) == (Verdict.FAILS, f"{what}, not an array of NumPy")


def test_an_engine_that_cannot_load_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(backend: ToyBackend, source: ModelSource, options: ModelOptions) -> None:
        raise KeyError("blk.2.nextn")

    monkeypatch.setattr(ToyBackend, "load", load)
    with pytest.raises(KeyError, match="nextn") as raised:
        Workshop(Fixtures(), tmp_path).model("shallow_llama-f32")
    assert "load() of toy raised no error of slm_core.errors" in "".join(raised.value.__notes__)


def test_a_backend_that_is_registered_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = types.ModuleType("plugin")
    plugin.slm_backends = hookimpl(specname="slm_backends")(lambda: [Entry("tiny", ToyBackend)])
    known = Registry({"plugin": plugin})
    monkeypatch.setattr(spec, "registry", lambda: known)
    monkeypatch.setattr(Fixtures, "backend", "tiny")
    outcome = play(Fixtures(), "TestBackend::test_status")
    assert outcome.reason.splitlines()[0] == "the backend is registered as 'tiny', and calls itself 'toy'"
