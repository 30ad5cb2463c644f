"""SentencePiece's precompiled character map (``tokenizer.ggml.precompiled_charsmap``).

The blob contains the byte length of a double-array trie, the trie, and the replacements, each ended by NUL. A node of
the trie has 32 bits: the label of its edge (bits 0-7), whether it has a value (bit 8) and the offset of its children
(bits 10-31, times 256 if bit 9 is set). The node of a value has bit 31 set, and contains an offset in the replacements.
See darts-clone, and S. Kanda, "Space- and Time-Efficient String Dictionaries" (2018).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from slm_core.errors import InvalidModelFile

_IS_VALUE = 1 << 31
_MAX_CACHED_STEPS = 65536


class _State(NamedTuple):
    """A node of the trie: where its children start, and the replacement of the key that ends here."""

    children: int
    replacement: str | None


class CharsMap:
    """Replaces keys in a text, from left to right, the longest key at each offset.

    Args:
        blob: the map; an empty map replaces nothing.
        source: the file, for messages.

    Raises:
        InvalidModelFile: the blob is damaged. A node whose children lie outside the trie is not noticed: it never
            matches.
    """

    def __init__(self, blob: bytes, source: str) -> None:
        n_trie_bytes = int.from_bytes(blob[:4], "little")
        if blob and not (4 < 4 + n_trie_bytes <= len(blob) and n_trie_bytes % 4 == 0):
            raise _damaged(source, f"{n_trie_bytes} bytes of trie in {len(blob)} bytes")
        trie = np.frombuffer(blob, "<u4", n_trie_bytes // 4, offset=4) if blob else np.zeros(0, "<u4")
        self._replacements = blob[4 + n_trie_bytes :]
        offsets = trie[(trie & _IS_VALUE) != 0] & (_IS_VALUE - 1)
        if len(offsets) and (offsets.max() >= len(self._replacements) or self._replacements[-1]):
            raise _damaged(source, "a replacement lies outside it")
        self._trie: list[int] = trie.tolist()
        self._root = _State(self._children(0), None) if self._trie else None
        self._cached_step = lru_cache(_MAX_CACHED_STEPS)(self._step)

    def __call__(self, text: str) -> str:
        """Replace all keys in a text."""
        if self._root is None:
            return text
        parts, at = [], 0
        while at < len(text):
            end, replacement = self._longest(self._root, text, at)
            parts.append(replacement)
            at = end
        return "".join(parts)

    def _longest(self, state: _State, text: str, start: int) -> tuple[int, str]:
        """End and replacement of the longest key at ``start``; without a key, the character itself."""
        end, replacement = start + 1, text[start]
        for at in range(start, len(text)):
            after = self._cached_step(state.children, text[at])
            if after is None:
                break
            state = after
            if state.replacement is not None:
                end, replacement = at + 1, state.replacement
        return end, replacement

    def _step(self, children: int, character: str) -> _State | None:
        node = 0
        for byte in character.encode():
            node = children ^ byte
            if not byte or node >= len(self._trie) or self._trie[node] & (_IS_VALUE | 0xFF) != byte:
                return None
            children = self._children(node)
        return _State(children, self._replacement(children) if self._trie[node] & 0x100 else None)

    def _children(self, node: int) -> int:
        unit = self._trie[node]
        return node ^ (unit >> 10 << ((unit & 0x200) >> 6))

    def _replacement(self, node: int) -> str | None:
        if node >= len(self._trie) or not self._trie[node] & _IS_VALUE:
            return None
        start = self._trie[node] & (_IS_VALUE - 1)
        return self._replacements[start : self._replacements.index(b"\0", start)].decode("utf-8", "replace")


def _damaged(source: str, reason: str) -> InvalidModelFile:
    return InvalidModelFile(f"{source}: tokenizer.ggml.precompiled_charsmap is damaged: {reason}")
