"""The link checker finds exactly the broken links."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_links import main

OTHER = """# Other page

## Second heading: `code` & more!

## Twice
## Twice
"""


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("[a](docs/other.md)", False),
        ("[a](docs/other.md#other-page)", False),
        ("[a](docs/other.md#second-heading-code--more)", False),
        ("[a](docs/other.md#twice-1)", False),
        ("[a](#top)", False),
        ("[a](https://example.org/x)", False),
        ("[a](docs)", False),
        ('[a](docs/other.md "title")', False),
        ("`[a](missing.md)`", False),
        ("\n```\n[a](missing.md)\n```", False),
        ("[a](missing.md)", True),
        ("[a](docs/other.md#nowhere)", True),
        ("[a](#nowhere)", True),
        ("![a](picture.png)", True),
        ("[a]\n\n[a]: missing.md", True),
    ],
)
def test_broken_links_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str, broken: bool) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text(OTHER)
    (tmp_path / "README.md").write_text(f"# Top\n\nSee {link}\n")
    assert main(tmp_path) == broken
    assert ("README.md: " in capsys.readouterr().out) == broken
