"""Importing slm_core and listing backends is cheap: no engine and no UI library is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import slm_core
from slm_core import errors

HEAVY = ["torch", "onnxruntime", "llama_cpp", "tokenizers", "jinja2", "typer", "rich", "pydantic", "pytest"]
PROBE = f"""
import json, sys
import slm_core
names = [status.name for status in slm_core.backends()]
print(json.dumps([names, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def test_listing_backends_imports_nothing_heavy() -> None:
    output = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    names, imported = json.loads(output)
    if not names:
        pytest.skip("no backends are registered: slm-core is not installed here, only on the path")
    assert {"native", "llamacpp"} <= set(names)
    assert imported == [], f"importing slm_core and listing {', '.join(names)} imports {', '.join(imported)}"


def test_all_is_sorted_and_complete() -> None:
    assert slm_core.__all__ == sorted(slm_core.__all__)
    public = {name for name in vars(slm_core) if name[0].isalpha()}
    submodules = {name for name in public if f"slm_core.{name}" in sys.modules}
    assert public - submodules == set(slm_core.__all__) - submodules


def test_dir_lists_public_names_alone() -> None:
    assert dir(slm_core) == slm_core.__all__


def test_every_exception_is_a_public_name() -> None:
    exceptions = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert exceptions <= set(slm_core.__all__)
