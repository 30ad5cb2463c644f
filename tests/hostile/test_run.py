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
    ("conversions", "llamacpp"): 150,
    ("adapters", "native"): 300,
    ("adapters", "llamacpp"): 300,
    ("adapters", "onnx"): 100,
    ("constraints", "core"): 800,
    ("templates", "core"): 800,
}
"""Numbers of cases for about one minute on two cores. The cases are the same in every run."""
_ENGINES = {"llamacpp": "llama_cpp", "onnx": "onnxruntime"}


@pytest.mark.parametrize(("kind", "backend"), sorted(targets()))
def test_hostile_inputs_are_refused_or_harmless(kind: str, backend: str) -> None:
    engine = _ENGINES.get(backend)
    if engine is not None and importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed: pip install 'slm-core[{backend}]'")
    result = run(kind, backend, seconds=200, most=CASES[kind, backend])
    failures = "\n".join(f"case {seed}: {verdict}: {message}" for seed, verdict, message in result.bad)
    assert not result.bad, f"of {result.counts.total()} inputs, {len(result.bad)} were handled wrongly:\n{failures}"
    assert result.counts["refused"] > result.counts.total() // 20, (
        "too few inputs were refused: are they damaged at all?"
    )
    assert result.counts["accepted"] > 0, "no input was accepted: only the first checks were reached"


def test_every_kind_is_run() -> None:
    assert set(CASES) == set(targets())
