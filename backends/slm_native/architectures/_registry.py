"""Finds the architectures and applies the one that a file names."""

from __future__ import annotations

import importlib
import pkgutil

from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.gguf.cursor import shown
from slm_native import architectures
from slm_native.keys import Keys
from slm_native.spec import ModelSpec


def architecture_names() -> list[str]:
    """The architectures that there is a file for."""
    return sorted(m.name for m in pkgutil.iter_modules(architectures.__path__) if not m.name.startswith("_"))


def read_spec(gguf: GgufFile) -> ModelSpec:
    """Read what a file says about its model; no tensor is looked at but the embedding's shape.

    Raises:
        UnsupportedModel: the architecture, or the value of a key, is not implemented; or a key is missing.
        InvalidModelFile: a value that cannot be.
    """
    keys = Keys(gguf)
    if keys.architecture not in architecture_names():
        accepted = ", ".join(architecture_names())
        raise UnsupportedModel(
            f"{gguf.path}: architecture {shown(keys.architecture)} is unknown to the native"
            f" engine (accepted: {accepted})"
        )
    module = importlib.import_module(f"{architectures.__name__}.{keys.architecture}")
    spec: ModelSpec = module.spec(keys)
    keys.refuse_others()
    return spec
