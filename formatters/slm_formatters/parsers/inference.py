"""From what a template writes for a known call to how calls are written."""

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
class Written:
    """A call as it was written.

    Attributes:
        body: how it is written between ``begin`` and ``end``.
        begin: what comes before.
        end: what comes after.
        mark: text that belongs to the tag after it.
    """

    body: CallBody
    begin: str
    end: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Inferred:
    """How calls are written.

    Attributes:
        calls: with markers, or None.
        bare: without, or None.
        rest: what follows the calls.
    """

    calls: CallSyntax | None = None
    bare: CallBody | None = None
    rest: str = ""


def infer_calls(one: str, two: str) -> Inferred:
    """How calls are written.

    Args:
        one: what stands for one call, from the beginning to the end of the answer.
        two: the same for two calls, or "".
    """
    written = next((result for infer in (_json, _python, _named) if (result := infer(one)) is not None), None)
    if written is None:
        return Inferred()
    if not written.begin.strip():
        bare = replace(written.body, bare=True) if isinstance(written.body, JsonCalls | PythonCalls) else None
        return Inferred(None, bare, written.end)
    return _with_markers(written, one, two)


def _json(text: str) -> Written | None:
    """A JSON object with the name in it, perhaps in a list."""
    for start, value, end in _json_values(text):
        call = value[0] if isinstance(value, list) and value else value
        if isinstance(call, dict) and (body := _json_body(call)) is not None:
            return Written(replace(body, listed=isinstance(value, list)), text[:start], text[end:])
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
    others = [key for key, value in (call | inner).items() if key not in (name, arguments, "type", "function", "index")]
    return JsonCalls(name, arguments, others[0] if others else "id", wrapped=inner is not call)


def _json_values(text: str) -> Iterator[tuple[int, object, int]]:
    decoder = json.JSONDecoder()
    for start, char in enumerate(text):
        if char in "{[":
            try:
                value, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            yield start, value, end


def _python(text: str) -> Written | None:
    """``NAME(KEY=...)``."""
    start = text.find(f"{NAME}({KEYS[0]}=")
    end = text.find(")", start)
    if start < 0 or end < 0:
        return None
    begin, rest = text[:start].rstrip(), text[end + 1 :].lstrip()
    if begin.endswith("["):
        begin, rest = begin[:-1], rest.removeprefix("]")
    return Written(PythonCalls(), begin, rest)


def _named(text: str) -> Written | None:
    """The name, then the arguments in any other manner."""
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
    return Written(NamedCalls(header, arguments, or_json), begin, end, mark)


_Found = tuple[Arguments, str, str, str]
"""Arguments, what stands between name and them, what comes after them, and the mark of tags."""


def _json_arguments(text: str) -> _Found | None:
    for start, value, end in _json_values(text):
        if value == ARGUMENTS:
            return JsonArguments(), text[:start], text[end:], ""
    return None


def _bare_keys(text: str) -> _Found | None:
    """``{KEY:<quote>TEXT<quote>,...}``."""
    start, end = text.find("{"), text.rfind("}")
    value = text.find(f"{KEYS[0]}:")
    if not 0 <= start < value or text[start + 1 : value].strip():
        return None
    quote = text[value + len(KEYS[0]) + 1 : text.find(TEXT)].strip()
    if not quote:
        return None
    return BareKeyArguments(quote), text[:start], text[end + 1 :], ""


def _nested(text: str) -> _Found | None:
    """Elements that are named by their keys."""
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


def _tagged(text: str) -> _Found | None:
    """A marker before each key, one between key and value, and one after each value."""
    places = [text.find(part) for part in (KEYS[0], TEXT, KEYS[1], str(NUMBER), KEYS[2], LAST_TEXT)]
    if places != sorted(places) or places[0] < 0:
        return None
    lengths = [len(part) for part in (KEYS[0], TEXT, KEYS[1], str(NUMBER), KEYS[2])]
    gaps = [text[at + length : after] for at, length, after in zip(places[:-1], lengths, places[1:], strict=True)]
    head, rest = text[: places[0]], text[places[-1] + len(LAST_TEXT) :]
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
    """Split what stands before the name, and between it and the arguments, into the beginning and the header."""
    left, separator, right = (words(piece) for piece in head.partition(IDS[0]))
    rest: list[HeaderPart] = [(left, Field.ID) if left else Field.ID, right] if separator else [left]
    parts: list[HeaderPart] = [Field.NAME, *rest]
    if IDS[0] in before:
        before, _, middle = before.partition(IDS[0])
        parts = [Field.ID, words(middle), *parts]
    return before, tuple(part for part in parts if part)


def _with_markers(written: Written, one: str, two: str) -> Inferred:
    """Tell what opens and closes one call from what opens and closes all of them."""
    begin, end = written.begin.strip(), written.end.strip()
    between = _between(written, one, two)
    first = shared_end(begin, between, written.mark).strip()
    if not first and between and end.removeprefix(between):  # nothing but its name opens a call within the section
        return Inferred(CallSyntax(written.body, "", words(between), (begin, end.removeprefix(between).strip())))
    if not first:
        last = end if isinstance(written.body, NamedCalls) else _until_marker(end)
        return Inferred(_open_early(CallSyntax(written.body, begin, words(last))), rest=end.removeprefix(last))
    last = between.removesuffix(first).strip()
    opening, closing = begin.removesuffix(first).strip(), end.removeprefix(last).strip()
    section = (opening, _until_marker(closing, written.mark)) if opening else ("", "")
    return Inferred(
        _open_early(CallSyntax(written.body, first, words(last), section)), rest=closing.removeprefix(section[1])
    )


def _until_marker(text: str, mark: str = "") -> str:
    """A text up to the end of the first marker in it; all of it where there is none."""
    pieces = tokens(text, mark)
    first = next((at for at, token in enumerate(pieces) if is_marker(token) or (mark and mark in token)), len(pieces))
    return "".join(pieces[: first + 1])


def _between(written: Written, one: str, two: str) -> str:
    """What stands between two calls; "" where it is not known, or where one pair of markers holds them both."""
    same = one.removesuffix(written.end)
    if not isinstance(written.body, NamedCalls) or not two.startswith(same):
        return ""
    rest = two[len(same) :]
    names = [at for at in (rest.find(OTHER_NAME), rest.find(IDS[1])) if at >= 0]
    return rest[: min(names, default=0)].strip()


def _open_early(calls: CallSyntax) -> CallSyntax:
    """Let the first marker be enough to open a call, white space after it being free."""
    begin, *rest = calls.begin.split(None, 1)
    if not rest or not isinstance(calls.body, NamedCalls) or calls.section[0] == begin:
        return calls
    return replace(calls, begin=begin, body=replace(calls.body, header=(words(rest[0]), *calls.body.header)))
