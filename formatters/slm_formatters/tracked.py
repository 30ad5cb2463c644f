"""Text that tracks which of its characters are content.

A rendered prompt is control text of the template's author, with content of users, tools and models in between. Only
control text may spell special tokens. ``Text`` carries a mark for each character through every string operation of a
template. If an operation cannot be tracked per character, its whole result is content, so content never becomes control
text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, SupportsIndex

from markupsafe import Markup

from slm_core.errors import TemplateError
from slm_core.types import Segment
from slm_formatters.limits import current

_CONTENT, _GENERATED = 1, 2
_ALL_CONTENT = bytes([_CONTENT])
_ADD_GENERATED = bytes(mark | _GENERATED for mark in range(256))
_RUNS = re.compile(rb"\x00+|\x01+|\x02+|\x03+")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"}
_DIRECTIVE = re.compile(r"%(?:\((?P<key>[^()]*)\))?[#0\- +]*(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+))?[a-zA-Z%]")
_NUMBERS = re.compile(r"\d+")
_MAX_WIDTH = 10_000
_PIECE_COST = 8

_SLICING = frozenset({"strip", "lstrip", "rstrip", "removeprefix", "removesuffix"})
_SPLITTING = frozenset({"split", "rsplit", "splitlines", "partition", "rpartition"})
_CASING = frozenset({"capitalize", "casefold", "lower", "swapcase", "title", "upper"})
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_ASKING = frozenset({"count", "endswith", "find", "index", "rfind", "rindex", "startswith"}) | {
    name for name in dir(str) if name.startswith("is")
}


class Text(str):
    """A string in which some characters may be content. An ordinary ``str`` is control text as a whole.

    Equality, hashing, searching and ordering are the same as for ``str``, so marks do not affect templates.

    Args:
        text: the characters.
        mask: one byte per character: bit 0 for content, bit 1 within ``{% generation %}``; None for content as a whole.
    """

    __slots__ = ("_mask",)
    _mask: bytes

    def __new__(cls, text: str, mask: bytes | None = None) -> Self:  # noqa: D102
        self = str.__new__(cls, text)
        self._mask = _ALL_CONTENT * len(text) if mask is None else mask
        return self

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> Text:
        if isinstance(key, slice):
            return Text(str.__getitem__(self, key), self._mask[key])
        return Text(str.__getitem__(self, key), bytes([self._mask[key]]))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


class SafeText(Text):
    """A ``Text`` after the filter ``safe``: text that is added to it is escaped, as with ``Markup``."""

    def __html__(self) -> str:
        return self


# Templates know only strings: error messages about them are the same as for a plain string.
for _kind in (Text, SafeText):
    _kind.__name__, _kind.__qualname__, _kind.__module__ = "str", "str", "builtins"


def mark(value: object) -> object:
    """Copy plain data, with all strings, including keys, as content.

    Raises:
        TemplateError: a value that is not plain data.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return Text(str.__str__(value))
    if isinstance(value, Mapping):
        return {mark(key): mark(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [mark(item) for item in value]
    raise TemplateError(
        f"a chat template cannot be given a {type(value).__name__}"
        " (accepted: None, bool, int, float, str, and sequences and mappings of these)"
    )


def segments(text: str) -> list[Segment]:
    """Split at every change between control text and content, and at the ends of generated text."""
    mask, segments = _mask_of(text), []
    for run in _RUNS.finditer(mask):
        kind = mask[run.start()]
        piece = str.__getitem__(text, slice(*run.span()))
        segments.append(Segment(piece, control=not kind & _CONTENT, generated=bool(kind & _GENERATED)))
    return segments


def generated(text: str) -> Text:
    """The same text, marked as the assistant's."""
    return Text(str.__str__(text), _mask_of(text).translate(_ADD_GENERATED))


def seal(text: str) -> Text:
    """The same characters, all of them content."""
    return Text(str.__str__(text))


def to_text(value: object) -> str:
    """The text that a template writes for a value."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, dict)):
        current().check(value)
        return seal(str(value))
    return str(value)


def concat(pieces: Iterable[str]) -> str:
    """``"".join``, with the marks of each piece."""
    run, parts, marked, length = current(), [], False, 0
    for piece in pieces:
        parts.append(piece)
        marked = marked or isinstance(piece, Text)
        length += len(piece)
        run.build(len(piece), length)
    text = "".join(parts)
    return Text(text, b"".join(map(_mask_of, parts))) if marked else text


def add(left: str, right: str) -> str:
    """``left + right``; if one text is safe, the other one is escaped."""
    if not isinstance(left, (Markup, SafeText)) and not isinstance(right, (Markup, SafeText)):
        return concat((left, right))
    return safe(concat((_escape(left), _escape(right))))


def safe(text: str) -> str:
    """Mark as safe, so that text which is added to it is escaped."""
    return SafeText(str.__str__(text), _mask_of(text)) if isinstance(text, Text) else Markup(text)  # noqa: S704


def percent(template: str, values: object) -> str:
    """``template % values``."""
    for directive in _DIRECTIVE.finditer(template):
        _check_width(*directive.group("width", "precision"))
    plain = str.__mod__(template, values)
    current().build(len(plain))
    arguments = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    end = 0
    for directive in _DIRECTIVE.finditer(template):
        pieces.append(template[end : directive.start()])
        pieces.append(_expand(directive, values, arguments))
        end = directive.end()
    pieces.append(template[end:])
    text = concat(pieces)
    return text if text == plain else seal(plain)


def _expand(directive: re.Match[str], values: object, arguments: Iterator[object]) -> str:
    """The text of one directive of a ``%`` format."""
    spec, key = str.__str__(directive.group()), directive["key"]
    if spec.endswith("%"):
        return "%"
    value = values[key] if key is not None and isinstance(values, Mapping) else next(arguments)
    if spec.endswith("s") and key is None and len(spec) == 2:
        return to_text(value)
    return seal(spec % ({key: value} if key is not None else (value,)))


def check_format(spec: str) -> None:
    """Refuse a format specification that pads without bounds."""
    _check_width(*_NUMBERS.findall(spec))


def _check_width(*numbers: str | None) -> None:
    for number in numbers:
        if number == "*" or (number and (len(number) > 5 or int(number) > _MAX_WIDTH)):
            raise TemplateError(f"the chat template formats with a width of {number} (accepted: up to {_MAX_WIDTH})")


def call_method(text: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of ``str``, with marks.

    Raises:
        TemplateError: templates may not use this method.
    """
    if name in _ASKING:
        return getattr(str, name)(text, *args, **kwargs)
    if name == "join":
        return _join(text, *args, **kwargs)
    if name == "replace":
        return _replace(text, *args, **kwargs)
    if name in _PADDING:
        return _pad(text, name, args, kwargs)
    if name not in _SLICING | _SPLITTING | _CASING:
        raise TemplateError(f"the chat template calls str.{name}, which is not available to templates")
    current().build(len(text))
    plain = getattr(str, name)(text, *args, **kwargs)
    if not isinstance(text, Text):
        return plain
    if name in _SPLITTING:
        current().spend(_PIECE_COST * len(plain))
        return type(plain)(_locate(text, plain, name, args, kwargs))
    if name in _CASING:
        return recased(text, plain)
    start = len(text) - len(plain) if name in {"lstrip", "removeprefix"} else text.find(plain)
    return text[start : start + len(plain)]


def recased(text: str, plain: str) -> str:
    """``plain``, which is ``text`` in another case, with marks; if the length changed, the whole result is content."""
    if not isinstance(text, Text):
        return plain
    return Text(plain, _mask_of(text)) if len(plain) == len(text) else seal(plain)


def _locate(
    text: Text, pieces: Iterable[str], name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[str]:
    """Find the pieces of a splitting method, which are in ``text`` in order."""
    separator = kwargs.get("sep", args[0] if args else None)
    gap = len(separator) if isinstance(separator, str) and name in {"split", "rsplit"} else 0
    whitespace = name == "splitlines" or (separator is None and name in {"split", "rsplit"})
    end = -gap
    for piece in pieces:
        start = text.find(piece, end) if whitespace else end + gap
        end = start + len(piece)
        yield text[start:end]


def _join(separator: str, pieces: Iterable[str]) -> str:
    """``separator.join(pieces)``."""
    pieces = list(pieces)
    if not isinstance(separator, Text) and not any(isinstance(piece, Text) for piece in pieces):
        current().build(sum(map(len, pieces)) + len(separator) * len(pieces))
        return str.join(separator, pieces)
    alternating = itertools.chain.from_iterable((separator, piece) for piece in pieces)
    return concat(itertools.islice(alternating, 1, None))


def _replace(text: str, old: str, new: str, count: SupportsIndex = -1) -> str:
    """``text.replace(old, new, count)``."""
    grown = len(text) + text.count(old) * max(len(new) - len(old), 0)
    current().build(grown)
    plain = str.replace(text, old, new, count)
    if not isinstance(text, Text) and not isinstance(new, Text):
        return plain
    if not old:
        return seal(plain)
    pieces = call_method(text, "split", old, count)
    return _join(new, pieces)


def _pad(text: str, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """``center``, ``expandtabs`` and similar methods: the whole result is content if any of the text is."""
    for width in (*args, *kwargs.values()):
        if isinstance(width, int):
            _check_width(str(width))
    current().build(len(text) + (text.count("\t") + 1) * _MAX_WIDTH if "\t" in text else len(text) + _MAX_WIDTH)
    plain: str = getattr(str, name)(text, *args, **kwargs)
    return seal(plain) if any(isinstance(part, Text) for part in (text, *args)) else plain


def _escape(text: str) -> str:
    """Escape for HTML, unless the text is safe."""
    if isinstance(text, (Markup, SafeText)):
        return text
    entities = [_ENTITIES.get(character, character) for character in text]
    mask = b"".join(bytes([mark]) * len(entity) for mark, entity in zip(_mask_of(text), entities, strict=True))
    return Text("".join(entities), mask)


def _mask_of(text: str) -> bytes:
    return text._mask if isinstance(text, Text) else bytes(len(text))  # noqa: SLF001
