"""``make demo`` on a new machine: its steps, with stubs for pip and slm, and the line of progress."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pyte
import pytest

import progress

ROOT = Path(__file__).parents[2]
PROGRESS = ROOT / "tools" / "progress.py"
# As python3: makes an environment whose pip and slm write down how they are called, and fail where FAILS says so.
PYTHON = """\
#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/slm" ;;
    tools/progress.py*) exec {python} "$@" ;;
    -c*) ;;
    *) echo "${{0##*/}} $*" >> {log}; echo "  [7/9] Building CXX"; case "$*" in *"$FAILS") exit 1 ;; esac ;;
esac
"""


class Machine:
    """A machine without an environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "log"
        self._python = folder / "python3"
        self._python.write_text(PYTHON.format(python=sys.executable, log=self._log))
        self._python.chmod(0o755)

    def make(self, *arguments: str, fails: str = "nothing") -> tuple[list[str], str]:
        """``make demo``: how pip and slm were called, and the output."""
        self._log.write_text("")
        command = ["make", "demo", f"VENV={self._folder}/venv", f"PYTHON={self._python}", *arguments]
        inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        environment = {**inherited, "FAILS": fails, "CXX": "c++"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        calls = [re.sub(r"^python -m pip .*install -v", "install", call) for call in self._log.read_text().splitlines()]
        return calls, done.stdout


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


FIRST = ["install --no-compile -C build-dir=build/numpy -C cmake.define.SLM_EXTENSION=OFF .", "slm demo"]


def test_the_demo_runs_before_anything_is_compiled_and_again_at_the_end(machine: Machine) -> None:
    calls, output = machine.make("-j3")
    assert calls[:3] == [*FIRST, "install ."]
    assert sorted(calls[3:-1]) == ["install slm-core[llamacpp]", "install slm-core[onnx]"]
    assert calls[-1] == "slm demo"
    assert re.search(r"^Installing engine llamacpp, built from source: about \d+ minutes", output, re.MULTILINE)
    assert machine.make()[0] == ["slm demo"], "the second time, all is there"


def test_without_other_engines(machine: Machine) -> None:
    assert machine.make("ENGINES=")[0] == [*FIRST, "install .", "slm demo"]


def test_an_engine_that_cannot_be_installed_is_left_out(machine: Machine) -> None:
    calls, output = machine.make(fails="[llamacpp]")
    assert calls[-2:] == ["install slm-core[onnx]", "slm demo"]
    assert "Engine llamacpp is left out: it could not be installed, see above." in output
    assert "  [7/9] Building CXX\n" in output, "the output of what failed is shown"
    assert machine.make()[0] == ["install slm-core[llamacpp]", "slm demo"], "the next time, it is tried again"


def test_a_line_of_progress_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, go = [], tmp_path / "go"

    def show(line: str, on_terminal: bool) -> None:
        assert not on_terminal
        lines.append(line)
        if "compiled" in line:
            go.touch()

    monkeypatch.setattr(progress, "PIPE_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "_show", show)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    command = "import pathlib, sys, time; print('  [3/40] Building', flush=True)\n"
    command += "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    assert progress.main(["Building it", "--", sys.executable, "-c", command, str(go)]) == 0
    assert lines[0] == "Building it ..."
    assert re.fullmatch(r"\d:\d\d, compiled 3 of 40  Building it", lines[-2])
    assert re.fullmatch(r"\d:\d\d, compiled 3 of 40  Building it: done", lines[-1])
    assert sys.stdout.getvalue() == "", "the output of what succeeds is not shown"


@pytest.mark.parametrize("code", [0, 3])
def test_one_line_of_progress_on_a_terminal(code: int) -> None:
    controller, worker = os.openpty()
    command = [PROGRESS, "Building it", "--", sys.executable, "-c", f"print('why'); raise SystemExit({code})"]
    with subprocess.Popen([sys.executable, *command], stdout=worker) as process:
        os.close(worker)
        screen = pyte.Screen(80, 10)
        stream = pyte.ByteStream(screen)
        while data := _read(controller):
            stream.feed(data)
    os.close(controller)
    assert process.returncode == code
    shown = [line.rstrip() for line in screen.display if line.strip()]
    assert re.fullmatch(rf"\d:\d\d  Building it: {'failed' if code else 'done'}", shown[0])
    assert shown[1:] == (["why"] if code else [])


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:  # Linux: the other end is closed
        return b""


def test_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert progress.main(["Building it"]) == 2
    assert capfd.readouterr().err == "usage: progress.py LABEL -- COMMAND...\n"
