"""Keyword arguments of calls with many: an unknown one is an error that names the one that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from slm_core.errors import UnknownOption
from slm_core.hints import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")


def check_keywords(function: str, keywords: Iterable[str], accepted: Sequence[str]) -> None:
    """Raise ``UnknownOption`` if a function got a keyword that it does not accept."""
    unknown = next((name for name in keywords if name not in accepted), None)
    if unknown is not None:
        names = ", ".join(name for name in accepted if name != "self")
        raise UnknownOption(
            f"{function}() has no argument {unknown!r} (accepted: {names}{did_you_mean(unknown, accepted)})"
        )


def checked_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that raises ``UnknownOption`` for an unknown keyword."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    accepted = [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]

    @functools.wraps(function)
    def checked(*args: _P.args, **keywords: _P.kwargs) -> _R:
        check_keywords(function.__name__, keywords, accepted)
        return function(*args, **keywords)

    return checked
