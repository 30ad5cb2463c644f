"""The suite for llama.cpp, which multiplies Q8_0 weights with activations quantized to Q8_0."""

from importlib.util import find_spec

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "llamacpp"
    required = find_spec("llama_cpp") is not None
    kv_types = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
    declares = ("cut", "adapters", "bidirectional_blocks", "embedding_input", "embeddings", "kv_payload", "shared_fork")
