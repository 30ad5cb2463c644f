"""Decodes token ids to bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.rwkv import unescaped
from slm_core.tokenization.sentencepiece import METASPACE
from slm_core.tokenization.spec import VocabSpec

if TYPE_CHECKING:
    from collections.abc import Callable


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte (bytes_to_unicode in its encoder.py), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


_BYTE_OF = _byte_alphabet()


class Pieces:
    """The bytes of tokens, like in llama.cpp.

    Control and unknown tokens are empty, unless their text is requested or answers always show it. Unused tokens are
    always empty.
    """

    def __init__(self, spec: VocabSpec) -> None:
        self._spec = spec
        byte_level = spec.pre is not None and spec.pre.byte_level
        plain = spec.pre is not None and spec.pre.normalizer != "metaspace"
        spelled = from_byte_level if byte_level else stored if plain else from_metaspace
        self._normal: Callable[[str], bytes] = unescaped if spec.model == "rwkv" else spelled

    def text_of(self, token: int, *, special: bool) -> bytes:
        """Bytes of a token that is in the vocabulary."""
        kind, text = self._spec.kinds[token], self._spec.tokens[token]
        if kind == TokenKind.NORMAL:
            return self._normal(text)
        if kind == TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == TokenKind.USER_DEFINED:
            return stored(text)
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN) and (special or token in self._spec.shown_control):
            return stored(text)
        return b""


def stored(text: str) -> bytes:
    """A token's text in UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def from_metaspace(text: str) -> bytes:
    """A token's text, with a space for each U+2581."""
    return stored(text.replace(METASPACE, " "))


def from_byte_level(text: str) -> bytes:
    """Map byte-level characters back to bytes; a token with any other character is plain text."""
    data = byte_level_bytes(text)
    return stored(text) if data is None else data


def byte_level_bytes(text: str) -> bytes | None:
    """The bytes of byte-level characters; None if there is any other character."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, text))
    except KeyError:
        return None
