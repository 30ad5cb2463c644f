r"""RWKV World (``tokenizer.ggml.model`` = ``rwkv``): the longest token at each offset, over bytes.

Files spell tokens like Python's bytes, with ``\n``, ``\t``, ``\r``, ``\xHH`` and a backslash before other characters.
"""

from __future__ import annotations

import re

from slm_core.errors import InvalidModelFile
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.spec import VocabSpec

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_NAMED = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
_HEAD = 2  # leading bytes that index the tokens


class LongestBytes:
    """Encodes text between special tokens. Control tokens are not part of the trie.

    Args:
        spec: the vocabulary.

    Raises:
        InvalidModelFile: a byte has no token, so some texts cannot be encoded.
    """

    def __init__(self, spec: VocabSpec) -> None:
        kinds = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
        self._ids = {unescaped(spec.tokens[i]): i for i in spec.content_of_kind(*kinds)}
        for byte in range(256):
            if bytes([byte]) not in self._ids:
                raise InvalidModelFile(f"{spec.source}: no token for the byte 0x{byte:02x}")
        lengths: dict[bytes, set[int]] = {}
        for piece in self._ids:
            if len(piece) >= _HEAD:
                lengths.setdefault(piece[:_HEAD], set()).add(len(piece))
        self._lengths = {head: sorted(sizes, reverse=True) for head, sizes in lengths.items()}

    def encode(self, text: str) -> list[int]:
        """Ids of a text that is never empty."""
        data, ids, start = text.encode(), [], 0
        while start < len(data):
            piece = self._longest(data, start)
            ids.append(self._ids[piece])
            start += len(piece)
        return ids

    def _longest(self, data: bytes, start: int) -> bytes:
        for length in self._lengths.get(data[start : start + _HEAD], ()):
            piece = data[start : start + length]
            if piece in self._ids:
                return piece
        return data[start : start + 1]


def unescaped(text: str) -> bytes:
    """The bytes of a token's spelling in files."""

    def replacement(escape: re.Match[bytes]) -> bytes:
        if escape[1] is not None:
            return bytes([int(escape[1], 16)])
        return _NAMED.get(escape[2], escape[2])

    return _ESCAPE.sub(replacement, text.encode("utf-8", "surrogateescape"))
