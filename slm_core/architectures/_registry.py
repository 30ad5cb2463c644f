"""Finds the architectures, here and in plugins, and reads files with them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from slm_core import plugins
from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ModelSpec
from slm_core.errors import PluginError, UnsupportedModel
from slm_core.gguf import WeightSource
from slm_core.gguf.cursor import shown
from slm_core.submodules import public_modules

_HYPHENATED = {"command_r": "command-r", "gpt_oss": "gpt-oss", "falcon_h1": "falcon-h1"} | {
    name: name.replace("_", "-") for name in ("nomic_bert", "modern_bert", "gemma_embedding")
}
"""Modules of architectures whose name is not a valid module name."""


def architecture_names() -> list[str]:
    """The names of all architectures: the modules of this package, and plugins'."""
    return sorted({*_modules(), *plugins.registry().architectures})


def read_spec(gguf: WeightSource, *, strict: bool = True) -> ModelSpec:
    """Read a file's ``ModelSpec`` from its metadata, its tensor names and the embedding's shape; no weights are read.

    Args:
        gguf: the open file.
        strict: refuse unknown keys; without it the result may ignore their meaning.

    Raises:
        UnsupportedModel: the architecture, or the value of a key, is not implemented; or a key is missing.
        InvalidModelFile: a value is impossible.
        PluginError: a plugin provides an architecture that exists already, or that cannot be imported.
    """
    keys = Keys(gguf)
    spec = _reader(keys)(keys)
    if strict:
        keys.refuse_others()
    return spec


def _reader(keys: Keys) -> Callable[[Keys], ModelSpec]:
    name, modules, registry = keys.architecture, _modules(), plugins.registry()
    if name in registry.architectures:
        if name in modules:
            raise PluginError(f"a plugin provides the architecture {name!r}, which slm_core has")
        return cast("Callable[[Keys], ModelSpec]", registry.architecture(name))
    if name not in modules:
        accepted = ", ".join(architecture_names())
        raise UnsupportedModel(f"{keys.gguf.path}: architecture {shown(name)} is unknown here (accepted: {accepted})")
    module = importlib.import_module(f"{__package__}.{modules[name]}")
    return cast("Callable[[Keys], ModelSpec]", module.spec)


def _modules() -> dict[str, str]:
    """The module of each architecture."""
    return {_HYPHENATED.get(name, name): name for name in public_modules(__package__)}
