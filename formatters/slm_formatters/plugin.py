"""What this package provides; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.hookspecs import Entry, hookimpl


@hookimpl
def slm_formatters() -> Sequence[Entry]:
    """The model's own template, and the families."""
    return [
        Entry("template", "slm_formatters.template:TemplateFormatter"),
        Entry("chatml", "slm_formatters.families.chatml:chatml"),
    ]
