"""Sequences that move between installed backends, and a trained model on each of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.spec import make_backend
from slm_conformance.suite.tolerance import Precision, Tolerance, relative_errors
from slm_core.loading import demo_model_path
from slm_core.protocols import BackendModel, Context
from slm_core.types import ContextOptions, KvType, ModelOptions, Pos

BACKENDS = ("native", "llamacpp", "onnx")
DIRECTORY = "onnx_directories:DirectoryBackend"  # the directory has the token ids of its source file
N_THREADS = {"native": None, "llamacpp": 1, "onnx": 1, DIRECTORY: 1}
PAIRS = [*itertools.product(BACKENDS, repeat=2), *((DIRECTORY, name) for name in BACKENDS)]
PAIRS += [(name, DIRECTORY) for name in (*BACKENDS, DIRECTORY)]
SIZES = ContextOptions(128, 2, 64, KvType.F32, KvType.F32)


def load(name: str, path: Path) -> BackendModel:
    backend = make_backend(name)
    status = backend.status()
    if not status.installed:
        pytest.skip(f"backend {name} is not installed: {status.reason}")
    return backend.load(path, ModelOptions(n_threads=N_THREADS[name]))


def feed(context: Context, tokens: list[int]) -> np.ndarray:
    batch = context.new_batch()
    batch.extend(tokens, Pos(0, context.length(0)), logits="all")
    return context.decode(batch).copy()


@pytest.mark.parametrize(("here", "there"), PAIRS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_an_edited_sequence_moves_to_another_backend(tmp_path, architecture, here, there):
    tiny = make_tiny_model(architecture, "f32")
    path, reference = tiny.write(tmp_path / "tiny.gguf"), Reference(Weights.of(tiny))
    tokens = np.random.default_rng(4).integers(0, 305, 50).tolist()
    with load(here, path) as first, load(there, path) as second:
        assert first.info.fingerprint == second.info.fingerprint
        source, target = first.new_context(SIZES), second.new_context(SIZES)
        feed(source, tokens[:30])
        source.cut(Pos(0, 4), Pos(0, 11))
        feed(source, tokens[30:40])
        target.restore(0, source.dump(0))
        logits = feed(target, tokens[40:])
    reference.decode(tokens[:30])
    reference.cut(4, 11)
    reference.decode(tokens[30:40])
    errors = relative_errors(logits, reference.decode(tokens[40:]))
    assert errors.max() < 1e-4, f"logits after the move differ by up to {errors.max():.1e} (bound: 1e-4 for float32)"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_trained_model_has_the_logits_of_the_reference(name):
    """The suite runs on the demo model with the native engine; other engines run it on random models of its kind."""
    weights, tokens = Weights.read(demo_model_path()), np.random.default_rng(5).integers(0, 2000, 60).tolist()
    with load(name, demo_model_path()) as model, model.new_context(SIZES) as context:
        errors = relative_errors(feed(context, tokens), Reference(weights).decode(tokens))
    bound = Tolerance(weights, Precision.QUANTIZED, KvType.F32).row
    assert errors.max() < bound, f"logits differ by up to {errors.max():.1e} (bound: {bound:.1e})"
