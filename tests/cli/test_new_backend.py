"""``slm new-backend``: the package equals the example except for its name; once installed, it passes the suite."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slm_core.cli.new_backend import Names, files, write
from slm_core.errors import InvalidOption

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_backend"
ADVICE = "the templates are slm_core/data/backend: change both"


def test_the_example_equals_the_output_of_the_command() -> None:
    written = {str(place): text for place, text in files(Names("mine", "my_backend", "my-backend", "My"))}
    sources = [path for path in EXAMPLE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    example_files = {path.relative_to(EXAMPLE).as_posix(): path.read_text() for path in sources}
    assert sorted(written) == sorted(example_files), ADVICE
    for place, text in written.items():
        assert text == example_files[place], f"{place} differs: {ADVICE}"


def test_the_written_package_installs_and_passes_the_suite(run, tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the package is built with it: pip install hatchling")
    assert run("new-backend", "tiny_one", "--in", str(tmp_path)).code == 0
    source, target = tmp_path / "tiny-one-backend", tmp_path / "installed"
    pip = ["pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    _python(*pip, str(source))
    registered = any(point.name == "slm_conformance" for point in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if registered else ["-p", "slm_conformance.pytest_plugin"]
    chosen = ["-k", "(TestBackend or TestTruncate or TestBadDumps) and f16"]
    options = ["-q", "-p", "no:cacheprovider", "-c", str(source / "pyproject.toml"), "--rootdir", str(source), *chosen]
    output = _python("pytest", *plugin, *options, str(source / "tests"), path=target)
    assert re.search(r"^slm-conformance: tiny_one 1\.0, devices cpu$", output, re.MULTILINE), output[:1000]
    assert re.match(r"\d\d passed", output.strip().splitlines()[-1]), output[-1000:]


def _python(*module: str, path: Path | None = None) -> str:
    paths = [*([str(path)] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_names_are_valid_for_python_pip_and_slm() -> None:
    assert Names.of("tiny_one") == Names("tiny_one", "tiny_one_backend", "tiny-one-backend", "TinyOne")


@pytest.mark.parametrize("name", ["", "Tiny", "tiny-one", "1tiny", "tiny one", "../tiny", "a" * 41, "native", "tïny"])
def test_an_invalid_name_is_refused(run, tmp_path: Path, name: str) -> None:
    outcome = run("new-backend", "--in", str(tmp_path), "--", name)
    assert outcome.code == 2
    assert "Invalid value for NAME" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_existing_files_are_not_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "there"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidOption, match="exists already: nothing was written"):
        write(Names.of("tiny"), target)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_failed_write_leaves_no_package(tmp_path: Path, monkeypatch) -> None:
    def full(path: Path, text: str, encoding: str) -> None:
        if path.name == "engine.py":
            raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        write(Names.of("tiny"), tmp_path / "tiny-backend")
    assert list(tmp_path.iterdir()) == []
