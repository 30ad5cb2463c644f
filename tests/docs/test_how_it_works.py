"""The page on the forward shows what the code does: its steps, shapes, code and picture are made anew and compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from how_it_works import PAGE, PICTURE, ROOT, main
from slm_native import _extension


def test_the_page_is_what_the_code_makes(tmp_path: Path) -> None:
    if (missing := _extension.why_missing()) is not None:
        pytest.skip(f"the picture shows the cpu tier, whose extension is missing: {missing}")
    for path in (PAGE, PICTURE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    main(tmp_path)
    for path in (PAGE, PICTURE):
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"python tools/how_it_works.py renews {path}"


def test_every_file_that_the_page_names_is_there() -> None:
    roots = (ROOT, ROOT / "backends")
    named = [name for name in (ROOT / PAGE).read_text().split("`") if name.startswith(("slm_core/", "slm_native/"))]
    assert len(named) > 8
    for name in named:
        assert any((root / name).exists() for root in roots), name
