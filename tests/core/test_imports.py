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
    imported = {name for name in vars(slm_core.public) if name[0].isalpha()}
    assert imported == set(slm_core.__all__)
    assert not [name for name in imported if f"slm_core.{name}" in sys.modules], "a module hides a name"
    for name in imported:
        assert getattr(slm_core, name) is getattr(slm_core.public, name)


def test_names_and_modules_are_imported_when_they_are_used() -> None:
    probe = """
import sys, slm_core
assert "slm_core.public" not in sys.modules and "numpy" not in sys.modules
assert slm_core.errors.SlmError.__name__ == "SlmError" and "slm_core.public" not in sys.modules
try:
    slm_core.no_such_name
except AttributeError as error:
    assert str(error) == "module 'slm_core' has no attribute 'no_such_name'"
from slm_core import *
assert load is slm_core.load
"""
    subprocess.run([sys.executable, "-c", probe], check=True)


def test_dir_lists_public_names_alone() -> None:
    assert dir(slm_core) == slm_core.__all__


def test_every_exception_is_a_public_name() -> None:
    exceptions = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert exceptions <= set(slm_core.__all__)
