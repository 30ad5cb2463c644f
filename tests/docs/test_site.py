"""The pages of the documentation site; `make docs` builds it, which takes longer and checks its links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import docs_site
import slm_core as slm

ROOT = Path(__file__).resolve().parents[2]
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def test_every_page_is_in_the_nav_once() -> None:
    listed = re.findall(r"[\w/-]+\.md", NAV)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")]
    assert sorted(listed) == sorted([*pages, *notebooks, *docs_site.OUTSIDE, "api.md"])


def test_every_public_name_is_in_the_reference_once() -> None:
    names = re.findall(r"^::: slm_core\.(\w+)$", docs_site.api_page(), re.MULTILINE)
    assert sorted(names) == sorted(slm.__all__)


@pytest.mark.parametrize(
    ("source", "page", "link", "expected"),
    [
        ("README.md", "index.md", "[chat](docs/chat.md#tools)", "[chat](chat.md#tools)"),
        ("docs/backends/native.md", "backends/native.md", "[c](../contract.md)", "[c](../contract.md)"),
        ("docs/notebooks.md", "notebooks.md", "[n](notebooks/edits.ipynb)", "[n](notebooks/edits.md)"),
        ("CONTRIBUTING.md", "contributing.md", "[r](README.md)", "[r](index.md)"),
        ("docs/chat.md", "chat.md", "[s](../SECURITY.md)", "[s](security.md)"),
        ("docs/cookbook.md", "cookbook.md", "[stream.py](../examples/stream.py)", "stream.py"),
        ("docs/chat.md", "chat.md", "[there](https://example.org/x.md)", "[there](https://example.org/x.md)"),
        ("docs/chat.md", "chat.md", "![p](images/x.png)", "![p](images/x.png)"),
    ],
)
def test_links_lead_to_pages_of_the_site(source: str, page: str, link: str, expected: str) -> None:
    match = docs_site.LINK.fullmatch(link)
    assert match is not None
    known = {"index.md", "chat.md", "contract.md", "security.md", "notebooks/edits.md", "images/x.png"}
    assert docs_site.relinked(match, source, page, known) == expected


def test_a_notebook_becomes_a_page() -> None:
    page = docs_site.notebook_page(ROOT / "docs" / "notebooks" / "edits.ipynb")
    assert page.startswith("# Edits of a chat")
    assert "```python\ntwin = chat.fork()" in page
    blocks = [line for line in page.splitlines() if line.startswith("<div")]
    assert len(blocks) == 5 and all(block.count("<div") == block.count("</div>") for block in blocks)
