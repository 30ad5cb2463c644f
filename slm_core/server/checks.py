"""Checks of options."""

from __future__ import annotations

import math
from collections.abc import Collection

from slm_core.errors import InvalidOption
from slm_core.numerics import shown


def check_texts(name: str, texts: object, *others: type) -> None:
    """Raise ``InvalidOption`` if an option is not a collection of texts: a text alone would count as its letters.

    The error does not show the value, which may be a secret.

    Args:
        name: the option.
        texts: its value.
        others: types of which the items may be, too.
    """
    if isinstance(texts, str) or not isinstance(texts, Collection):
        raise InvalidOption(f"{name} is of type {type(texts).__name__} (accepted: a tuple or list of texts)")
    for text in texts:
        if not isinstance(text, (str, *others)):
            raise InvalidOption(
                f"{name} has an item of type {type(text).__name__} (accepted: a tuple or list of texts)"
            )


def check_number(name: str, value: object, *, least: float, is_integer: bool = False) -> None:
    """Raise ``InvalidOption`` if an option is not a finite number from ``least`` on.

    Args:
        name: the option.
        value: its value.
        least: the least value.
        is_integer: whether it has to be an integer.
    """
    kinds = (int,) if is_integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf:
        kind = "an integer" if is_integer else "a finite number"
        raise InvalidOption(f"{name}={shown(value)} (accepted: {kind} from {least} on)")
