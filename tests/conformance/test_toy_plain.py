"""The suite for a toy that declares no edits, no shared forks and no payloads. Sessions still work."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "slm_conformance.toy:PlainToyBackend"
    load_options = {"edit_level": "replay"}  # noqa: RUF012
    models = ("llama-f32",)
    volume = 0.25
    kv_types = ("f32",)
