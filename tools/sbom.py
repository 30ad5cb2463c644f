"""Writes a software bill of materials, CycloneDX 1.6 in JSON: slm-core and its dependencies as installed here.

    python tools/sbom.py sbom.json                     # slm-core alone, with its required dependencies
    python tools/sbom.py sbom.json --extra llamacpp --extra onnx
    python tools/sbom.py sbom.json --wheel dist/*.whl  # with the wheel's checksum

It lists the distributions in the environment of this Python, with versions and licences from their metadata. nanobind
is compiled into the C++ extension and is listed without a version.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import sys
import uuid
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "slm-core"
_COMPILED_IN = ("nanobind",)


def bill(extras: Sequence[str] = (), wheel: Path | None = None) -> dict[str, object]:
    """The bill of materials.

    Args:
        extras: extras of slm-core whose dependencies are included.
        wheel: wheel whose checksum is included.

    Raises:
        importlib.metadata.PackageNotFoundError: a dependency is not installed.
    """
    distributions: dict[str, Distribution] = {}
    edges: dict[str, list[str]] = {}
    _collect(PROJECT, frozenset(extras), distributions, edges)
    project = distributions.pop(PROJECT)
    root = _component(project)
    if wheel is not None:
        root["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    compiled = [{"type": "library", "name": name, "bom-ref": name, "purl": f"pkg:pypi/{name}"} for name in _COMPILED_IN]
    refs = {name: str(_component(each)["bom-ref"]) for name, each in {PROJECT: project, **distributions}.items()}
    depends = [{"ref": refs[name], "dependsOn": sorted(refs[other] for other in edges[name])} for name in sorted(edges)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "component": root,
        },
        "components": [*(_component(distributions[name]) for name in sorted(distributions)), *compiled],
        "dependencies": [*depends, *({"ref": name, "dependsOn": []} for name in _COMPILED_IN)],
    }


def _collect(
    name: str, extras: frozenset[str], distributions: dict[str, Distribution], edges: dict[str, list[str]]
) -> None:
    """Add a distribution and, recursively, its dependencies here.

    Extras of a distribution that is already there are followed, too.
    """
    distribution = importlib.metadata.distribution(name)
    distributions[name] = distribution
    dependencies = edges.setdefault(name, [])
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if not _applies(requirement, extras):
            continue
        dependency = canonicalize_name(requirement.name)
        if dependency == name:  # an extra that consists of other extras
            _collect(name, frozenset(requirement.extras), distributions, edges)
        elif dependency not in dependencies:
            dependencies.append(dependency)
            _collect(dependency, frozenset(requirement.extras), distributions, edges)


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""}))


def _component(distribution: Distribution) -> dict[str, object]:
    name, version = canonicalize_name(distribution.metadata["Name"]), distribution.version
    purl = f"pkg:pypi/{name}@{version}"
    component: dict[str, object] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    if expression := distribution.metadata.get("License-Expression"):
        component["licenses"] = [{"expression": expression}]
    elif licence := _classified(distribution):
        component["licenses"] = [{"license": {"name": licence}}]
    return component


def _classified(distribution: Distribution) -> str:
    """The licence by classifiers, or the first line of the metadata's text."""
    classifiers = distribution.metadata.get_all("Classifier") or []
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License ::")]
    licence = (distribution.metadata.get("License") or "").strip().partition("\n")[0]
    return ", ".join(named) or licence[:80]


def main(arguments: Sequence[str]) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="of slm-core; may be repeated")
    parser.add_argument("--wheel", type=Path, help="the wheel, for its checksum")
    options = parser.parse_args(arguments)
    document = bill(options.extra, options.wheel)
    options.file.write_text(json.dumps(document, indent=2) + "\n")
    components = document["components"]
    assert isinstance(components, list)
    print(f"{options.file}: {len(components)} components")


if __name__ == "__main__":
    main(sys.argv[1:])
