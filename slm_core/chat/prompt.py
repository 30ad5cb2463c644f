"""Segments to tokens: control text is parsed, content never is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slm_core.protocols import Vocab
from slm_core.types import Segment


def encode_segments(vocab: Vocab, segments: Iterable[Segment]) -> list[int]:
    """Tokens of a prompt; no content can become a control token.

    The prompt is tokenized whole, as the model's makers did, as long as that yields exactly the control tokens
    of the control segments. Where content spells further ones, the segments are tokenized apart.
    """
    pieces = [segment for segment in segments if segment.text]
    whole = vocab.encode("".join(piece.text for piece in pieces), add_special=False, parse_special=True)
    apart = [vocab.encode(piece.text, add_special=False, parse_special=piece.control) for piece in pieces]
    meant = [token for piece, ids in zip(pieces, apart, strict=True) if piece.control for token in ids]
    if _control_tokens(vocab, whole) == _control_tokens(vocab, meant):
        return whole
    return [token for ids in apart for token in ids]


def _control_tokens(vocab: Vocab, ids: Sequence[int]) -> list[int]:
    return [token for token in ids if not vocab.token_bytes(token)]
