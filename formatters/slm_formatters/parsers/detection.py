"""Detects the format of a model's answers from its template, which writes calls like the model.

Test conversations are rendered, and the parts of a call are located in the result. Detection does not use names of
models, so it also works for unknown templates.
"""

from __future__ import annotations

import re
from dataclasses import replace
from os.path import commonprefix

from slm_formatters.parsers.answer import THINK, AnswerFormat, CallBody, CallSyntax
from slm_formatters.parsers.channels import ChannelFormat
from slm_formatters.parsers.formats import FORMATS, Format
from slm_formatters.parsers.inference import infer_calls
from slm_formatters.parsers.json_calls import JsonCalls
from slm_formatters.parsers.named_calls import NamedCalls
from slm_formatters.parsers.probing import (
    ASKED,
    NAME,
    SAID,
    THOUGHT,
    Probes,
    Render,
    is_marker,
    probe,
    shared_end,
    shared_start,
    tokens,
)
from slm_formatters.parsers.tagged import TaggedArguments

DERIVED = "derived from the template"

_REASONING = re.compile(r"([<\[])([^\s<>\[\]/'\"]*think[^\s<>\[\]/'\"]*)([>\]])", re.IGNORECASE)


def detect(render: Render, source: str) -> Format:
    """The format of the answers to a template's prompts.

    Args:
        render: renders a conversation with the template.
        source: the template; if it renders no call, the markers of known formats in it decide.
    """
    probes = probe(render)
    channels = _known_channels(probes) or _channels(probes)
    if channels is not None:
        return channels
    reasoning = _reasoning(probes, source)
    answers = (_answer(probes, text, probes.answered, reasoning) for text in (probes.called, probes.called_twice))
    inferred = infer_calls(*answers)
    named = _in_source(source) if inferred.calls is None else None
    if named is not None:
        form = AnswerFormat(
            named.name,
            named.calls,
            inferred.bare or named.bare,
            (reasoning,),
            named.dropped,
        )
    else:
        form = AnswerFormat(DERIVED, inferred.calls, inferred.bare, (reasoning,))
    markers = {*form.dropped, *_before_content(probes, form), *_markers(inferred.rest)}
    return replace(form, name=_name(form), dropped=_compatible(form, markers, _after_content(probes)))


def _name(form: AnswerFormat) -> str:
    """The name of the known format with the same calls."""
    for other in FORMATS.values():
        if isinstance(other, AnswerFormat) and _parser_syntax(other) == _parser_syntax(form):
            return other.name
    return form.name


def _parser_syntax(form: AnswerFormat) -> tuple[CallSyntax | None, CallBody | None]:
    """The syntax of calls for a parser, without details that only a grammar uses."""
    calls = form.calls and replace(form.calls, body=_normal_body(form.calls.body))
    return calls, form.bare and _normal_body(form.bare)


def _normal_body(body: CallBody) -> CallBody:
    return body.normal() if isinstance(body, JsonCalls) else body


def _answer(probes: Probes, text: str, other: str, reasoning: tuple[str, str] = THINK) -> str:
    """The part of a text that differs from another text, without an empty block of reasoning at its beginning."""
    start, end = _answer_start(probes.prompt, text, other), len(shared_end(text, other))
    answer = text[start : len(text) - end] if start + end < len(text) else ""
    before, separator, after = answer.partition("".join(reasoning))
    return after if separator and not before.strip() else answer


def _answer_start(prompt: str, text: str, other: str) -> int:
    """The offset of the first difference of two answers to a prompt; it is never inside a word ("assistant:")."""
    start = len(shared_start(text, other))
    word = commonprefix([text[start:], other[start:]])  # noqa: RUF071  # these are no paths
    return start + next((n for n in range(len(word), 0, -1) if prompt.endswith(word[:n])), 0)


# Reasoning.


def _reasoning(probes: Probes, source: str) -> tuple[str, str]:
    """The markers that open and close reasoning."""
    for text, without, following in (
        (probes.thought, probes.answered, SAID),
        (probes.thought_called, probes.called, NAME),
    ):
        before, separator, after_thought = text.partition(THOUGHT)
        closing = _first_marker(after_thought[: after_thought.find(following)]) if following in after_thought else ""
        opening = before[len(shared_start(before, without)) :].strip()
        opening = opening or _prefilled(probes, closing)
        if is_marker(closing):
            opening = opening or _from_last_marker(before)
        if separator and opening and closing:
            return opening, closing
    for found_in_source in _REASONING.finditer(source):
        left, name, right = found_in_source.groups()
        for end in (f"{left}/{name}{right}", f"{left}{name.replace('START', 'END')}{right}"):
            if end in source and end != found_in_source.group():
                return found_in_source.group(), end
    pairs = [pair for form in FORMATS.values() if isinstance(form, AnswerFormat) for pair in form.reasoning]
    return next((pair for pair in pairs if all(marker in source for marker in pair)), THINK)


def _prefilled(probes: Probes, closing: str) -> str:
    """The text that a prompt adds before an answer, compared with the text before a plain answer."""
    common = shared_start(probes.prompt, probes.answered)
    extra = probes.prompt[len(common) :].strip()
    in_answer = any(is_marker(token) for token in tokens(common.partition(ASKED)[2]))
    return extra if in_answer and closing not in extra else ""


def _from_last_marker(text: str) -> str:
    pieces = tokens(text)
    last = max((at for at, token in enumerate(pieces) if is_marker(token)), default=len(pieces))
    return "".join(pieces[last:]).strip()


def _first_marker(text: str) -> str:
    return next((token for token in tokens(text) if is_marker(token)), text.strip())


# Markers around content.


def _after_content(probes: Probes) -> set[str]:
    """Markers that end a plain answer; one of them may also end reasoning."""
    after = _answer(probes, probes.answered, probes.called or probes.prompt).partition(SAID)[2]
    return _markers(after) | (_turn_end(shared_end(probes.called, probes.answered)) if probes.called else set())


def _before_content(probes: Probes, form: AnswerFormat) -> set[str]:
    """Markers between the start of an answer (or reasoning) and content."""
    openers = [NAME] if form.calls is None else [text for text in (form.calls.section[0], form.calls.begin) if text]
    markers = _markers(_answer(probes, probes.answered, probes.called or probes.prompt).partition(SAID)[0])
    for text, following in ((probes.thought, SAID), (probes.thought_called, openers[0])):
        after_thought = text.partition(THOUGHT)[2]
        if following in after_thought:
            markers |= _markers(after_thought[: after_thought.find(following)])
    return markers


def _turn_end(text: str) -> set[str]:
    """The markers at the end of a turn; without markers, the whole end, unless it is a plain word."""
    text = text.strip()
    return {token for token in tokens(text) if is_marker(token)} or ({text} if text and not text.isalnum() else set())


def _markers(text: str) -> set[str]:
    markers: list[str] = []
    for token in tokens(text):
        if is_marker(token):
            markers.append(token)
        elif markers and is_marker(markers[-1]) and token.isalpha():
            markers[-1] += token
    return set(markers)


def _compatible(form: AnswerFormat, markers: set[str], closing: set[str]) -> tuple[str, ...]:
    """The markers that are not part of the format's markers or of each other."""
    format_markers = [text for pair in form.reasoning for text in pair if text not in closing]
    if form.calls is not None:
        format_markers += [form.calls.begin, form.calls.end, *form.calls.section]
    compatible: list[str] = []
    for marker in sorted(markers | closing, key=len):
        clashes = (
            text in marker or (marker in text and not text.startswith(marker))
            for text in (*format_markers, *compatible)
            if text
        )
        if not any(clashes):
            compatible.append(marker)
    return tuple(sorted(compatible))


# Templates that do not show a call.


def _in_source(source: str) -> AnswerFormat | None:
    """The known format whose markers are all in the template; among several, the one with the most."""
    candidates = [form for form in FORMATS.values() if isinstance(form, AnswerFormat) and form.calls is not None]
    scores = {form.name: _score(form, source) for form in candidates}
    best = max(candidates, key=lambda form: scores[form.name])
    return best if scores[best.name] else None


def _score(form: AnswerFormat, source: str) -> int:
    """The number of characters of a format's markers; 0 if the template lacks one of them."""
    calls = form.calls
    assert calls is not None
    texts = [calls.begin, *calls.end.split(), *calls.section]
    if isinstance(calls.body, NamedCalls):
        texts += [word for part in calls.body.header if isinstance(part, str) for word in part.split()]
        if isinstance(calls.body.arguments, TaggedArguments):
            texts += [calls.body.arguments.begin, calls.body.arguments.value_end]
    return sum(map(len, texts)) if all(text in source for text in texts) else 0


# Answers of several messages.


def _known_channels(probes: Probes) -> ChannelFormat | None:
    shown = probes.called + probes.answered
    for form in FORMATS.values():
        if isinstance(form, ChannelFormat) and all(text in shown for text in form.shown_by):
            return form
    return None


def _channels(probes: Probes) -> ChannelFormat | None:
    """A format with headers that begin with a word, end with a marker, and name the tool of a call."""
    start = len(probes.prompt)
    opening = probes.answered[start:].partition(SAID)[0]
    words = [token for token in tokens(opening) if token.strip()]
    if (
        not probes.answered.startswith(probes.prompt)
        or len(words) < 2
        or is_marker(words[0])
        or not is_marker(words[-1])
    ):
        return None
    header_end = words[-1]
    head, _, call = probes.called[start:].partition(header_end)
    thought, _, after = probes.thought[start:].partition(header_end)
    after_thought = after.partition(THOUGHT)[2].partition(opening)[0]
    if NAME not in head or THOUGHT not in after or not is_marker(_first_marker(after_thought)):
        return None
    heads = [opening.removesuffix(header_end).strip(), thought.strip(), head.strip()]
    calls = infer_calls(call[: len(call) - len(shared_end(probes.called, probes.answered))], "").calls
    named = re.escape(heads[2]).replace(NAME, r"(?P<name>[^\s<]+)")
    return ChannelFormat(
        DERIVED,
        start=after_thought.replace(_first_marker(after_thought), "", 1).strip(),
        header_end=header_end,
        ends=(_first_marker(after_thought), _first_marker(probes.answered.partition(SAID)[2])),
        opens=(_shared_letters(heads),),
        reasoning=re.compile(rf"{re.escape(heads[1])}\s*$"),
        call=re.compile(rf"(?!{re.escape(heads[0])}\s*$){named}\s*$"),
        body=calls.body if calls is not None else None,
        framing=(calls.begin, calls.end) if calls is not None else ("", ""),
    )


def _shared_letters(texts: list[str]) -> str:
    """The common prefix of all texts."""
    length = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    return texts[0][:length]
