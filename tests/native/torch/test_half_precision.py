"""Products in 16 bits: within the bound of the contract, and only for weights of at most 16 bits."""

from __future__ import annotations

import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.types import ContextOptions, KvType, ModelOptions
from slm_native.backend import NativeBackend


@pytest.mark.parametrize(
    ("weights", "kv_type", "dtype", "bound"),
    [
        ("q8_0", KvType.F32, "float16", 1e-2),
        ("f16", KvType.F16, "float16", 1e-2),
        ("f32", KvType.F32, "float16", 1e-4),  # float32 weights are not rounded: the bound of float32
        ("q8_0", KvType.F32, "bfloat16", 1e-1),  # three bits less precision than float16: eight times its error
    ],
)
def test_logits_stay_within_the_bound(tmp_path, feed, random_tokens, assert_close, weights, kv_type, dtype, bound):
    path, tokens = make_tiny_model("qwen3", weights).write(tmp_path / "tiny.gguf"), random_tokens(60)
    rows = []
    for options in ({"tier": "torch", "dtype": dtype}, {"tier": "reference"}):
        with NativeBackend().load(path, ModelOptions(device="cpu", backend_options=options)) as model:
            context = model.new_context(ContextOptions(128, 1, 64, kv_type, kv_type))
            rows.append(feed(context, tokens[:50]))
            rows.append(feed(context, tokens[50:], chunk=1))
    error = max(assert_close(rows[0], rows[2], bound), assert_close(rows[1], rows[3], bound))
    assert (error < 1e-4) == (weights == "f32"), f"an error of {error:.1e} does not fit the format of the weights"
