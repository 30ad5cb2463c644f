"""The suite for a toy that can truncate, but not cut."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "slm_conformance.toy:ToyBackend"
    load_options = {"edit_level": "truncate"}  # noqa: RUF012
    models = ("llama-f32",)
    volume = 0.25
    kv_types = ("f32",)
