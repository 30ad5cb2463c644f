"""The choice of a kernel set, and the reason that is reported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from slm_core.errors import BackendUnavailable, InvalidOption
from slm_native import _extension
from slm_native.kernels.select import ISA_VARIABLE, select_kernels, why_without_triton

SOURCE = Path(__file__).parents[2] / "backends" / "slm_native" / "csrc"


@pytest.fixture(autouse=True)
def no_forced_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)


@pytest.fixture
def no_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extension: CMake wrote a note with the reason."""
    (tmp_path / "slm_test_note.py").write_text('REASON = "no C++ compiler was found at installation"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_extension, "_NAME", "slm_test_extension_that_is_not_there")
    monkeypatch.setattr(_extension, "_NOTE", "slm_test_note")


@pytest.fixture
def broken_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slm_test_broken.py").write_text('raise ImportError("undefined symbol: q8_0")\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_extension, "_NAME", "slm_test_broken")


def test_reference_uses_numpy_only() -> None:
    kernels, reason = select_kernels("reference")
    assert (kernels.name, kernels.device) == ("reference", "cpu")
    assert kernels.describe().startswith("NumPy ")
    assert reason == "the reference tier was asked for"


@pytest.mark.usefixtures("no_extension")
def test_auto_without_the_extension_is_reference_and_reports_why() -> None:
    kernels, reason = select_kernels()
    assert kernels.name == "reference"
    assert reason == "the C++ extension is missing: no C++ compiler was found at installation"


@pytest.mark.usefixtures("no_extension")
def test_a_requested_tier_without_the_extension_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"^tier 'cpu' needs the C\+\+ extension.*: no C\+\+ compiler was found"
    ):
        select_kernels("cpu")
    monkeypatch.setenv(ISA_VARIABLE, "avx2")
    with pytest.raises(BackendUnavailable, match=r"^SLM_NATIVE_ISA=avx2 needs the C\+\+ extension"):
        select_kernels("auto")


def test_an_installation_can_leave_the_extension_out(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("CMake's option is not tested: no cmake (pip install cmake ninja)")
    command = ["cmake", "-S", SOURCE, "-B", tmp_path, "-DSLM_EXTENSION=OFF", "-DCMAKE_CXX_COMPILER=/nowhere/c++"]
    subprocess.run(command, check=True, capture_output=True)
    note: dict[str, str] = {}
    exec((tmp_path / "_native_missing.py").read_text(), note)
    assert note["REASON"] == "it was left out at installation (SLM_EXTENSION=OFF)"


def test_a_source_tree_that_was_never_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extension, "_NAME", "slm_test_extension_that_is_not_there")
    monkeypatch.setattr(_extension, "_NOTE", "slm_test_note_that_is_not_there")
    assert select_kernels().reason.endswith("a source tree that was never installed (pip install .)")


@pytest.mark.usefixtures("broken_extension")
@pytest.mark.parametrize("tier", ["auto", "cpu"])
def test_a_broken_extension_raises_instead_of_falling_back(tier: str) -> None:
    with pytest.raises(BackendUnavailable, match="is there but does not load: undefined symbol: q8_0"):
        select_kernels(tier)


@pytest.mark.usefixtures("broken_extension")
def test_reference_does_not_load_the_extension() -> None:
    assert select_kernels("reference").kernels.name == "reference"


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InvalidOption, match=r"unknown tier 'gpu' \(accepted: auto, reference, cpu, torch\)"):
        select_kernels("gpu")
    with pytest.raises(InvalidOption, match="expanded_bytes is -1"):
        select_kernels(expanded_bytes=-1)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.3.1", "triton 3.3.1 is installed, and the kernels need 3.4 or later, which torch 2.8 brings"),
        ("2.3.1+git8a1b", "triton 2.3.1"),
        ("3.4.0", ""),
        ("3.10.0rc1", ""),
        ("4.0.0", ""),
    ],
)
def test_kernels_need_a_version_of_triton(monkeypatch: pytest.MonkeyPatch, version: str, reason: str) -> None:
    triton = ModuleType("triton")
    triton.__version__, triton.__spec__ = version, ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert why_without_triton().startswith(reason)
    assert bool(why_without_triton()) == bool(reason)


def test_kernels_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_without_triton() == "triton is not installed (to get it: pip install triton)"
