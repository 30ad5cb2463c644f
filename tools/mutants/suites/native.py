"""The suite on the native engine's C++ tier, in float32."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "native"
    required = True
    n_threads = 1  # a forked process has no other threads
    models = ("llama-f32",)
    precision = {"f32": "float32"}  # noqa: RUF012
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
