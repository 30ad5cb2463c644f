"""A device whose results differ from the CPU's is refused; a device that passed is not checked again."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_core import subprocess_probe
from slm_core.diskcache import entries
from slm_core.errors import BackendUnavailable, InvalidOption
from slm_onnx import build, providers, runtime, selfcheck
from slm_onnx.options import LoadOptions

pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")

EXACT = LoadOptions(accuracy_level=0, cache=False)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def device() -> providers.Device:
    """A device other than the reference: ONNX Runtime's CPU provider with another name."""
    return dataclasses.replace(providers.find("cpu"), label="other")


@pytest.fixture
def calls(monkeypatch) -> list[list[str]]:
    """The arguments of subprocess probes from now on; their faked results pass the check."""
    recorded: list[list[str]] = []

    def run(engine: str, code: str, *arguments: str, patience_s: float) -> str:
        recorded.append([engine, *arguments])
        return json.dumps({"errors": {"a prompt": 0.0, "a cut": 0.01}})

    monkeypatch.setattr(subprocess_probe, "run", run)
    return recorded


def errors_of(
    device: providers.Device, options: LoadOptions = EXACT, *, of_directory: bool = False
) -> dict[str, float]:
    from slm_onnx import comparing

    return comparing.errors(device, options, of_directory=of_directory)


@pytest.mark.parametrize("buckets", [False, True])
def test_the_same_provider_gives_the_same_numbers(device, buckets) -> None:
    errors = errors_of(device, dataclasses.replace(EXACT, buckets=buckets))
    assert len(errors) == 6
    assert max(errors.values()) < 1e-5, "float32 sums in another order"


def test_graphs_without_a_bias_are_checked_too(device) -> None:
    """On CUDA, contexts of one sequence use it in any release; contexts of several exist from bias_since on."""
    for since, n_steps in (((1, 0), 5 + 6), ((99, 0), 5)):
        errors = errors_of(dataclasses.replace(device, provider=dataclasses.replace(device.provider, bias_since=since)))
        assert len(errors) == n_steps
        assert max(errors.values()) < 1e-5, errors


def test_wrong_options_are_reported_as_option_errors() -> None:
    """Runs a real subprocess; CUDA graphs need buckets."""
    options = dataclasses.replace(EXACT, provider_options={"enable_cuda_graph": "1"})
    with pytest.raises(InvalidOption, match="use buckets=True"):
        selfcheck.require(providers.find("cpu"), options)


@pytest.mark.parametrize("of_directory", [False, True])
def test_8_bit_activations_pass_with_a_margin(device, of_directory) -> None:
    """Rounding is the largest correct error; a lost cache (below) errs by ten times the tolerance."""
    errors = errors_of(device, LoadOptions(cache=False), of_directory=of_directory)
    assert 1e-3 < max(errors.values()) < selfcheck.TOLERANCE / 2


class LosingBinding:
    """A binding that writes keys and values to memory that is never read."""

    def __init__(self, session: Any) -> None:
        self.binding = session.io_binding()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        if name.startswith("present."):
            self.binding.bind_output(name, "cpu")
        else:
            self.binding.bind_ortvalue_output(name, value)


class LosingSession:
    """A session on a provider that ignores the bound outputs."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def io_binding(self) -> LosingBinding:
        return LosingBinding(self.session)

    def run_with_iobinding(self, binding: LosingBinding, options: Any) -> None:
        self.session.run_with_iobinding(binding.binding, options)


@pytest.mark.parametrize("of_directory", [False, True])
def test_a_lost_cache_is_detected_by_the_second_decode(device, monkeypatch, of_directory) -> None:
    """A former bug of device="webgpu": the first decode is right, but the next one reads another buffer."""
    open_session = runtime._open
    loses = {"test.loses_its_cache": "1"}

    def open_on(model: bytes | str, options: Any, place: runtime.Place) -> Any:
        session = open_session(model, options, place)
        return LosingSession(session) if loses.items() <= place.config.items() else session

    monkeypatch.setattr(runtime, "_open", open_on)
    losing = dataclasses.replace(device, provider=dataclasses.replace(device.provider, config=loses))
    errors = errors_of(losing, of_directory=of_directory)
    if of_directory:  # caches that are returned as outputs are not lost here
        errors = {name.partition(" (")[0]: error for name, error in errors.items() if name.endswith("in place)")}
    assert errors.pop("a prompt") < selfcheck.TOLERANCE / 2
    assert min(errors.values()) > 5 * selfcheck.TOLERANCE, errors


def test_nan_counts_as_an_infinite_error() -> None:
    from slm_onnx import comparing

    row = np.ones(3, np.float32)
    assert comparing._error(row * np.float32("nan"), row) == float("inf")


def test_the_error_for_a_wrong_device_names_the_step_and_the_difference(device, monkeypatch) -> None:
    answer = json.dumps({"errors": {"a prompt": 0.001, "the token after it": 0.735}})
    monkeypatch.setattr(subprocess_probe, "run", lambda *_, **__: f"noise of a driver\n{answer}\n")
    with pytest.raises(
        BackendUnavailable, match=r"'other' .* after the token after it differ .* 74% \(accepted: 5%\)"
    ) as no:
        selfcheck.require(device, EXACT)
    assert "\n" not in str(no.value)
    assert entries() == [], "a failure is not cached: the device may be repaired"


def test_a_device_that_cannot_run_the_graphs_is_refused(device) -> None:
    """Runs a real subprocess, which knows no device of this name."""
    with pytest.raises(BackendUnavailable, match=r"'other' cannot run a tiny model: unknown device"):
        selfcheck.require(device, EXACT)
    assert entries() == []


@pytest.mark.skipif(sys.platform == "win32", reason="exit codes are numbers of signals elsewhere")
def test_a_crashing_provider_ends_only_its_subprocess(device, monkeypatch) -> None:
    monkeypatch.setattr(selfcheck, "_CODE", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(BackendUnavailable, match=r"self-check of device 'other'.*exit code -11"):
        selfcheck.require(device, EXACT)


def test_a_provider_that_hangs_is_refused(device, monkeypatch) -> None:
    monkeypatch.setattr(selfcheck, "_CODE", "import time; time.sleep(60)")
    monkeypatch.setattr(selfcheck, "_PATIENCE_S", 0.2)
    with pytest.raises(BackendUnavailable, match="did not end within"):
        selfcheck.require(device, EXACT)


def test_a_device_that_passed_is_not_checked_again(device, calls) -> None:
    for _ in range(2):
        selfcheck.require(device, EXACT)
    assert len(calls) == 1
    (entry,) = entries()
    assert (entry.kind, "other" in entry.about) == ("onnx-selfcheck", True)


def test_without_a_writable_cache_every_load_checks(device, calls, root) -> None:
    root.write_text("a file where the folder should be")
    for _ in range(2):
        selfcheck.require(device, EXACT)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"accuracy_level": 4},
        {"buckets": True},
        {"provider_options": {"device_type": "GPU"}},
    ],
)
def test_options_that_change_the_graphs_are_checked_separately(device, calls, options) -> None:
    for load_options in (EXACT, dataclasses.replace(EXACT, **options), dataclasses.replace(EXACT, spinning=True)):
        selfcheck.require(device, load_options)
    assert len(calls) == 2, "spinning does not change the results"
    name, options_found, of_directory = json.loads(calls[1][1])
    assert (name, of_directory) == ("other", False)
    assert options.items() <= options_found.items()
    selfcheck.require(device, EXACT, of_directory=True)
    assert json.loads(calls[2][1])[2] is True


@pytest.mark.parametrize("changed", ["build", "driver", "gpu", "check"])
def test_another_build_driver_or_gpu_is_checked_again(device, calls, monkeypatch, tmp_path, changed) -> None:
    driver, bus = tmp_path / "version", tmp_path / "pci"
    gpu = bus / "0000:01:00.0"
    gpu.mkdir(parents=True)
    for name, text in (("class", "0x030200"), ("vendor", "0x10de"), ("device", "0x2330")):
        (gpu / name).write_text(text)
    driver.write_text("NVRM version: 550.1")
    monkeypatch.setattr(selfcheck, "_NVIDIA", driver)
    monkeypatch.setattr(selfcheck, "_PCI", bus)
    selfcheck.require(device, EXACT)
    if changed == "build":
        other = build.Build("onnxruntime-gpu", "1.31.1", tmp_path)
        monkeypatch.setattr(build, "find_build", lambda: other)
    elif changed == "driver":
        driver.write_text("NVRM version: 560.2")
    elif changed == "gpu":
        (gpu / "device").write_text("0x2331")
    else:
        monkeypatch.setattr(selfcheck, "VERSION", selfcheck.VERSION + 1)
    selfcheck.require(device, EXACT)
    assert len(calls) == 2
