"""docs/red-to-green.md quotes what the library says of a plugin that is missing or broken."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import types
from pathlib import Path

import pytest

from slm_core.errors import PluginError, UnknownBackend
from slm_core.hookspecs import Entry, hookimpl
from slm_core.plugins import Registry, registry

PAGE = (Path(__file__).parents[2] / "docs" / "red-to-green.md").read_text()
SECTION = PAGE.partition("## 1.")[2].partition("\n## ")[0]
QUOTED = re.findall(r"`([^`]*'tiny\b[^`]*)`", SECTION)


def test_a_backend_that_is_not_registered() -> None:
    with pytest.raises(UnknownBackend) as error:
        Registry({}).backend("tiny")
    assert re.sub(r"registered: [^)]*", "registered: ...", str(error.value)) in QUOTED


def test_a_plugin_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = importlib.metadata.EntryPoint("tiny", "no_module_of_this_name", "slm_core")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken])
    with caplog.at_level(logging.WARNING):
        registry.__wrapped__()
    assert re.sub(r"Error: .*", "Error: ...", caplog.messages[0]) in QUOTED


def test_two_packages_with_one_plugin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    points = [importlib.metadata.EntryPoint("tiny", "slm_core.hookspecs", "slm_core") for _ in range(2)]
    for point, package in zip(points, ("tiny-backend", "tiny"), strict=True):
        vars(point).update(dist=types.SimpleNamespace(name=package))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    with caplog.at_level(logging.WARNING):
        registry.__wrapped__()
    assert caplog.messages == [line for line in QUOTED if "'tiny of" in line]


def test_a_target_that_cannot_be_imported() -> None:
    plugin = types.ModuleType("plugin")
    plugin.slm_backends = hookimpl(specname="slm_backends")(lambda: [Entry("tiny", "no_module_of_this_name:Tiny")])
    with pytest.raises(PluginError) as error:
        Registry({"plugin": plugin}).backend("tiny")
    message = str(error.value).partition(", ")[2]
    assert re.sub(r"imported: .*", "imported: ...", message) in QUOTED
