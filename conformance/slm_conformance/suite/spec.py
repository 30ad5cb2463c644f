"""The backend of a spec: a registered name, or the place of an attribute."""

from __future__ import annotations

import importlib
from typing import cast

from slm_core.errors import UnknownBackend
from slm_core.isolation import isolated as in_processes
from slm_core.plugins import registry
from slm_core.protocols import Backend


def make_backend(spec: str, *, isolated: bool = False) -> Backend:
    """The registered backend with a name; for ``package.module:attribute``, the result of calling it without arguments.

    Args:
        spec: the name, or the place of the attribute.
        isolated: whether each of its models is loaded in a process of its own.

    Raises:
        UnknownBackend: there is no such backend.
        InvalidOption: ``isolated``, but another process cannot import the backend.
    """
    backend = _backend(spec)
    if not isolated:
        return backend
    return in_processes(backend, spec if ":" in spec else registry().backend_target(spec))


def _backend(spec: str) -> Backend:
    module, colon, attribute = spec.partition(":")
    if not colon:
        return registry().backend(spec)
    try:
        return cast("Backend", getattr(importlib.import_module(module), attribute)())
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownBackend(f"no backend at {spec!r} (accepted: package.module:attribute): {error}") from error
