"""Keyword arguments of calls with many: an unknown one is an error that names the one that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from slm_core.errors import UnknownOption
from slm_core.hints import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that raises ``UnknownOption`` for an unknown keyword."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    accepted = [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]

    @functools.wraps(function)
    def checked(*args: _P.args, **keywords: _P.kwargs) -> _R:
        unknown = next((name for name in keywords if name not in accepted), None)
        if unknown is not None:
            names = ", ".join(name for name in accepted if name != "self")
            hint = did_you_mean(unknown, accepted)
            raise UnknownOption(f"{function.__name__}() has no argument {unknown!r} (accepted: {names}{hint})")
        return function(*args, **keywords)

    return checked
