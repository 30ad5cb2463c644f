"""The suite on the native engine, for a model with a recurrent layer and so without cuts."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "native"
    required = True
    n_threads = 1
    models = ("small_lfm2-f32",)
    precision = {"f32": "float32"}  # noqa: RUF012
    kv_types = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0")
    declares = ("truncate", "adapters", "embedding_input", "embeddings", "kv_payload", "layer_states", "shared_fork")
