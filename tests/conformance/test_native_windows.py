"""The suite for the native engine with layers that keep only their sliding window."""

from __future__ import annotations

import tempfile
from pathlib import Path

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.oracle.families import family_model
from slm_conformance.scenarios import *  # noqa: F403


def _model() -> str:
    """A file at the same path in every process of a run, because names of models are in the names of tests.

    Four of its five layers have a sliding window of 48 tokens.
    """
    path = Path(tempfile.gettempdir()) / "slm-windows" / "olmo3-f32-0.gguf"
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        family_model(Path(folder), "olmo3").replace(path)
    return str(path)


class Fixtures(BackendFixtures):
    backend = "native"
    required = True
    above_contract = "elsewhere"  # in test_native.py
    volume = 0.1
    load_options = {"tier": "reference", "swa_full": False}  # noqa: RUF012
    models = (_model(),)
    precision = {"f32": "float32"}  # noqa: RUF012
    kv_types = ("f32", "f16", "bf16", "f8_e4m3")  # heads are 16 wide
    declares = ("truncate", "adapters", "embedding_input", "embeddings", "kv_payload", "layer_states", "shared_fork")
