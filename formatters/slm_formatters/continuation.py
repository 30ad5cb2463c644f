"""Leaves the last message open, so that the model continues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slm_core.errors import TemplateError
from slm_core.types import Segment
from slm_formatters.messages import REASONING_FIELDS

_TAG = "ThisIsWhereItGoesOn"


class OpenEnd:
    """Marks the end of the last message with a tag, which is then found in the rendered prompt.

    Args:
        messages: the conversation.
        field: the field to continue: "content" (in a list of parts, its last text) or "reasoning_content".

    Attributes:
        messages: the conversation with the tag.

    Raises:
        TemplateError: the last message has no text in this field.
    """

    def __init__(self, messages: Sequence[Mapping[str, object]], field: str) -> None:
        if not messages:
            raise TemplateError("there is no message to continue")
        self._tag = _TAG
        while self._tag in str(messages):
            self._tag += "Q"
        self._field, self._continued = field, ""
        last = dict(messages[-1])
        aliases = REASONING_FIELDS if field in REASONING_FIELDS else ()
        for name in {field, *(alias for alias in aliases if last.get(alias) == last.get(field))}:
            last[name] = self._tagged(last.get(name))
        self.messages: list[Mapping[str, object]] = [*messages[:-1], last]

    def cut(self, segments: Sequence[Segment]) -> list[Segment]:
        """The segments before the tag, without trailing white space if the template strips it.

        Raises:
            TemplateError: the template omits a part of the field.
        """
        text = "".join(segment.text for segment in segments)
        end = text.rfind(self._tag)
        if end < 0 or self._continued.strip() not in text:
            raise TemplateError(f"the chat template does not write the whole {self._field} of the last message")
        if not text.startswith(f"{self._tag} ", end):
            end = len(text[:end].rstrip())
        return _first(segments, end)

    def _tagged(self, content: object) -> object:
        if isinstance(content, str):
            self._continued = content
            return f"{content}{self._tag} "
        parts = list(content) if isinstance(content, Sequence) else []
        for i in reversed(range(len(parts))):
            if isinstance(parts[i], Mapping) and isinstance(parts[i].get("text"), str):
                parts[i] = {**parts[i], "text": self._tagged(parts[i]["text"])}
                return parts
        raise TemplateError(f"the last message has no {self._field!r} to continue")


def _first(segments: Sequence[Segment], length: int) -> list[Segment]:
    """The first ``length`` characters of segments."""
    result: list[Segment] = []
    for segment in segments:
        if length <= 0:
            break
        result.append(replace(segment, text=segment.text[:length]))
        length -= len(segment.text)
    return result
