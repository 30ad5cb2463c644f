"""The suite on ONNX Runtime, in float32."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "onnx"
    required = True
    device = "cpu"
    n_threads = 1
    models = ("llama-f32",)
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
