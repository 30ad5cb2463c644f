"""Imports the C++ extension, or says why it is missing."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from slm_core.errors import BackendUnavailable

_NAME = "slm_native._native"
_NOTE = "slm_native._native_missing"  # CMake writes it if it cannot build the extension
_STUB = Path(__file__).with_name("_native.pyi")


def why_missing() -> str | None:
    """Why the extension was not built; None if it exists, even if it does not load."""
    if importlib.util.find_spec(_NAME) is not None:
        return None
    if importlib.util.find_spec(_NOTE) is not None:
        reason: str = importlib.import_module(_NOTE).REASON
        return reason
    return "the package runs from a source tree that was never installed (pip install .)"


def load() -> ModuleType:
    """Import the extension.

    Raises:
        BackendUnavailable: the extension is missing, does not load, or was built for another interface; the message
            says which.
    """
    if (missing := why_missing()) is not None:
        raise BackendUnavailable(f"the C++ extension is missing: {missing}")
    try:
        extension = importlib.import_module(_NAME)
    except ImportError as error:
        raise BackendUnavailable(f"the C++ extension is there but does not load: {error}") from error
    if _is_stale(extension):
        raise BackendUnavailable(
            f"the C++ extension does not fit the Python sources beside it ({extension.__file__} was built for another"
            " _native.pyi): build it again (pip install .)"
        )
    return extension


def _is_stale(extension: ModuleType) -> bool:
    """Whether the extension was built for another interface, as in a source tree that was updated since.

    A packaged application may lack the stubs. Then there is nothing to compare, and nothing was updated.
    """
    if not _STUB.exists():
        return False
    return getattr(extension, "interface", None) != hashlib.sha256(_STUB.read_bytes()).hexdigest()
