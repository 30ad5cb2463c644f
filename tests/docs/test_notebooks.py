"""The notebooks of docs/notebooks run, and their stored outputs are up to date."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """``tools/notebooks.py --check`` over a folder, in a process of its own: IPython changes the interpreter."""
    code = f"import notebooks, pathlib; notebooks.ROOT = notebooks.FOLDER = pathlib.Path({str(folder)!r})\n"
    code += "raise SystemExit(notebooks.main(['--check']))"
    environment = {"PYTHONPATH": f"{ROOT / 'tools'}:{ROOT}", "PATH": "", "HOME": str(folder)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)


def test_stored_outputs_are_what_the_cells_give(tmp_path: Path) -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    done = check(tmp_path)
    assert (done.returncode, done.stdout) == (0, "3 notebooks, 0 out of date\n"), done.stdout + done.stderr


def test_another_output_is_noticed(tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOKS[0].read_text().replace("is called Luna", "is called Tom"))
    (tmp_path / "changed.ipynb").write_text(json.dumps(notebook))
    stored = (tmp_path / "changed.ipynb").read_bytes()
    notebook["cells"][1]["outputs"][0]["data"] = {"text/plain": "Something else"}
    (tmp_path / "changed.ipynb").write_text(json.dumps(notebook))
    done = check(tmp_path)
    assert done.returncode == 1 and "changed.ipynb: out of date" in done.stdout, done.stdout + done.stderr
    assert stored != (tmp_path / "changed.ipynb").read_bytes()
    assert json.loads((tmp_path / "changed.ipynb").read_text()) == notebook, "--check writes nothing"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_valid_and_shows_html(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("text/html" in output.get("data", {}) for output in outputs) >= 3
    assert "/home/" not in path.read_text() and "/tmp/" not in path.read_text(), "no paths of the author's machine"
