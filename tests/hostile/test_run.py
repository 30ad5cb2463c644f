"""A few hundred hostile inputs of each kind; ``python -m tests.hostile`` runs more."""

from __future__ import annotations

import importlib.util

import pytest

from tests.hostile.pool import run, targets

CASES = {
    ("files", "native"): 300,
    ("files", "llamacpp"): 300,
    ("files", "onnx"): 120,
    ("dumps", "native"): 300,
    ("dumps", "llamacpp"): 250,
    ("dumps", "onnx"): 200,
    ("states", "native"): 300,
    ("states", "llamacpp"): 100,
    ("folders", "native"): 200,
    ("folders", "onnx"): 60,
    ("constraints", "core"): 800,
    ("templates", "core"): 800,
}
"""As many as a minute of two cores has room for. They are the same in every run."""
_ENGINES = {"llamacpp": "llama_cpp", "onnx": "onnxruntime"}


@pytest.mark.parametrize(("kind", "backend"), sorted(targets()))
def test_hostile_inputs_are_refused_or_harmless(kind: str, backend: str) -> None:
    engine = _ENGINES.get(backend)
    if engine is not None and importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed: pip install 'slm-core[{backend}]'")
    found = run(kind, backend, seconds=200, most=CASES[kind, backend])
    told = "\n".join(f"case {seed}: {verdict}: {message}" for seed, verdict, message in found.bad)
    assert not found.bad, f"of {found.counts.total()} inputs, {len(found.bad)} were not refused as they should:\n{told}"
    assert found.counts["refused"] > found.counts.total() // 20, "hardly any was refused: are they broken at all?"
    assert found.counts["accepted"] > 0, "none was accepted: nothing beyond the first check was reached"


def test_every_kind_is_run() -> None:
    assert set(CASES) == set(targets())
