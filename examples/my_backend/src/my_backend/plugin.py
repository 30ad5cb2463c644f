"""Registers the backend. This module is imported whenever backends are listed, so it imports no engine."""

from __future__ import annotations

from slm_core.hookspecs import Entry, hookimpl


@hookimpl
def slm_backends() -> list[Entry]:
    """The backend of this package."""
    return [Entry("mine", "my_backend.backend:MyBackend", hint="pip install my-backend")]
