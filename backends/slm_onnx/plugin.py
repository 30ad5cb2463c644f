"""The plugin's hooks; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.hookspecs import Entry, hookimpl
from slm_onnx import BACKEND, INSTALL_HINT


@hookimpl
def slm_backends() -> Sequence[Entry]:
    """The ONNX Runtime backend."""
    return [Entry(BACKEND, "slm_onnx.backend:OnnxBackend", INSTALL_HINT)]


@hookimpl
def slm_converters() -> Sequence[Entry]:
    """The converter to directories."""
    return [Entry(BACKEND, "slm_onnx.convert:convert", INSTALL_HINT)]
