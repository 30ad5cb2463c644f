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
BUILDS = Path(__file__).resolve().parents[2] / "build" / "sanitizers"
"""The builds are kept: compiling takes two thirds of the time, and most changes are not in the C++."""


def run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
    process = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **(environment or {})},
    )
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}:\n{process.stdout[-6000:]}"
    return process.stdout


def _write_inputs(folder: Path, inputs: Sequence[bytes]) -> list[Path]:
    folder.mkdir()
    paths = [folder / str(i) for i in range(len(inputs))]
    for path, data in zip(paths, inputs, strict=True):
        path.write_bytes(data)
    return paths


@pytest.mark.timeout(900)  # compiling takes a minute or two if the cores are busy with other work
@pytest.mark.parametrize(
    ("sanitizers", "more", "fuzzers"),
    # Data races do not depend on the instruction set or the type of weights: the plain build and few types are enough.
    # The fuzzers use one thread.
    [("address,undefined", [], CPP_TARGETS), ("thread", ["-DSLM_PLAIN=ON"], ())],
    ids=["address,undefined", "thread"],
)
def test_kernels_built_with_sanitizers(
    tmp_path: Path, sanitizers: str, more: list[str], fuzzers: Sequence[str]
) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("the kernels are not tested with sanitizers: no cmake (pip install cmake ninja)")
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")) and "CXX" not in os.environ:
        pytest.skip("the kernels are not tested with sanitizers: no C++ compiler")
    build = BUILDS / sanitizers.replace(",", "-")
    cpu = Path("/proc/cpuinfo")
    has_avx512 = cpu.is_file() and "avx512_vnni" in cpu.read_text()
    # Kernels that this machine cannot run take half of the compilation. CMake's cache in
    # the folder may be of another machine, so OFF is passed, too.
    up_to_avx2 = "ON" if cpu.is_file() and not has_avx512 else "OFF"
    settings = {"REPLAY": "ON", "SANITIZE": sanitizers, "UP_TO_AVX2": up_to_avx2}
    options = [*(f"-DSLM_{name}={value}" for name, value in settings.items()), "-DCMAKE_BUILD_TYPE=None", *more]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(["cmake", *generator, "-S", SOURCE, "-B", build, *options])
    programs = ["check_products", *(f"fuzz_{target}" for target in fuzzers)]
    try:
        log = run(["cmake", "--build", build, "--parallel", str(usable_cores()), "--target", *programs])
        assert "warning:" not in log, log
    except BaseException:
        shutil.rmtree(build)  # compiled files would not show their warnings again
        raise
    cases = tmp_path / "cases"
    assert write_cases(cases, all_types=sanitizers != "thread") > 20
    # Without address space randomization: the thread sanitizer of older compilers fails with it.
    without_aslr = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    output = run([*without_aslr, build / "csrc" / "check_products", cases], {"TSAN_OPTIONS": "halt_on_error=1"})
    assert "scalar: " in output
    for target in fuzzers:
        inputs = _write_inputs(tmp_path / target, cpp_inputs(target))
        assert f"{len(inputs)} files" in run([*without_aslr, build / f"fuzz_{target}", *inputs])
    if has_avx512 and sanitizers != "thread":
        assert "avx_vnni: " in output and "avx512: " in output and "amx_plain: " in output
