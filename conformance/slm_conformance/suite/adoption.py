"""Adoption of the suite by a module: finds its fixtures class, and makes a workshop for the run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from slm_conformance.fixtures import COMMAND_LINE, BackendFixtures
from slm_conformance.suite.workshop import Effort, Workshop
from slm_core.errors import SlmError

_WORKSHOPS = pytest.StashKey["dict[str, Workshop]"]()
_DIRECTORY = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()


def fixtures_of(module: ModuleType, config: pytest.Config) -> BackendFixtures:
    """The module's fixtures, completed from the command line.

    Raises:
        pytest.UsageError: there is not exactly one class, or no backend is named.
    """
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BackendFixtures) and value is not BackendFixtures
    ]
    if len(classes) != 1:
        names = ", ".join(value.__name__ for value in classes) or "none"
        raise pytest.UsageError(f"{module.__name__} needs exactly one subclass of BackendFixtures (found: {names})")
    return classes[0]() if classes[0].backend != COMMAND_LINE else _from_command_line(classes[0], config)


def workshop_of(module: ModuleType, config: pytest.Config) -> Workshop:
    """The module's workshop, made on first use; skips if the backend is not installed.

    Raises:
        pytest.UsageError: the backend is required but not installed, or it is not registered.
    """
    workshops = config.stash.setdefault(_WORKSHOPS, {})
    if module.__name__ not in workshops:
        if _DIRECTORY not in config.stash:
            config.stash[_DIRECTORY] = tempfile.TemporaryDirectory(prefix="slm-conformance-")
        effort = Effort(
            config.getoption("--slm-budget"), config.getoption("--slm-seed"), config.getoption("--slm-quick")
        )
        directory = Path(config.stash[_DIRECTORY].name)
        fixtures = fixtures_of(module, config)
        try:
            workshops[module.__name__] = Workshop(fixtures, directory, effort)
        except SlmError as error:
            raise pytest.UsageError(f"the backend of {module.__name__}: {error}") from None
    workshop = workshops[module.__name__]
    if workshop.absence is not None:
        reason = workshop.absence
        if workshop.fixtures.required:
            raise pytest.UsageError(reason)
        pytest.skip(reason)
    return workshop


def close_workshops(config: pytest.Config) -> None:
    """Close all models, delete the tiny ones."""
    for workshop in config.stash.get(_WORKSHOPS, {}).values():
        workshop.close()
    if _DIRECTORY in config.stash:
        config.stash[_DIRECTORY].cleanup()


def _from_command_line(fixtures: type[BackendFixtures], config: pytest.Config) -> BackendFixtures:
    backend, model, device = (config.getoption(f"--slm-{name}") for name in ("backend", "model", "device"))
    if not backend:
        raise pytest.UsageError("no backend is named: pass --slm-backend NAME, or set it in the BackendFixtures class")
    isolated = config.getoption("--slm-isolated")
    chosen = {"backend": backend, "device": device, "isolated": isolated} | ({"models": (model,)} if model else {})
    completed: type[BackendFixtures] = type(fixtures.__name__, (fixtures,), chosen)
    return completed()
