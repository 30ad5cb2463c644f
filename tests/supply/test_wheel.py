"""The wheel has types, license, demo model and extension; workflows run what a contributor runs."""

from __future__ import annotations

import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

import check_wheel

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    *check_wheel.NEEDED,
    "slm_native/_native.abi3.so",
    "slm_core-0.1.0.dist-info/licenses/LICENSE",
}


def test_the_installed_wheel_is_complete() -> None:
    installed = {file.as_posix() for file in distribution("slm-core").files or ()}
    faults = check_wheel.faults_of_files(installed)
    assert [fault for fault in faults if fault != "the C++ extension is missing"] == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_file_is_a_fault(name: str) -> None:
    assert check_wheel.faults_of_files(FILES) == []
    assert len(check_wheel.faults_of_files(FILES - {name})) == 1


def test_sources_of_the_extension_are_a_fault() -> None:
    assert check_wheel.faults_of_files({*FILES, "slm_native/csrc/pool.cpp"}) == ["slm_native/csrc/pool.cpp is too much"]


def test_every_wheel_requires_the_extension() -> None:
    """A table of a platform replaces the common environment."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    environments = [
        table["environment"]
        for table in (tables, *tables.values())
        if isinstance(table, dict) and "environment" in table
    ]
    assert len(environments) == 3
    assert all(each["SKBUILD_CMAKE_DEFINE"] == "SLM_REQUIRE_EXTENSION=ON" for each in environments)
