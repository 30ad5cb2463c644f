"""The choice of a device, the status of each, and the options of its sessions. No GPU is needed."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from pathlib import Path

import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import BackendUnavailable
from slm_onnx import devices, providers, runtime, selfcheck
from slm_onnx.backend import OnnxBackend
from slm_onnx.options import LoadOptions
from slm_onnx.providers import PROVIDERS

pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")

THREADS = runtime.Threads(2, spinning=False)


@pytest.fixture
def build_with(monkeypatch):
    """Fakes a build of ONNX Runtime with these devices and the CPU; devices in ``failing`` fail the self-check."""

    def make(*labels: str, failing: tuple[str, ...] = (), tried: tuple[str, ...] = ()) -> list[str]:
        checked: list[str] = []

        def require(device: providers.Device, options: LoadOptions, *, of_directory: bool) -> None:
            checked.append(device.label)
            if device.label.partition(":")[0] in failing:
                raise BackendUnavailable(f"device {device.label!r} gives wrong numbers")

        names = tuple(PROVIDERS[label].name for label in (*labels, "cpu"))
        table = {
            label: dataclasses.replace(PROVIDERS[label], untried=label not in (*tried, "cpu")) for label in PROVIDERS
        }
        monkeypatch.setattr(providers, "installed", lambda: names)
        monkeypatch.setattr(providers, "PROVIDERS", table)
        monkeypatch.setattr(devices, "PROVIDERS", table)
        monkeypatch.setattr(selfcheck, "require", require)
        return checked

    return make


def test_auto_is_the_cpu_if_other_devices_are_untried(build_with) -> None:
    checked = build_with("cuda", "openvino")
    assert devices.choose("auto").label == "cpu"
    assert checked == []
    auto = devices.report().auto
    assert auto == "device auto: cpu; cuda is untried: ask for it by name; openvino is untried: ask for it by name"


def test_auto_selects_the_best_device_that_passes(build_with, caplog) -> None:
    """The build has CUDA's provider, but there is no GPU: the session falls back, so the self-check fails."""
    build_with("cuda", "directml", failing=("cuda",), tried=("cuda", "directml"))
    with caplog.at_level(logging.WARNING):
        assert devices.choose("auto").label == "directml"
    assert "cuda: device 'cuda:0' gives wrong numbers" in caplog.text
    assert devices.report().auto == "device auto: directml; cuda cannot be used"


def test_auto_without_a_gpu_is_the_cpu(build_with, tmp_path, load) -> None:
    build_with("cuda", failing=("cuda",), tried=("cuda",))
    path = make_tiny_model("llama", "f32").write(tmp_path / "m.gguf")
    assert load(path, "auto").info.device == "cpu"


def test_a_device_requested_by_name_is_checked_or_refused(build_with, tmp_path) -> None:
    checked = build_with("cuda", "webgpu", failing=("cuda",))
    assert devices.choose("webgpu").label == "webgpu"
    with pytest.raises(BackendUnavailable, match="wrong numbers"):
        devices.choose("cuda:1")
    assert checked == ["webgpu", "cuda:1"]
    path = make_tiny_model("llama", "f32").write(tmp_path / "m.gguf")
    support = OnnxBackend().supports(path, "cuda")
    assert (support.supported, "wrong numbers" in support.reason) == (False, True)


def test_the_status_marks_untried_devices_and_reports_errors(build_with) -> None:
    build_with("cuda", "openvino", "webgpu", failing=("cuda",), tried=("webgpu",))
    status = OnnxBackend().status()
    states = {device.name: (device.available, device.untried) for device in status.devices}
    assert (states["webgpu"], states["openvino"], states["cuda"]) == ((True, False), (True, True), (False, True))
    assert [device.name for device in status.devices[:3]] == ["webgpu", "cpu", "openvino"]
    assert {device.name: device.detail for device in status.devices}["cuda"] == "device 'cuda:0' gives wrong numbers"


def test_the_cpu_needs_no_check(build_with) -> None:
    checked = build_with()
    assert devices.choose("cpu").is_cpu
    assert checked == []


def test_the_page_says_which_devices_are_proven() -> None:
    """The page says where and when the suite passed on each device."""
    page = (Path(__file__).parents[2] / "docs" / "backends" / "onnx.md").read_text()
    for label, provider in PROVIDERS.items():
        (state,) = re.findall(rf"^\| `{label}` \| (proven|untried|refused) \|", page, re.MULTILINE)
        assert (state == "proven") == (not provider.untried), f"{label} is {state} in docs/backends/onnx.md"


def config_of(place: runtime.Place, *keys: str) -> list[str]:
    options = runtime._options(place)
    return [options.get_session_config_entry(key) for key in keys]


def test_cuda_multiplies_codes_with_float16() -> None:
    """The fpA_intB option: ONNX Runtime uses it for blocks of 32 and more, and ignores it for others."""
    device = providers.Device("cuda:1", PROVIDERS["cuda"], 1, "")
    place = device.session_place({"enable_cuda_graph": "1"}, THREADS)
    assert config_of(place, "ep.cuda.fpa_intb_gemm", "session.intra_op.allow_spinning") == ["1", "0"]
    assert place.providers == [
        ("CUDAExecutionProvider", {"device_id": "1", "enable_cuda_graph": "1"}),
        ("CPUExecutionProvider", {}),
    ]


@pytest.mark.parametrize("label", sorted(PROVIDERS))
def test_no_plan_of_memory_is_kept_for_each_shape(label) -> None:
    """Every batch of one more token has another shape; a session of a server would grow for ever."""
    place = providers.Device(label, PROVIDERS[label], 0, "").session_place({}, THREADS)
    assert not runtime._options(place).enable_mem_pattern


@pytest.mark.parametrize("label", sorted(set(PROVIDERS) - {"cuda"}))
def test_other_devices_get_no_cuda_options(label) -> None:
    place = providers.Device(label, PROVIDERS[label], 0, "").session_place({}, THREADS)
    with pytest.raises(RuntimeError, match="fpa_intb_gemm"):
        config_of(place, "ep.cuda.fpa_intb_gemm")


@pytest.mark.parametrize("label", sorted(PROVIDERS))
def test_cuda_libraries_are_loaded_before_the_first_session_on_cuda(label, monkeypatch, caplog, capsys) -> None:
    module, calls = runtime.load(), []

    def preload() -> None:
        sys.stdout.write("Failed to load libcublasLt.so.12")
        calls.append("preload")

    def open_session(*_: object, **__: object) -> None:
        calls.append("session")
        raise RuntimeError("enough")

    monkeypatch.setattr(module, "preload_dlls", preload)
    monkeypatch.setattr(module, "InferenceSession", open_session)
    runtime._preload_cuda.cache_clear()
    place = providers.Device(label, PROVIDERS[label], 0, "").session_place({}, THREADS)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with pytest.raises(Exception, match="enough"):
                runtime.session(b"", {}, place)
    runtime._preload_cuda.cache_clear()
    needs = label in ("cuda", "tensorrt")
    assert calls == (["preload"] * needs + ["session", "session"])
    assert ("libcublasLt" in caplog.text) == needs
    assert capsys.readouterr().out == ""
