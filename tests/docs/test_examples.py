"""Every Python example of the documentation runs unchanged, and the README's table of backends is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import slm_core as slm
from slm_core.plugins import registry

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names: dict[str, object] = {"__name__": "example"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        # Padding makes tracebacks show the line of the page.
        exec(compile("\n" * line + block.group(1), str(page), "exec"), names)


ROWS = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \| ([\w, ]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_the_readme_lists_every_backend() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(status.name for status in slm.backends())


@pytest.mark.parametrize(("name", "level", "capabilities"), ROWS, ids=[row[0] for row in ROWS])
def test_the_readme_agrees_with_the_declarations_of_a_backend(name: str, level: str, capabilities: str) -> None:
    status = next(s for s in slm.backends() if s.name == name)
    if not status.installed:
        pytest.skip(f"backend {name} is not installed: {status.reason}")
    with slm.load(slm.demo_model_path(), backend=name) as model, model.new_context(n_ctx=64) as context:
        assert context.edit_level.name == level
        assert sorted(context.capabilities) == capabilities.split(", ")


@pytest.mark.parametrize("name", [row[0] for row in ROWS])
def test_a_backends_page_lists_its_options(name: str) -> None:
    page = (ROOT / "docs" / "backends" / f"{name}.md").read_text()
    table = page.partition("\n## Options\n")[2].partition("\n## ")[0]
    first_cells = " ".join(re.findall(r"^\| (.+?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(registry().backend(name).load_options)
