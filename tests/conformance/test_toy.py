"""The suite for the toy backend, which is the reference of the contract."""

from slm_conformance.fixtures import DEFAULT_MODELS, BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "slm_conformance.toy:ToyBackend"
    models = DEFAULT_MODELS
    precision = {"f32": "float32", "f16": "float32", "q8_0": "float32"}  # noqa: RUF012
    kv_types = ("f32",)
