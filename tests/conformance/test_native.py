"""The suite, adopted for the native engine: its reference tier computes in float32 whatever the weights."""

from slm_conformance.fixtures import DEFAULT_MODELS, BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "native"
    required = True
    models = (*DEFAULT_MODELS, "demo")
    precision = {"f32": "float32", "f16": "float32", "q8_0": "float32"}  # noqa: RUF012
    kv_types = ("f32", "f16", "q8_0")
