"""Checks of arguments at the start of a call: the error names the argument, shows its value and the accepted values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slm_core.errors import InvalidOption, InvalidToken
from slm_core.numerics import as_integer, shown

_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, type)
"""Iterable types (an Enum class is iterable, too) whose items the caller hardly meant."""
IDS = "a list of token ids"


def refused(name: str, value: object, accepted: str) -> InvalidOption:
    """The error for an argument."""
    return InvalidOption(f"{name}={shown(value)} (accepted: {accepted})")


def check_kind(name: str, value: object, kind: type, *others: type) -> None:
    """Refuse a value that is neither None nor of the kind: another value could be ignored silently.

    Raises:
        InvalidOption: with the accepted values.
    """
    if value is not None and not isinstance(value, (kind, *others)):
        raise refused(name, value, f"{' or '.join(each.__name__ for each in (kind, *others))}, None")


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is neither None, True nor False: every other text would count as True.

    Raises:
        InvalidOption: another value.
    """
    if value is not None and not isinstance(value, bool):
        raise refused(name, value, "True, False, None")


def check_text(name: str, value: object) -> None:
    """Refuse a value that is not a text.

    Raises:
        InvalidOption: another value.
    """
    if not isinstance(value, str):
        raise refused(name, value, "a text")


def check_function(name: str, value: object) -> None:
    """Refuse a value that is neither None nor callable, before it is called in the middle of an answer.

    Raises:
        InvalidOption: another value.
    """
    if value is not None and not callable(value):
        raise refused(name, value, "a function, None")


def check_methods(name: str, value: object, methods: Iterable[str], accepted: str) -> None:
    """Refuse an object that lacks a method, and a class in place of its instance.

    Raises:
        InvalidOption: another value.
    """
    if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
        raise refused(name, value, accepted)


def checked_list(name: str, value: Iterable[Any], accepted: str) -> list[Any]:
    """The items of an iterable. A text, bytes and a mapping are refused: the caller did not mean their items.

    Raises:
        InvalidOption: another value.
    """
    if isinstance(value, _NO_LISTS) or not isinstance(value, Iterable):
        raise refused(name, value, accepted)
    return list(value)


def checked_texts(name: str, value: Iterable[str]) -> list[str]:
    """The texts of a list. A single text is refused: its items are characters.

    Raises:
        InvalidOption: not a list of texts.
    """
    texts = checked_list(name, value, "a list of texts")
    for i, text in enumerate(texts):
        check_text(f"{name}[{i}]", text)
    return texts


def checked_functions(name: str, value: Iterable[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    """The functions of a list.

    Raises:
        InvalidOption: not a list, or an item that cannot be called.
    """
    functions = checked_list(name, value, "a list of functions")
    for i, function in enumerate(functions):
        if not callable(function):
            raise refused(f"{name}[{i}]", function, "a function")
    return tuple(functions)


def checked_id(token: object, size: int) -> int:
    """A token id of any integer type, as an integer of Python.

    Args:
        token: the id.
        size: the number of tokens of the vocabulary.

    Raises:
        InvalidToken: not an integer, or outside the vocabulary.
    """
    number = as_integer(token)
    if number is None:
        raise InvalidToken(f"token {shown(token)} is not an integer (accepted: 0 to {size - 1})")
    if not 0 <= number < size:
        raise InvalidToken(f"token {number} is outside the vocabulary (0 to {size - 1})")
    return number


def checked_tokens(name: str, value: Iterable[int], accepted: str = IDS) -> list[int]:
    """Token ids of any integer type, such as an array's, as integers of Python; they may be outside the vocabulary.

    Raises:
        InvalidOption: not a list of integers.
    """
    tokens = [as_integer(token) for token in checked_list(name, value, accepted)]
    if None in tokens:
        raise refused(name, value, accepted)
    return [token for token in tokens if token is not None]
