"""The suite on llama.cpp, in float32."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "llamacpp"
    required = True
    n_threads = 1
    models = ("llama-f32",)
    kv_types = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
    declares = ("cut", "adapters", "bidirectional_blocks", "embedding_input", "embeddings", "kv_payload", "shared_fork")
