"""The suite for ONNX Runtime on WebGPU: on a GPU, or on Vulkan in software, which takes 10 ms per layer and decode.

In software the model has one layer; models of several layers are in ``tests/onnx/test_webgpu.py``.
"""

import vulkan
from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403

vulkan.require()

LEAK = "onnxruntime-ep-webgpu 0.4 keeps the weights of closed sessions as long as any session of the process is open"


class Fixtures(BackendFixtures):
    backend = "onnx"
    models = ("shallow_llama-f32",) if vulkan.is_software() else ("small_llama-f32",)
    device = "webgpu"
    n_threads = 1
    above_contract = "elsewhere" if vulkan.is_software() else "in turn"  # otherwise in test_onnx.py
    volume = 0.05 if vulkan.is_software() else 1.0
    precision = {"f32": "float32", "f16": "float32", "q8_0": "float32"}  # noqa: RUF012
    kv_types = ("f32",)
    # The scenario does not measure the memory of a GPU, so it passes there.
    expected_failures = {"TestClose::test_memory_stays_flat": LEAK} if vulkan.is_software() else {}
