"""Encodes segments to tokens. Special tokens are parsed in control text, and never in content."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from weakref import WeakKeyDictionary

from slm_core.protocols import Vocab
from slm_core.types import Segment

_MARKER = re.compile(r"[<\[]\S+[>\]]", re.DOTALL)
_NEIGHBOURS = (("<", ">"), ("[", "]"), ("a", "a"))
_Span = tuple[int, int, int]
"""A special token in a text: start and end in characters, and the number of tokens before it."""


def encode_segments(vocab: Vocab, segments: Iterable[Segment]) -> list[int]:
    """Tokens of a prompt; content never becomes a special token, or a part of one.

    The prompt is tokenized as a whole, as in training. If content spells a special token, the text up to the next
    special token of the control text is tokenized without parsing special tokens.
    """
    return PromptEncoder(vocab).encode(segments)


def encode_messages(vocab: Vocab, segments: Iterable[Segment]) -> tuple[list[int], list[int]]:
    """Tokens of a prompt, and the number of tokens up to the end of each message.

    A message ends with the first special token after content. Prompts that begin with the same messages begin with the
    same tokens up to this end. A format without special tokens has no known ends.
    """
    pieces = [segment for segment in segments if segment.text]
    ids, spans = _encode(vocab, pieces)
    ends = accumulate(len(piece.text) for piece in pieces)
    content_ends = [end for piece, end in zip(pieces, ends, strict=True) if not piece.control]
    after = (bisect_left(spans, end, key=lambda span: span[0]) for end in content_ends)
    return ids, sorted({spans[i][2] + 1 for i in after if i < len(spans)})


class PromptEncoder:
    """Encodes prompts one after another; reuses the tokens of the prefix that a prompt shares with the previous one.

    Special tokens are matched before other text is tokenized, so a prompt can be split before a special token. The
    split is one special token early, in case a longer special token begins at the first difference.

    Args:
        vocab: the vocabulary.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._pieces: list[Segment] = []
        self._ids: list[int] = []
        self._spans: list[_Span] = []

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Tokens of a prompt; see ``encode_segments``."""
        pieces = [segment for segment in segments if segment.text]
        n_spans, (split, _, n_ids) = self._shared(pieces)
        ids, spans = _encode(self._vocab, list(_from(pieces, split)))
        self._spans = [*self._spans[:n_spans], *((a + split, b + split, n + n_ids) for a, b, n in spans)]
        self._pieces, self._ids = pieces, [*self._ids[:n_ids], *ids]
        return list(self._ids)

    def _shared(self, pieces: Sequence[Segment]) -> tuple[int, _Span]:
        """Spans before the last position where both prompts can be split, and the span at this position."""
        n_common = 0
        for old, new in zip(self._pieces, pieces, strict=False):
            if (old.text, old.control) != (new.text, new.control):
                break
            n_common += len(old.text)
        n_spans = bisect_right(self._spans, n_common, key=lambda span: span[1]) - 2
        return (n_spans, self._spans[n_spans]) if n_spans > 0 else (0, (0, 0, 0))


def _from(pieces: Sequence[Segment], n_chars: int) -> Iterator[Segment]:
    """The pieces without their first ``n_chars`` characters."""
    for piece in pieces:
        if n_chars < len(piece.text):
            yield Segment(piece.text[n_chars:], piece.control) if n_chars else piece
        n_chars = max(0, n_chars - len(piece.text))


def _encode(vocab: Vocab, pieces: Sequence[Segment]) -> tuple[list[int], list[_Span]]:
    """Tokens of a prompt, and the spans of its special tokens in control text."""
    text = "".join(piece.text for piece in pieces)
    ids = vocab.encode(text, add_special=False, parse_special=True)
    spans = list(_markers(vocab).spans(vocab, text, ids))
    meant = _within_control(spans, pieces)
    if len(meant) == len(spans):
        return ids, meant
    forged = sorted(set(spans) - set(meant))
    parts = list(_encode_apart(vocab, text, meant, forged))
    sizes = [0, *accumulate(map(len, parts))]
    apart = [(start, end, n_before) for (start, end, _), n_before in zip(meant, sizes[1:], strict=False)]
    return list(chain.from_iterable(parts)), apart


def special_spans(vocab: Vocab, segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """The special tokens in control text: start and end of each in the joined text, in characters."""
    text = "".join(segment.text for segment in segments)
    ids = vocab.encode(text, add_special=False, parse_special=True)
    return [(start, end) for start, end, _ in _within_control(_markers(vocab).spans(vocab, text, ids), segments)]


def _encode_apart(vocab: Vocab, text: str, meant: Sequence[_Span], forged: Sequence[_Span]) -> Iterator[list[int]]:
    """Tokens of a text in which only the spans ``meant`` are special: one list before the first, then one from each."""
    for start, end in pairwise([0, *(span[0] for span in meant), len(text)]):
        inside = [span for span in forged if start <= span[0] < end]
        if not inside:
            yield vocab.encode(text[start:end], add_special=False, parse_special=True)
            continue
        begin = next((span[1] for span in meant if span[0] == start), start)
        opening = vocab.encode(text[start:begin], add_special=False, parse_special=True)
        cuts = [begin, *(span[1] - 1 for span in inside), end]
        yield [*opening, *_encode_plain(vocab, [text[a:b] for a, b in pairwise(cuts)])]


def _encode_plain(vocab: Vocab, parts: Sequence[str]) -> Iterator[int]:
    """Tokens of parts of one text, which was split inside tokens that are parsed in any text.

    Parts after the first are encoded after a line break, whose tokens are removed: a vocabulary that adds a space
    before a text must not add one before these parts.
    """
    line_break = vocab.encode("\n", add_special=False, parse_special=False)
    for i, part in enumerate(parts):
        ids = vocab.encode("\n" + part if i else part, add_special=False, parse_special=False)
        if i and ids[: len(line_break)] == line_break:
            yield from ids[len(line_break) :]
        else:
            yield from ids if not i else vocab.encode(part, add_special=False, parse_special=False)


def _within_control(spans: Iterable[_Span], pieces: Sequence[Segment]) -> list[_Span]:
    """The spans that are completely in control text; both are in the order of the text."""
    content: list[tuple[int, int]] = []
    offset = 0
    for piece in pieces:
        if not piece.control:
            content.append((offset, offset + len(piece.text)))
        offset += len(piece.text)
    kept, i = [], 0
    for span in spans:
        start, end, _ = span
        while i < len(content) and content[i][1] <= start:
            i += 1
        if i == len(content) or content[i][0] >= end:
            kept.append(span)
    return kept


class _Markers:
    """The special tokens of a vocabulary, tested one by one: control tokens, and tokens parsed in any text."""

    def __init__(self) -> None:
        self._texts: dict[int, str | None] = {}

    def spans(self, vocab: Vocab, text: str, ids: Iterable[int]) -> Iterator[_Span]:
        """The spans of the special tokens among ``ids`` in a text.

        Special tokens are matched first, from left to right: the first occurrence of the next special token is the
        match.
        """
        offset = 0
        for n_before, token in enumerate(ids):
            marker = self._texts[token] if token in self._texts else self._look(vocab, token)
            if marker is None:
                continue
            start = text.find(marker, offset)
            if start >= 0:
                offset = start + len(marker)
                yield start, offset, n_before

    def _look(self, vocab: Vocab, token: int) -> str | None:
        """The text of a special token; None for an ordinary one."""
        plain = vocab.token_bytes(token)
        spelled = vocab.token_bytes(token, special=True).decode("utf-8", "replace")
        special = not plain or (_MARKER.fullmatch(spelled) is not None and _is_parsed(vocab, token, spelled))
        self._texts[token] = spelled if special and spelled else None
        return self._texts[token]


def _is_parsed(vocab: Vocab, token: int, spelled: str) -> bool:
    """Whether a token is matched as special: on request, or in any text. A token made by merges is not special."""
    contexts = ("{}", *(f"{before}{{}}{after}" for before, after in _NEIGHBOURS))
    matched = [token in vocab.encode(text.format(spelled), add_special=False, parse_special=False) for text in contexts]
    return not matched[0] or all(matched)


_KNOWN: WeakKeyDictionary[Vocab, _Markers] = WeakKeyDictionary()


def _markers(vocab: Vocab) -> _Markers:
    return _KNOWN.setdefault(vocab, _Markers())
