"""CI installs its tools by checksum: the lock file has every pin of pyproject.toml, and names no host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / ".ci" / "tools.lock").read_text()


def test_the_lock_has_the_pins_of_the_project() -> None:
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["check"]
    locked = set(re.findall(r"^([\w.-]+==\S+) ", LOCK, re.MULTILINE))
    assert set(pins) <= locked, f"run make lock: {set(pins) - locked} are not in .ci/tools.lock"


def test_every_package_has_checksums() -> None:
    packages = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert packages and all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", package) for package in packages)


def test_no_host_is_named() -> None:
    assert "://" not in LOCK and "index-url" not in LOCK
