"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of published vocabularies, templates and grammars: $SLM_SHARED, or ``shared`` beside the checkout."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("SLM_SHARED", default))
    if not (folder / "oracles").is_dir():
        pytest.skip(f"no test data: {folder / 'oracles'} is not a folder (set SLM_SHARED to the folder that holds it)")
    return folder
