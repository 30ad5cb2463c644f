"""The suite, adopted for the native engine as it chooses for itself: where the extension is built, quantized weights
are multiplied by activations rounded to eight bits."""

from slm_conformance.fixtures import DEFAULT_MODELS, BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "native"
    required = True
    models = (*DEFAULT_MODELS, "demo")
    above_contract = "each model"
    precision = {"f32": "float32", "f16": "float32", "q8_0": "quantized"}  # noqa: RUF012
    kv_types = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
