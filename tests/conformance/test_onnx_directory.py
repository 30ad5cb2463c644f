"""The suite for directories in onnxruntime-genai's layout, written by `slm convert`."""

from importlib.util import find_spec

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    backend = "onnx_directories:DirectoryBackend"
    required = find_spec("onnxruntime") is not None
    models = ("qwen3-q8_0",)
    device = "cpu"
    above_contract = "elsewhere"  # in test_onnx.py
    volume = 0.1
    n_threads = 1
    precision = {"f32": "float32", "f16": "float32", "q8_0": "quantized"}  # noqa: RUF012
    kv_types = ("f32",)
    expected_failures = {"TestBackend::test_info": "info.path is the directory, not the file it was made from"}  # noqa: RUF012
    declares = ("cut", "kv_payload")
