"""Pieces of llguidance's grammar language."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slm_core.constraints.tokens import TokenTable
from slm_core.errors import ConstraintError
from slm_core.protocols import Vocab

ANYTHING = "(?s:.*)"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")


def quoted(text: str) -> str:
    """A text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text as a regular expression that matches it, escaped for slashes."""
    return "".join(c if c in _PLAIN or c > "\x7f" else f"\\x{{{ord(c):x}}}" for c in text)


def between_slashes(pattern: str) -> tuple[str, list[int]]:
    """A regular expression escaped for slashes, and the origin of each of its characters."""
    parts, origins, i = [], [], 0
    while i < len(pattern):
        part = pattern[i : i + 2] if pattern[i] == "\\" else pattern[i]
        fit = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}.get(part, part)
        parts.append(fit)
        origins += [i] * len(fit)
        i += len(part)
    return "".join(parts), origins


def without(text: str) -> str:
    """A terminal for every non-empty text that does not contain ``text``."""
    return f"/(?s:.+)/ & ~/{ANYTHING}{escaped(text)}{ANYTHING}/"


def token_set(tokens: Sequence[int]) -> str:
    """An expression for one of the tokens, which are sorted and not empty."""
    runs: list[tuple[int, int]] = []
    for token in tokens:
        if runs and runs[-1][1] == token - 1:
            runs[-1] = (runs[-1][0], token)
        else:
            runs.append((token, token))
    return f"<[{','.join(f'{first}-{last}' for first, last in runs)}]>"


def literal_parts(text: str, vocab: Vocab, table: TokenTable) -> list[str | int]:
    """A text, split into plain text and the control tokens that it spells."""
    control = {*table.control, *table.eog.tolist()}
    parts: list[str | int] = []
    for token in vocab.encode(text, add_special=False, parse_special=True):
        if token in control:
            before, _, text = text.partition(vocab.token_bytes(token, special=True).decode("utf-8", "replace"))
            parts += [before, token] if before else [token]
    return [*parts, text] if text else parts


class Opening:
    """The marker that ends free text: a text or a control token, then the rest of the marker.

    Args:
        text: the marker.
        vocab: the vocabulary.
        table: the table of the same vocabulary.

    Raises:
        ConstraintError: a control token after other text.
    """

    def __init__(self, text: str, vocab: Vocab, table: TokenTable) -> None:
        first, *later_parts = literal_parts(text, vocab, table)
        if isinstance(first, str) and later_parts:
            raise ConstraintError(f"{text!r} has a control token after other text: begin with the control token")
        self.text = first if isinstance(first, str) else vocab.token_bytes(first, special=True).decode()
        self.token = first if isinstance(first, int) else None
        self.rest = " ".join(atom(part) for part in later_parts)

    def rules(self, control: Sequence[int]) -> str:
        """Lark rules: ``free`` (with control tokens, ends after one), ``TEXT`` and ``opening``.

        ``free opening`` is free text up to and including the opening; ``free TEXT?`` is free text without an opening. A
        lazy terminal matches all text up to the opening.
        """
        other_control = [token for token in control if token != self.token]
        free = f"free: (TEXT? {token_set(other_control)})*" if other_control else 'free: ""'
        if self.token is None:
            opening = f"opening[lazy]: /{ANYTHING}{escaped(self.text)}/"
        else:
            opening = f"opening: TEXT? {atom(self.token)} {self.rest}"
        return f"{free}\n{opening}\nTEXT: {without(self.text)}\n"


def atom(part: str | int) -> str:
    """A text or a token as an item of a rule."""
    return quoted(part) if isinstance(part, str) else f"<[{part}]>"


def sequence(text: str, vocab: Vocab, table: TokenTable) -> str:
    """A text, with the control tokens that it spells, as items of a rule; an empty text has none."""
    return " ".join(atom(part) for part in literal_parts(text, vocab, table))
