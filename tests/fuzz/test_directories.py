"""A few random directories; ``python -m fuzz.directories`` compares more of them."""

from __future__ import annotations

import pytest

from fuzz.directories import compare


@pytest.mark.parametrize(
    ("family", "seed"),
    [("Mistral", 9), ("Phi3", 6), ("Starcoder2", 12), ("Gemma2", 1), ("Granite", 5), ("Qwen3Moe", 5)],
)
def test_random_directories_equal_transformers(tmp_path, family, seed):
    assert compare(family, seed, tmp_path) == "equal"
