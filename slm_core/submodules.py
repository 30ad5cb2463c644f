"""Lists the modules of a package that is its own registry: a new file is found without being named anywhere."""

from __future__ import annotations

import pkgutil
import sys


def public_modules(package: str) -> list[str]:
    """The names of the modules of an imported package, without names that begin with "_"."""
    return [module.name for module in pkgutil.iter_modules(sys.modules[package].__path__) if module.name[0] != "_"]
