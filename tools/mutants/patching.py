"""Puts a mutant into a process that has imported the code, by changing the code of existing functions."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutants.edits import Mutant, mutated

_LRU_CACHE = type(functools.cache(lambda: None))


class NotAMutant(Exception):
    """The change compiles to the same code or not at all, or its code is not kept as a function."""


class Functions:
    """All functions of this process from some files, collected once before the process is forked.

    Args:
        files: the files.
    """

    def __init__(self, files: frozenset[Path]) -> None:
        names = {str(path) for path in files}
        gc.unfreeze()  # ``tests/conftest.py`` freezes its imports, and ``get_objects`` leaves out frozen objects
        objects = gc.get_objects()
        self._functions = [f for f in objects if type(f) is types.FunctionType and f.__code__.co_filename in names]
        self._caches = [f for f in objects if type(f) is _LRU_CACHE and _file_of(f) in names]
        gc.collect()
        gc.freeze()  # a collection in a forked process would copy all memory

    def patch(self, mutant: Mutant, root: Path) -> None:
        """Change the functions, and clear their caches.

        Raises:
            NotAMutant: the change has no effect.
        """
        path = root / mutant.path
        try:
            module = compile(mutated(path.read_text(), str(path), mutant.index), str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise NotAMutant(f"does not compile: {error}") from error
        new = {(code.co_qualname, code.co_firstlineno): code for code in _codes(module)}
        n_changed = 0
        for function in self._functions:
            old = function.__code__
            code = new.get((old.co_qualname, old.co_firstlineno)) if old.co_filename == str(path) else None
            if code is not None and _differ(code, old):
                if code.co_freevars != old.co_freevars:
                    raise NotAMutant("closes over other variables")
                function.__code__ = code
                n_changed += 1
        if not n_changed:
            raise NotAMutant("compiles to the same code")
        for cached in self._caches:
            if _file_of(cached) == str(path):
                cached.cache_clear()


def _file_of(cached: Any) -> str:
    return str(getattr(getattr(cached.__wrapped__, "__code__", None), "co_filename", ""))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _differ(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects behave differently; line numbers do not count."""
    same = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable", "co_flags")
    if any(getattr(one, name) != getattr(other, name) for name in same) or len(one.co_consts) != len(other.co_consts):
        return True
    for left, right in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(left, types.CodeType) and isinstance(right, types.CodeType):
            if _differ(left, right):
                return True
        elif (type(left), left) != (type(right), right):
            return True
    return False
