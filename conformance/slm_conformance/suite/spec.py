"""How a backend is named: as a plugin registered it, or by where it is."""

from __future__ import annotations

import importlib
from typing import cast

from slm_core.errors import UnknownBackend
from slm_core.plugins import registry
from slm_core.protocols import Backend


def make_backend(spec: str) -> Backend:
    """The registered backend of that name, or what ``package.module:attribute``, called without arguments, makes.

    Raises:
        UnknownBackend: there is none.
    """
    module, colon, attribute = spec.partition(":")
    if not colon:
        return registry().backend(spec)
    try:
        return cast("Backend", getattr(importlib.import_module(module), attribute)())
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownBackend(f"no backend at {spec!r} (accepted: package.module:attribute): {error}") from error
