"""The suite for ONNX Runtime on the CPU, which multiplies Q8_0 weights with activations quantized to 8 bits."""

from importlib.util import find_spec

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "onnx"
    required = find_spec("onnxruntime") is not None
    device = "cpu"
    precision = {"f32": "float32", "f16": "float32", "q8_0": "quantized"}  # noqa: RUF012
    kv_types = ("f32", "q8_0")
    declares = (
        "cut",
        "adapters",
        "attention_bias",
        "bidirectional_blocks",
        "embedding_input",
        "embeddings",
        "kv_payload",
        "shared_fork",
    )
