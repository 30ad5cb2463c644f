"""Converts error messages of llguidance to ``ConstraintError``: one line, with line and column if known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slm_core.errors import ConstraintError

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_REASON = re.compile(r"^error: (.*)$", re.MULTILINE)
_LONGEST = 300


def constraint_error(message: str) -> ConstraintError:
    """The error for a message of llguidance; a long message is shortened to its first line."""
    if message.startswith("NoExtension"):
        return ConstraintError("the constraint allows no text, at least with this vocabulary")
    match = _PLACE.match(message)
    line, column = (int(match[1]), int(match[2])) if match else (None, None)
    return ConstraintError(_brief(message[match.end() :] if match else message), line=line, column=column)


def regex_error(message: str, pattern: str, origins: Sequence[int]) -> ConstraintError:
    """An error in a regular expression, with its position in ``pattern``.

    Args:
        message: the message of llguidance: it shows the expression, indented by four, and carets under the error.
        pattern: the original expression.
        origins: for each character of llguidance's expression, its position in ``pattern``.
    """
    caret = re.search(r"^ {4}( *)\^+$", message, re.MULTILINE)
    reason = _REASON.search(message)
    if caret is None or reason is None:
        return constraint_error(_PLACE.sub("", message, count=1))
    n = len(caret[1])
    at = origins[n] if n < len(origins) else len(pattern)
    before = pattern[:at]
    return ConstraintError(reason[1], line=before.count("\n") + 1, column=at - (before.rfind("\n") + 1) + 1)


def check_grammar(body: Mapping[str, Any], explain: Callable[[str], ConstraintError] = constraint_error) -> None:
    """Raise if llguidance refuses a grammar for every vocabulary."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(json.dumps({"grammars": [dict(body)]}))
    if is_error:
        raise explain(messages[0])


def _brief(message: str) -> str:
    reason = _REASON.search(message)  # the lines before it show an expression
    first = f"in a pattern: {reason[1]}" if reason else message.strip().split("\n", 1)[0]
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
