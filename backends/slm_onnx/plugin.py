"""What this package provides; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.hookspecs import Entry, hookimpl
from slm_onnx import BACKEND, INSTALL_HINT


@hookimpl
def slm_backends() -> Sequence[Entry]:
    """The backend."""
    return [Entry(BACKEND, "slm_onnx.backend:OnnxBackend", INSTALL_HINT)]


@hookimpl
def slm_converters() -> Sequence[Entry]:
    """The writer of directories."""
    return [Entry(BACKEND, "slm_onnx.convert:convert", INSTALL_HINT)]
