"""Puts a mutant into a process that has imported the code: functions get other code, wherever they are referred to."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterator
from pathlib import Path

from mutants.edits import Mutant, mutated

_Key = tuple[str, int]
_LRU_CACHE = type(functools.cache(lambda: None))


class NotAMutant(Exception):
    """The change compiles to the same code, to none, or is in code that is not kept as a function."""


def patch(mutant: Mutant, root: Path) -> None:
    """Change the functions of this process, and forget what those with a cache had computed.

    Raises:
        NotAMutant: nothing would change.
    """
    path = root / mutant.path
    try:
        module = compile(mutated(path.read_text(), str(path), mutant.index), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise NotAMutant(f"does not compile: {error}") from error
    new = {(code.co_qualname, code.co_firstlineno): code for code in _codes(module)}
    n_changed = 0
    for function in _functions_of(path):
        code = new.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if code is not None and _differ(code, function.__code__):
            if code.co_freevars != function.__code__.co_freevars:
                raise NotAMutant("closes over other variables")
            function.__code__ = code
            n_changed += 1
    if not n_changed:
        raise NotAMutant("compiles to the same code")
    for cached in _objects(_LRU_CACHE):
        if getattr(getattr(cached.__wrapped__, "__code__", None), "co_filename", "") == str(path):
            cached.cache_clear()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _functions_of(path: Path) -> list[types.FunctionType]:
    return [found for found in _objects(types.FunctionType) if found.__code__.co_filename == str(path)]


def _objects(kind: type) -> Iterator:
    return (found for found in gc.get_objects() if type(found) is kind)


def _differ(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two codes do different things: where their lines are does not matter."""
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
