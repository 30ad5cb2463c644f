"""Loading: options, devices, installation, stderr, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import slm_core
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import BackendUnavailable, InvalidOption, UnknownOption, UnsupportedModel
from slm_core.types import ContextOptions, KvType, ModelOptions
from slm_onnx import providers, runtime, selfcheck
from slm_onnx.backend import OnnxBackend
from slm_onnx.options import DESCRIPTIONS

GPUS = ["cuda", "cuda:1", "tensorrt", "rocm", "directml", "coreml", "openvino", "webgpu"]


@pytest.fixture
def tiny(tmp_path):
    return make_tiny_model("llama", "f32").write(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"accuracy": 4}, UnknownOption),
        ({"accuracy_level": 1}, InvalidOption),
        ({"accuracy_level": True}, InvalidOption),
        ({"spinning": 1}, InvalidOption),
        ({"cache": "yes"}, InvalidOption),
        ({"buckets": 1}, InvalidOption),
        ({"provider_options": {"a": 1}}, InvalidOption),
        ({"provider_options": "a"}, InvalidOption),
    ],
)
def test_options_are_checked(tiny, options, error) -> None:
    with pytest.raises(error, match="accepted: "):
        OnnxBackend().load(tiny, ModelOptions("cpu", backend_options=options))


def test_every_option_is_described_and_accepted(tiny, load) -> None:
    load(tiny, accuracy_level=0, spinning=True, cache=False, buckets=True, provider_options={})
    assert set(DESCRIPTIONS) == {"accuracy_level", "spinning", "cache", "buckets", "provider_options"}


@pytest.mark.parametrize("n_threads", [0, -1, 513, 1.5, True])
def test_threads_are_checked(tiny, n_threads) -> None:
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    with pytest.raises(InvalidOption, match="1 to 512"):
        OnnxBackend().load(tiny, ModelOptions("cpu", n_threads))


@pytest.mark.parametrize("device", GPUS)
def test_the_error_for_a_missing_device_names_the_package(tiny, load, monkeypatch, device) -> None:
    monkeypatch.setattr(providers, "installed", lambda: ("CPUExecutionProvider",))
    with pytest.raises(BackendUnavailable, match=r"needs \w+ExecutionProvider: .*onnxruntime-?"):
        load(tiny, device)
    support = OnnxBackend().supports(tiny, device)
    assert (support.supported, "ExecutionProvider" in support.reason) == (False, True)


@pytest.mark.parametrize("device", ["gpu", "CUDA", "cuda:", "cuda:x", "cpu:1", ""])
def test_an_unknown_device_is_an_error(tiny, load, device) -> None:
    with pytest.raises(BackendUnavailable, match="accepted: "):
        load(tiny, device)


def test_a_session_that_falls_back_is_an_error(tiny, load, monkeypatch) -> None:
    """A build that lists a provider, but whose sessions run on the CPU."""
    monkeypatch.setattr(providers, "installed", lambda: ("OpenVINOExecutionProvider", "CPUExecutionProvider"))
    monkeypatch.setattr(selfcheck, "require", lambda *_, **__: None)
    with pytest.warns(UserWarning, match="OpenVINO"), pytest.raises(BackendUnavailable, match="fell back to CPU"):
        load(tiny, "openvino")


def test_unsupported_kv_types_are_refused(tiny, load) -> None:
    with pytest.raises(InvalidOption, match="accepted: f32, q8_0"):
        load(tiny).new_context(ContextOptions(kv_type_v=KvType.F16))
    with pytest.raises(InvalidOption, match="one type for both"):
        load(tiny).new_context(ContextOptions(kv_type_v=KvType.Q8_0))


def test_without_the_engine_the_error_says_how_to_install_it(tiny, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "missing", lambda: "onnxruntime not installed (to get it: pip install x)")
    providers.installed.cache_clear()
    status = OnnxBackend().status()
    assert (status.installed, "not installed" in status.reason, bool(status.hint)) == (False, True, True)
    assert not OnnxBackend().supports(tiny).supported
    with pytest.raises(BackendUnavailable, match="to get it"):
        OnnxBackend().load(tiny, ModelOptions())


def test_an_unknown_architecture_is_refused_by_name(tmp_path, load) -> None:
    tiny = make_tiny_model("llama", "f32")
    path = type(tiny)(tiny.shape, tiny.tensors, {**tiny.metadata, "general.architecture": "mamba"}).write(
        tmp_path / "m.gguf"
    )
    assert "mamba" in OnnxBackend().supports(path).reason
    with pytest.raises(UnsupportedModel, match="mamba"):
        load(path)


def test_nothing_is_written_to_stderr() -> None:
    code = (
        "import slm_core as slm; m = slm.load(slm.demo_model_path(), backend='onnx', n_threads=1);"
        "print(m.chat(n_ctx=256, sampling=slm.Sampling(temperature=0)).send('Hello!').text)"
    )
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    expected = slm_core.load(slm_core.demo_model_path(), backend="native")
    greedy = slm_core.Sampling(temperature=0)
    assert process.stdout == expected.chat(n_ctx=256, sampling=greedy).send("Hello!").text + "\n"


def test_progress_rises_from_0_to_1(tiny) -> None:
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    shares: list[float] = []
    OnnxBackend().load(tiny, ModelOptions("cpu", 1, shares.append)).close()
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(set(shares)) > 3


def test_repeated_cuts_and_compactions_keep_the_logits(tiny, load, feed, random_tokens) -> None:
    """Cells fill up, are freed in the middle and fill up again; the oracle is a context with cells to spare."""
    roomy, tight = (load(tiny).new_context(ContextOptions(n_ctx=n, n_seq_max=2)) for n in (4000, 96))
    rng = np.random.default_rng(3)
    with roomy, tight:
        for _ in range(40):
            tokens = random_tokens(int(rng.integers(5, 30)), 256, int(rng.integers(1000)))
            for context in (roomy, tight):
                if context.length(0) > 60:
                    context.cut(slm_core.Pos(0, 5), slm_core.Pos(0, 45))
            rows = [feed(context, tokens) for context in (roomy, tight)]
            assert np.abs(rows[0] - rows[1]).max() < 1e-4 * np.abs(rows[0]).max()


def test_supports_imports_no_engine(tiny) -> None:
    code = (
        "import sys, pathlib; from slm_onnx.backend import OnnxBackend;"
        f"assert OnnxBackend().supports(pathlib.Path({str(tiny)!r})).supported;"
        "print(sorted({'onnx', 'onnxruntime'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not report resident memory")
def test_a_cache_takes_memory_on_write(tmp_path) -> None:
    """One token writes a memory page per head, layer and plane; with huge pages this would be 1/8 of the cache."""
    make_tiny_model("llama", "f32").write(tmp_path / "m.gguf")
    code = (
        "import re, pathlib; from slm_core.types import *; from slm_onnx.backend import OnnxBackend;"
        "anonymous = lambda: int(re.search(r'Anonymous: +(\\d+)', open('/proc/self/smaps_rollup').read())[1]);"
        f"model = OnnxBackend().load(pathlib.Path({str(tmp_path / 'm.gguf')!r}), ModelOptions('cpu', 1));"
        "context = model.new_context(ContextOptions(n_ctx=65536)); before = anonymous();"
        "batch = context.new_batch(); batch.extend([5], Pos(0, 0)); context.decode(batch);"
        "cache = sum(tensor.numpy().nbytes for tensor in context._store.tensors.values()) >> 10;"
        "print(anonymous() - before, cache)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    resident, cache = map(int, process.stdout.split())
    assert resident < cache / 32, f"{resident} KiB of {cache} are resident after one token"
