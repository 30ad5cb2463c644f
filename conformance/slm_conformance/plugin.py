"""The plugin's hooks; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.hookspecs import Entry, hookimpl


@hookimpl
def slm_commands() -> Sequence[Entry]:
    """``slm conformance``."""
    return [Entry("conformance", "slm_conformance.command:app", "pip install 'slm-core[conformance]'")]
