"""Sequences that move from the torch tier: to another tier by payload, to another backend by replay."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.test_across_backends import SIZES, feed, load
from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.tolerance import relative_errors
from slm_core.protocols import Context
from slm_core.types import ContextOptions, KvType, ModelOptions, Pos
from slm_native.backend import NativeBackend

pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")


def load_tier(tier, path):
    return NativeBackend().load(path, ModelOptions(device="cpu", backend_options={"tier": tier}))


@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.F16, KvType.Q8_0])
@pytest.mark.parametrize(("here", "there"), [("torch", "reference"), ("reference", "torch")])
def test_tiers_restore_each_others_dumps(tmp_path, here, there, kv_type):
    """A restored sequence is dumped to the same bytes, so nothing was recomputed."""
    path = make_tiny_model("qwen3", "q8_0").write(tmp_path / "tiny.gguf")
    sizes = ContextOptions(128, 1, 64, kv_type, kv_type)
    tokens = np.random.default_rng(4).integers(0, 305, 90).tolist()
    with load_tier(here, path) as first, load_tier(there, path) as second:
        source, target = first.new_context(sizes), second.new_context(sizes)
        feed(source, tokens[:60])
        source.cut(Pos(0, 4), Pos(0, 11))
        dump = source.dump(0)
        target.restore(0, dump)
        assert target.dump(0) == dump
        # Float32 rounding, and one step of a type with fewer bits if the rounding changes its value.
        bound = {KvType.F32: 1e-5, KvType.F16: 1e-3, KvType.Q8_0: 1e-2}[kv_type]
        assert relative_errors(feed(target, tokens[60:]), feed(source, tokens[60:])).max() < bound


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_from_torch_to_numpy_to_llamacpp_to_onnx(tmp_path, architecture):
    tiny = make_tiny_model(architecture, "f32")
    path, reference = tiny.write(tmp_path / "tiny.gguf"), Reference(Weights.of(tiny))
    tokens = np.random.default_rng(5).integers(0, 305, 60).tolist()
    stops = [load_tier("torch", path), load_tier("reference", path), load("llamacpp", path), load("onnx", path)]
    dump = None
    for i, model in enumerate(stops):
        with model, model.new_context(SIZES) as context:
            dump = travel(context, dump, tokens[15 * i : 15 * i + 15], reference)


def travel(context: Context, dump: bytes | None, tokens: list[int], reference: Reference) -> bytes:
    """Restore a dump, decode, cut and dump again; the logits equal those of the float64 reference."""
    if dump is not None:
        context.restore(0, dump)
    errors = relative_errors(feed(context, tokens), reference.decode(tokens))
    assert errors.max() < 1e-4, f"logits differ by up to {errors.max():.1e} (bound: 1e-4 for float32)"
    context.cut(Pos(0, 3), Pos(0, 8))
    reference.cut(3, 8)
    return context.dump(0)
