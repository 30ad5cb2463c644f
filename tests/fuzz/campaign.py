"""Fuzz targets for SECONDS each: ``python -m fuzz.campaign SECONDS [TARGET...]``, with ``tests`` on the path.

Readers in Python need atheris (``pip install "slm-core[fuzz]"``), the C++ kernels clang++ with libFuzzer and CMake.
Missing tools are named. The exit status is 1 if an input broke a target; the input is kept, and its path is printed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fuzz.corpora import CPP_TARGETS, cpp_inputs
from fuzz.targets import TARGETS

HERE = Path(__file__).parent
_LONGEST = 1 << 13
_N_LINES = 30


def main(seconds: str, names: Sequence[str]) -> int:
    """Fuzz the targets; returns the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="slm-fuzz-"))
    status, chosen = 0, set(names or (*TARGETS, *CPP_TARGETS))
    python, cpp = [name for name in TARGETS if name in chosen], [name for name in CPP_TARGETS if name in chosen]
    if python and importlib.util.find_spec("atheris") is None:
        print("not fuzzed: the readers in Python, as atheris is not installed (pip install 'slm-core[fuzz]')")
        python = []
    for name in python:
        status |= _fuzz(name, [sys.executable, "-m", "fuzz.run", name, seconds, str(folder / name)])
    clang = shutil.which(os.environ.get("CXX", "clang++"))
    if cpp and (clang is None or shutil.which("cmake") is None):
        print("not fuzzed: the C++ kernels, as there is no clang++ or no cmake (CXX names another clang++)")
        cpp = []
    if cpp:
        build = _build(str(clang), folder / "build", cpp)
    for name in cpp:
        corpus = folder / name
        corpus.mkdir()
        for i, data in enumerate(cpp_inputs(name)):
            (corpus / f"seed-{i}").write_bytes(data)
        flags = [f"-max_total_time={seconds}", f"-max_len={_LONGEST}", f"-artifact_prefix={corpus}/"]
        status |= _fuzz(name, [str(build / f"fuzz_{name}"), *flags, "-print_final_stats=1", str(corpus)])
    return status if python or cpp else 1


def _build(clang: str, folder: Path, names: Sequence[str]) -> Path:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", *generator, f"-DCMAKE_CXX_COMPILER={clang}", "-DCMAKE_BUILD_TYPE=None"]
    subprocess.run([*configure, "-S", str(HERE / "cpp"), "-B", str(folder)], check=True, stdout=subprocess.DEVNULL)
    targets = [f"fuzz_{name}" for name in names]
    subprocess.run(["cmake", "--build", str(folder), "--target", *targets], check=True, stdout=subprocess.DEVNULL)
    return folder


def _fuzz(name: str, command: Sequence[str]) -> int:
    """Run one fuzzer and print its result in one line, and the end of its output if it found something."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = done.stdout + done.stderr
    match = re.search(r"number_of_executed_units: (\d+)", output)
    executions = f"{int(match[1]):,}" if match else "no"
    print(f"{name}: {executions} executions, {'nothing found' if done.returncode == 0 else 'BROKEN'}", flush=True)
    if done.returncode:
        print("\n".join(output.splitlines()[-_N_LINES:]))
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
