"""The example plugin, installed from its own package, is found by slm-core and passes the suite.

It is installed outside the environment, because other tests list the installed backends.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "my_backend"
TARGET = Path(sys.prefix) / "example"


@pytest.fixture
def run_python():
    """A function that runs Python with the example installed."""
    if not (TARGET / "my_backend").is_dir():
        pytest.skip(f"the example is not installed (make test does: pip install --no-deps --target {TARGET} {SOURCE})")
    paths = [str(TARGET), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, env=environment)

    return run


def modules(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.py")}


def test_the_example_passes_the_suite(run_python):
    assert modules(TARGET / "my_backend") == modules(SOURCE / "src" / "my_backend"), f"{TARGET} is out of date"
    registered = any(point.name == "slm_conformance" for point in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if registered else ["-p", "slm_conformance.pytest_plugin"]
    options = [
        "-q",
        "--slm-quick",
        "-p",
        "no:cacheprovider",
        "-c",
        str(SOURCE / "pyproject.toml"),
        "--rootdir",
        str(SOURCE),
    ]
    done = run_python("-m", "pytest", *plugin, *options, str(SOURCE / "tests"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"^slm-conformance: mine 1\.0, devices cpu$", done.stdout, re.MULTILINE), done.stdout[:1000]
    assert re.match(r"\d{3,} passed", done.stdout.strip().splitlines()[-1])


def test_slm_core_finds_the_example(run_python):
    done = run_python("-c", "import sys; from slm_core.cli import main; sys.argv = ['slm', 'backends']; main()")
    assert re.search(r"\bmine\b", done.stdout), done.stdout + done.stderr


def test_the_example_refuses_unsupported_files(run_python, tmp_path):
    from slm_conformance.oracle.factories import tiny_model

    llama = tiny_model(tmp_path, "llama", "f32")
    done = run_python("-c", f"import slm_core as slm; slm.load({str(llama)!r}, backend='mine')")
    assert "architecture 'llama' (accepted: qwen3)" in done.stderr.splitlines()[-1]


def test_the_adoption_of_the_example_is_short():
    assert len((SOURCE / "tests" / "test_conformance.py").read_text().splitlines()) <= 25
