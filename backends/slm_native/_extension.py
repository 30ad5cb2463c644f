"""Imports the C++ extension, or gives the reason why there is none."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from slm_core.errors import BackendUnavailable

_NAME = "slm_native._native"
_NOTE = "slm_native._native_missing"  # written by CMake if it could not build the extension
_STUB = Path(__file__).with_name("_native.pyi")


def why_missing() -> str | None:
    """Why the extension was not built; None if it exists, working or not."""
    if importlib.util.find_spec(_NAME) is not None:
        return None
    if importlib.util.find_spec(_NOTE) is not None:
        reason: str = importlib.import_module(_NOTE).REASON
        return reason
    return "the package runs from a source tree that was never installed (pip install .)"


def load() -> ModuleType:
    """Import the extension.

    Raises:
        BackendUnavailable: it is missing, or it is there and does not load, or it was built before its interface
            changed; the message says which and why.
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
    """Whether its interface was another when it was built, as in a source tree that was updated since.

    Where an application was packaged without stubs there is nothing to compare with, and nothing that was updated.
    """
    if not _STUB.exists():
        return False
    return getattr(extension, "interface", None) != hashlib.sha256(_STUB.read_bytes()).hexdigest()
