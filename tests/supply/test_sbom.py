"""The bill of materials lists the requirements of this machine's package metadata, with the requested extras."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sbom

ROOT = Path(__file__).resolve().parents[2]

OWN = ("First_Thing>=1", "never; python_version < '3'", "more[big]; extra == 'engine'", "dev; extra == 'dev'")
INSTALLED = {
    "slm-core": ("0.1", OWN),
    "first.thing": ("1.5", ("second",)),
    "second": ("2", ("first-thing",)),
    "more": ("3", ("huge; extra == 'big'", "other; extra == 'small'")),
    "huge": ("4", ()),
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (version, requires) in INSTALLED.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", "License-Expression: MIT"]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires)]) + "\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])


def names(bill: dict) -> dict[str, str | None]:
    return {component["name"]: component.get("version") for component in bill["components"]}


@pytest.mark.usefixtures("installed")
def test_requirements_are_listed_recursively() -> None:
    bill = sbom.bill()
    assert names(bill) == {"first-thing": "1.5", "second": "2", "nanobind": None}
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/slm-core@0.1"
    depends = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert depends["pkg:pypi/slm-core@0.1"] == ["pkg:pypi/first-thing@1.5"]
    assert depends["pkg:pypi/second@2"] == ["pkg:pypi/first-thing@1.5"]


@pytest.mark.usefixtures("installed")
def test_extras_add_their_requirements() -> None:
    assert names(sbom.bill(["engine"])).keys() == {"first-thing", "second", "more", "huge", "nanobind"}


@pytest.mark.usefixtures("installed")
def test_a_wheel_is_named_by_its_checksum(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"a wheel")
    (checksum,) = sbom.bill(wheel=wheel)["metadata"]["component"]["hashes"]
    assert checksum == {"alg": "SHA-256", "content": hashlib.sha256(b"a wheel").hexdigest()}


def test_every_dependency_of_the_project_is_listed() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bill = sbom.bill()
    assert {canonicalize_name(Requirement(text).name) for text in stated} <= names(bill).keys()
    refs = [component["bom-ref"] for component in (bill["metadata"]["component"], *bill["components"])]
    assert len(refs) == len(set(refs))
    assert {ref for each in bill["dependencies"] for ref in (each["ref"], *each["dependsOn"])} == set(refs)
