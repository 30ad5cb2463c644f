"""The suite for the native engine with its default tier. With the C++ extension, activations are quantized to 8 bits
for products with quantized weights."""

from slm_conformance.fixtures import DEFAULT_MODELS, BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "native"
    required = True
    models = (*DEFAULT_MODELS, "demo")
    above_contract = "each model"
    precision = {"f32": "float32", "f16": "float32", "q8_0": "quantized"}  # noqa: RUF012
    kv_types = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0")
    declares = (
        "cut",
        "adapters",
        "attention_bias",
        "bidirectional_blocks",
        "embedding_input",
        "embeddings",
        "kv_payload",
        "layer_states",
        "shared_fork",
    )
