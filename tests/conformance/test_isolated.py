"""The suite for the toy in a process of its own: the parent's side of an isolated model keeps the contract, too."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "slm_conformance.toy:ToyBackend"
    models = ("llama-f32",)
    precision = {"f32": "float32", "f16": "float32", "q8_0": "float32"}  # noqa: RUF012
    kv_types = ("f32",)
    isolated = True
    above_contract = "elsewhere"
    slow = False
    volume = 0.1
