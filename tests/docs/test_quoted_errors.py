"""docs/red-to-green.md quotes what the library says of a plugin that is missing or broken."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from pathlib import Path

import pytest

from slm_core.errors import UnknownBackend
from slm_core.plugins import Registry, registry

PAGE = (Path(__file__).parents[2] / "docs" / "red-to-green.md").read_text()
SECTION = PAGE.partition("## 1.")[2].partition("\n## ")[0]
QUOTED = re.findall(r"`([^`]*'tiny'[^`]*)`", SECTION)


def test_a_backend_that_is_not_registered() -> None:
    with pytest.raises(UnknownBackend) as error:
        Registry({}).backend("tiny")
    assert re.sub(r"registered: [^)]*", "registered: ...", str(error.value)) in QUOTED


def test_a_plugin_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = importlib.metadata.EntryPoint("tiny", "no_module_of_this_name", "slm_core")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken])
    with caplog.at_level(logging.WARNING):
        registry.__wrapped__()
    assert caplog.messages[0].partition(":")[0] in QUOTED
