"""The conformance suite, adopted: every clause of the contract, on this backend."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "mine"
    required = True
    models = ("qwen3-f16", "qwen3-q8_0")
    precision = {"f16": "float32", "q8_0": "float32"}  # noqa: RUF012
    kv_types = ("f32",)
