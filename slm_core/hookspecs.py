"""What a plugin may provide: one hook a kind. Built-in backends and formatters register through the same hooks.

A plugin is a module, named by an entry point of the group ``slm_core``, with functions of these names marked
``@slm_core.hookimpl``. It is imported whenever plugins are listed, so it must import nothing heavy: it returns
entries whose targets are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pluggy

PROJECT = "slm_core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Entry:
    """Something a plugin provides.

    Attributes:
        name: what users choose it by; lower case letters, digits and underscores.
        target: "package.module:attribute", imported on first use; called to get the object.
        hint: the command that installs what the target needs.
    """

    name: str
    target: str
    hint: str = ""


@hookspec
def slm_backends() -> Sequence[Entry]:  # type: ignore[empty-body]  # pluggy never calls a specification
    """Backends; a target called without arguments returns a ``protocols.Backend``."""


@hookspec
def slm_formatters() -> Sequence[Entry]:  # type: ignore[empty-body]
    """Chat formats; a target called with a ``plugins.FormatterSource`` returns a ``protocols.Formatter``."""
