"""The suite on a backend without capabilities, so that sessions replay."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "slm_conformance.toy:PlainToyBackend"
    load_options = {"edit_level": "replay"}  # noqa: RUF012
    models = ("llama-f32",)
    kv_types = ("f32",)
