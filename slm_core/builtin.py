"""The plugin with the converter that ``slm_core`` itself provides; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.hookspecs import Entry, hookimpl


@hookimpl
def slm_converters() -> Sequence[Entry]:
    """The converter of directories to GGUF files."""
    return [Entry("gguf", "slm_core.exporting:write_gguf")]
