"""The suite for the native engine's torch tier on the CPU."""

import pytest

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """One thread: torch's threads spin while they wait, which slows all other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Fixtures(BackendFixtures):
    backend = "native"
    device = "cpu"
    required = True
    above_contract = "elsewhere"  # in test_native.py
    volume = 0.1
    load_options = {"tier": "torch"}  # noqa: RUF012
    models = ("qwen3-q8_0",)
    precision = {"f32": "float32", "q8_0": "float32"}  # noqa: RUF012
    kv_types = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0", "f8_e4m3")
