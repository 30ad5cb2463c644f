"""The suite for the native engine's reference tier in NumPy, with which the other tiers are compared."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "native"
    required = True
    above_contract = "elsewhere"  # in test_native.py
    volume = 0.1
    load_options = {"tier": "reference"}  # noqa: RUF012
    models = ("llama-f32", "qwen3-q8_0")
    precision = {"f32": "float32", "q8_0": "float32"}  # noqa: RUF012
    kv_types = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0", "f8_e4m3")
