"""Infers the syntax of calls from the template's rendering of a test call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from slm_formatters.parsers.answer import CallBody, CallSyntax
from slm_formatters.parsers.json_calls import JsonCalls
from slm_formatters.parsers.named_calls import Arguments, Field, HeaderPart, JsonArguments, NamedCalls
from slm_formatters.parsers.probing import (
    ARGUMENTS,
    IDS,
    KEYS,
    LAST_TEXT,
    NAME,
    NUMBER,
    OTHER_NAME,
    TEXT,
    is_marker,
    shared_end,
    shared_start,
    tokens,
    words,
)
from slm_formatters.parsers.python_calls import PythonCalls
from slm_formatters.parsers.tagged import BareKeyArguments, NestedArguments, TaggedArguments


@dataclass(frozen=True, slots=True)
class RenderedCall:
    """A call in a rendered text.

    Attributes:
        body: its syntax between ``begin`` and ``end``.
        begin: the text before it.
        end: the text after it.
        mark: a text that belongs to the tag after it.
    """

    body: CallBody
    begin: str
    end: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Inferred:
    """The syntax of calls.

    Attributes:
        calls: the syntax with markers, or None.
        bare: the syntax without markers, or None.
        rest: the text after the calls.
    """

    calls: CallSyntax | None = None
    bare: CallBody | None = None
    rest: str = ""


def infer_calls(one: str, two: str) -> Inferred:
    """Infer the syntax of calls.

    Args:
        one: the text of an answer with one call, from its beginning to its end.
        two: the text with two calls, or "".
    """
    call = next((result for infer in (_json, _python, _named) if (result := infer(one)) is not None), None)
    if call is None:
        return Inferred()
    if not call.begin.strip():
        bare = replace(call.body, bare=True) if isinstance(call.body, JsonCalls | PythonCalls) else None
        return Inferred(None, bare, call.end)
    return _with_markers(call, one, two)


def _json(text: str) -> RenderedCall | None:
    """A JSON object with the name, optionally in a list."""
    for start, value, end in _json_values(text):
        call = value[0] if isinstance(value, list) and value else value
        if isinstance(call, dict) and (body := _json_body(call)) is not None:
            return RenderedCall(replace(body, listed=isinstance(value, list)), text[:start], text[end:])
    return None


def _json_body(call: dict[str, object]) -> JsonCalls | None:
    if NAME in call:
        return JsonCalls(keyed=True)
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    keys = {json.dumps(value): key for key, value in inner.items()}
    name = keys.get(json.dumps(NAME))
    arguments = keys.get(json.dumps(ARGUMENTS)) or keys.get(json.dumps(json.dumps(ARGUMENTS)))
    if name is None or arguments is None:
        return None
    extra = [key for key, value in (call | inner).items() if key not in (name, arguments, "type", "function", "index")]
    return JsonCalls(name, arguments, extra[0] if extra else "id", wrapped=inner is not call)


def _json_values(text: str) -> Iterator[tuple[int, object, int]]:
    decoder = json.JSONDecoder()
    for start, char in enumerate(text):
        if char in "{[":
            try:
                value, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            yield start, value, end


def _python(text: str) -> RenderedCall | None:
    """``NAME(KEY=...)``."""
    start = text.find(f"{NAME}({KEYS[0]}=")
    end = text.find(")", start)
    if start < 0 or end < 0:
        return None
    begin, after = text[:start].rstrip(), text[end + 1 :].lstrip()
    if begin.endswith("["):
        begin, after = begin[:-1], after.removeprefix("]")
    return RenderedCall(PythonCalls(), begin, after)


def _named(text: str) -> RenderedCall | None:
    """The name, then the arguments in any other syntax."""
    first = text.find(KEYS[0])
    name = text.rfind(NAME, 0, first)
    if min(first, name) < 0:
        return None
    before, after = text[:name], text[name + len(NAME) :]
    inferred = _json_arguments(after) or _bare_keys(after) or _nested(after) or _tagged(after)
    if inferred is None:
        return None
    arguments, head, end, mark = inferred
    begin, header = _header(before, head)
    or_json = header[0] is Field.NAME and isinstance(arguments, JsonArguments)
    return RenderedCall(NamedCalls(header, arguments, or_json), begin, end, mark)


_ArgumentSyntax = tuple[Arguments, str, str, str]
"""The arguments, the text between the name and the arguments, the text after them, and the mark of tags."""


def _json_arguments(text: str) -> _ArgumentSyntax | None:
    for start, value, end in _json_values(text):
        if value == ARGUMENTS:
            return JsonArguments(), text[:start], text[end:], ""
    return None


def _bare_keys(text: str) -> _ArgumentSyntax | None:
    """``{KEY:<quote>TEXT<quote>,...}``."""
    start, end = text.find("{"), text.rfind("}")
    value = text.find(f"{KEYS[0]}:")
    if not 0 <= start < value or text[start + 1 : value].strip():
        return None
    quote = text[value + len(KEYS[0]) + 1 : text.find(TEXT)].strip()
    if not quote:
        return None
    return BareKeyArguments(quote), text[:start], text[end + 1 :], ""


def _nested(text: str) -> _ArgumentSyntax | None:
    """Elements with the keys as names."""
    first = text.find(f"<{KEYS[0]}>")
    close = text.find(f"</{KEYS[0]}>")
    last = text.find(f"</{KEYS[-1]}>")
    if not 0 <= first < close < last:
        return None
    value = text.find(TEXT, first) + len(TEXT)
    mark = text[value:close].strip()
    if not text[:first].endswith(mark):
        return None
    return NestedArguments(mark), text[: first - len(mark)], text[last + len(f"</{KEYS[-1]}>") :], mark


def _tagged(text: str) -> _ArgumentSyntax | None:
    """A marker before each key, a marker between key and value, and a marker after each value."""
    offsets = [text.find(part) for part in (KEYS[0], TEXT, KEYS[1], str(NUMBER), KEYS[2], LAST_TEXT)]
    if offsets != sorted(offsets) or offsets[0] < 0:
        return None
    lengths = [len(part) for part in (KEYS[0], TEXT, KEYS[1], str(NUMBER), KEYS[2])]
    gaps = [text[at + length : after] for at, length, after in zip(offsets[:-1], lengths, offsets[1:], strict=True)]
    head, rest = text[: offsets[0]], text[offsets[-1] + len(LAST_TEXT) :]
    begin = shared_end(head, gaps[1]).strip() or _last_marker(gaps[1])
    between = gaps[1].strip().removesuffix(begin).strip()
    value_end = shared_start(between, rest.strip()).strip()
    if not begin or not value_end or not gaps[0].strip():
        return None
    text_key_gap = gaps[0] if gaps[0].split() != gaps[2].split() else ""
    tail = rest.partition(value_end)[2]
    arguments = TaggedArguments(
        begin,
        words(gaps[2]),
        value_end,
        words(text_key_gap),
        padded=gaps[0].endswith("\n") and gaps[1].startswith("\n"),
        closing=tuple(tail.split()),
    )
    return arguments, head[: head.rindex(begin)], tail, ""


def _last_marker(text: str) -> str:
    pieces = [token for token in tokens(text) if token.strip()]
    return pieces[-1] if pieces else ""


def _header(before: str, head: str) -> tuple[str, tuple[HeaderPart, ...]]:
    """Split the text before the name, and between the name and the arguments, into the beginning and the header."""
    left, separator, right = (words(piece) for piece in head.partition(IDS[0]))
    rest: list[HeaderPart] = [(left, Field.ID) if left else Field.ID, right] if separator else [left]
    parts: list[HeaderPart] = [Field.NAME, *rest]
    if IDS[0] in before:
        before, _, middle = before.partition(IDS[0])
        parts = [Field.ID, words(middle), *parts]
    return before, tuple(part for part in parts if part)


def _with_markers(call: RenderedCall, one: str, two: str) -> Inferred:
    """Separate the markers of one call from the markers of all calls together."""
    begin, end = call.begin.strip(), call.end.strip()
    between = _between(call, one, two)
    first = shared_end(begin, between, call.mark).strip()
    if not first and between and end.removeprefix(between):  # in the section, a call begins with its name
        return Inferred(CallSyntax(call.body, "", words(between), (begin, end.removeprefix(between).strip())))
    if not first:
        last = end if isinstance(call.body, NamedCalls) else _until_marker(end)
        return Inferred(_open_early(CallSyntax(call.body, begin, words(last))), rest=end.removeprefix(last))
    last = between.removesuffix(first).strip()
    opening, closing = begin.removesuffix(first).strip(), end.removeprefix(last).strip()
    section = (opening, _until_marker(closing, call.mark)) if opening else ("", "")
    return Inferred(
        _open_early(CallSyntax(call.body, first, words(last), section)), rest=closing.removeprefix(section[1])
    )


def _until_marker(text: str, mark: str = "") -> str:
    """A text up to the end of its first marker; the whole text if it has none."""
    pieces = tokens(text, mark)
    first = next((at for at, token in enumerate(pieces) if is_marker(token) or (mark and mark in token)), len(pieces))
    return "".join(pieces[: first + 1])


def _between(call: RenderedCall, one: str, two: str) -> str:
    """The text between two calls; "" if it is unknown, or if one pair of markers encloses both."""
    same = one.removesuffix(call.end)
    if not isinstance(call.body, NamedCalls) or not two.startswith(same):
        return ""
    remainder = two[len(same) :]
    names = [at for at in (remainder.find(OTHER_NAME), remainder.find(IDS[1])) if at >= 0]
    return remainder[: min(names, default=0)].strip()


def _open_early(calls: CallSyntax) -> CallSyntax:
    """Let the first marker open a call; white space after it may vary."""
    begin, *later_words = calls.begin.split(None, 1)
    if not later_words or not isinstance(calls.body, NamedCalls) or calls.section[0] == begin:
        return calls
    return replace(calls, begin=begin, body=replace(calls.body, header=(words(later_words[0]), *calls.body.header)))
