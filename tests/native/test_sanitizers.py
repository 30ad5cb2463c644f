"""The C++ products, layers and MoE layers in builds with sanitizers: addresses, undefined behaviour, races.

The fuzzers' inputs are replayed in the same builds.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fuzz.corpora import CPP_TARGETS, cpp_inputs
from kernel_cases import write_cases
from slm_core.cpu import usable_cores

SOURCE = Path(__file__).resolve().parents[1] / "fuzz" / "cpp"


def run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "cases"
    assert write_cases(path) > 50
    return path


def _written(folder: Path, inputs: Sequence[bytes]) -> list[Path]:
    folder.mkdir()
    paths = [folder / str(i) for i in range(len(inputs))]
    for path, data in zip(paths, inputs, strict=True):
        path.write_bytes(data)
    return paths


@pytest.mark.timeout(900)  # a minute or two of compiling, where the cores are busy with more than this
@pytest.mark.parametrize(
    ("sanitizers", "more"),
    # Threads meet outside of what instruction sets have.
    [("address,undefined", []), ("thread", ["-DSLM_PLAIN=ON"])],
    ids=["address,undefined", "thread"],
)
def test_kernels_of_a_sanitized_build(tmp_path: Path, cases: Path, sanitizers: str, more: list[str]) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("the kernels are not tested with sanitizers: no cmake (pip install cmake ninja)")
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")) and "CXX" not in os.environ:
        pytest.skip("the kernels are not tested with sanitizers: no C++ compiler")
    options = ["-DSLM_REPLAY=ON", f"-DSLM_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=None", *more]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(["cmake", *generator, "-S", SOURCE, "-B", tmp_path, *options])
    programs = ["check_products", *(f"fuzz_{target}" for target in CPP_TARGETS)]
    log = run(["cmake", "--build", tmp_path, "--parallel", str(usable_cores()), "--target", *programs])
    assert "warning:" not in log, log
    # Without address space randomization, which the thread sanitizer of older compilers cannot live with.
    fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    said = run([*fixed, tmp_path / "csrc" / "check_products", cases], {"TSAN_OPTIONS": "halt_on_error=1"})
    assert "scalar: " in said
    for target in CPP_TARGETS:
        inputs = _written(tmp_path / target, cpp_inputs(target))
        assert f"{len(inputs)} files" in run([*fixed, tmp_path / f"fuzz_{target}", *inputs])
    has_avx512 = platform.system() == "Linux" and "avx512_vnni" in Path("/proc/cpuinfo").read_text()
    if has_avx512 and sanitizers != "thread":
        assert "avx_vnni: " in said and "avx512: " in said and "amx_plain: " in said
