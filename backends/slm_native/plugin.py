"""Registers the native engine."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.hookspecs import Entry, hookimpl


@hookimpl
def slm_backends() -> Sequence[Entry]:
    """The native backend."""
    return [Entry("native", "slm_native.backend:NativeBackend")]
