"""Registers the llama.cpp backend."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.hookspecs import Entry, hookimpl
from slm_llamacpp import BACKEND, INSTALL_HINT


@hookimpl
def slm_backends() -> Sequence[Entry]:
    """The llama.cpp backend."""
    return (Entry(BACKEND, "slm_llamacpp.backend:LlamaCppBackend", hint=INSTALL_HINT),)
