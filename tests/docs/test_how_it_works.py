"""docs/how-it-works.md agrees with the code: its steps, shapes, code and picture are generated again and compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from how_it_works import PAGE, PICTURE, ROOT, main
from slm_native import _extension


def test_the_page_equals_the_generated_page(tmp_path: Path) -> None:
    if (missing := _extension.why_missing()) is not None:
        pytest.skip(f"the picture shows the cpu tier, whose extension is missing: {missing}")
    for path in (PAGE, PICTURE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    main(tmp_path)
    for path in (PAGE, PICTURE):
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), (
            f"python tools/how_it_works.py regenerates {path}"
        )


def test_every_file_named_on_the_page_exists() -> None:
    roots = (ROOT, ROOT / "backends")
    named = [name for name in (ROOT / PAGE).read_text().split("`") if name.startswith(("slm_core/", "slm_native/"))]
    assert len(named) > 8
    for name in named:
        assert any((root / name).exists() for root in roots), name
