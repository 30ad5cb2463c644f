"""Short lines for ``repr``: previews of texts, counts, and the options that differ from their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TEXT_LIMIT = 80
"""The largest number of characters of a text in a repr."""
_ITEMS = 6
"""The largest number of items of a collection in a repr."""


def preview(text: str, limit: int = TEXT_LIMIT) -> str:
    """A text as a Python literal; the middle of a long text is left out."""
    if len(text) <= limit:
        return repr(text)
    n_tail = limit // 3
    return repr(f"{text[: limit - n_tail - 3]} … {text[-n_tail:]}")


def count(n: int, noun: str) -> str:
    """A number with its noun: "1 token", "12,345 tokens"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def rounded(n: int) -> str:
    """A large number with three digits and a unit: "2.83M"."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return str(n)


def number_of_bytes(n: int) -> str:
    """Bytes with a binary unit: "3.1 MiB"."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"


def compact(value: object) -> str:
    """A short repr of a plain value: floats with four digits, long texts and collections shortened."""
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, str):
        return preview(value)
    if isinstance(value, bytes):
        return f"<{count(len(value), 'byte')}>"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return _items("{", [f"{compact(key)}: {compact(each)}" for key, each in _first(value.items())], "}", len(value))
    if isinstance(value, list):
        return _items("[", [compact(each) for each in _first(value)], "]", len(value))
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return _items("(", [compact(each) for each in _first(value)], f"{comma})", len(value))
    return repr(value)


def changed_fields(options: DataclassInstance, *positional: str) -> str:
    """The call that makes a dataclass, without the fields that have their defaults.

    Args:
        options: the dataclass.
        positional: fields that are shown by their value alone, before the others.
    """
    first = [compact(getattr(options, name)) for name in positional]
    others = [
        f"{field.name}={compact(getattr(options, field.name))}"
        for field in fields(options)
        if field.name not in positional and getattr(options, field.name) != _default(field)
    ]
    return f"{type(options).__name__}({', '.join(first + others)})"


def signature(thing: object, *parts: str) -> str:
    """The line of a live object: its class and parts, in angle brackets."""
    return f"<{type(thing).__name__}: {', '.join(part for part in parts if part)}>"


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _first(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_ITEMS), strict=False)]


def _items(opening: str, shown: Sequence[str], closing: str, n: int) -> str:
    more = [f"… {n - len(shown):,} more"] if n > len(shown) else []
    return opening + ", ".join([*shown, *more]) + closing
