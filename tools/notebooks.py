"""Runs the notebooks of docs/notebooks and stores their outputs; ``--check`` compares them with the stored ones.

python tools/notebooks.py [--check]

A comparison looks at the structure: the kinds of outputs of each cell, their elements of HTML, and their text without
numbers and paths, because times and addresses differ from run to run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
KINDS = ("text/html", "text/plain")
MODEL_FILE = re.compile(r"/[^\s<]*/(?=slm_core/data/)")


class ResultKept(DisplayHook):
    """Keeps the value of a cell's last expression instead of printing it."""

    def __call__(self, result: object = None) -> None:
        if result is not None and not self.quiet():
            self.exec_result.result = result


class Shell(InteractiveShell):
    """A shell that prints no results."""

    displayhook_class = ResultKept


def shell() -> InteractiveShell:
    """A shell without a history on disk, which runs cells in this process."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    return Shell(config=config)


def run(notebook: Any) -> Any:
    """Run the code of a notebook, and replace its outputs.

    Raises:
        RuntimeError: a cell raised.
    """
    kernel, n_run = shell(), 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            n_run += 1
            cell.execution_count = n_run
            cell.outputs = list(_outputs(kernel, cell.source, n_run))
    nbformat.validate(notebook)
    return notebook


def _outputs(kernel: InteractiveShell, source: str, n_run: int) -> Iterator[Any]:
    with capture_output() as captured:
        result = kernel.run_cell(source)
    error = result.error_before_exec or result.error_in_exec
    if error is not None:
        raise RuntimeError(f"a cell raised {type(error).__name__}: {error}\n{source}")
    if captured.stdout:
        yield nbformat.v4.new_output("stream", name="stdout", text=captured.stdout)
    for output in captured.outputs:
        yield nbformat.v4.new_output("display_data", data=_kept(output.data))
    if result.result is not None:
        data, _ = kernel.display_formatter.format(result.result)
        yield nbformat.v4.new_output("execute_result", data=_kept(data), execution_count=n_run)


def _kept(data: Mapping[str, str]) -> dict[str, str]:
    return {kind: MODEL_FILE.sub("", data[kind]) for kind in KINDS if kind in data}


def structure(notebook: Any) -> list[object]:
    """The part of a notebook that is compared."""
    return [(cell.source, [_shape(output) for output in cell.get("outputs", [])]) for cell in notebook.cells]


def _shape(output: Any) -> object:
    if output.output_type == "stream":
        return ("stream", _words(output.text))
    return (
        output.output_type,
        {kind: _html(text) if kind == "text/html" else _words(text) for kind, text in output.data.items()},
    )


def _words(text: str) -> str:
    return re.sub(r"-?\d[\d.,e+-]*", "N", text)


def _html(text: str) -> object:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.parts: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.parts.append(f"<{tag}>")

        def handle_data(self, data: str) -> None:
            self.parts.append(_words(data))

    reader = Reader()
    reader.feed(text)
    return reader.parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all notebooks; returns the number of notebooks whose stored outputs are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only, and write nothing")
    check, stale = parser.parse_args(arguments).check, 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        stored = nbformat.read(path, as_version=4)
        before = structure(stored)
        after = structure(run(stored))
        if not check:
            nbformat.write(stored, path)
        elif before != after:
            stale += 1
            differing = next(b for a, b in zip(before, after, strict=True) if a != b)
            print(f"{path.relative_to(ROOT)}: out of date, run tools/notebooks.py; a cell is now {differing}")
    print(f"{len(list(FOLDER.glob('*.ipynb')))} notebooks, {stale} out of date")
    return stale


if __name__ == "__main__":
    sys.exit(main() > 0)
