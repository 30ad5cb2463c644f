"""SentencePiece's byte-pair encoding (``tokenizer.ggml.model`` = ``llama``): merges by score, bytes for the rest.

The algorithm is from SentencePiece's bpe_model.cc: among all neighbours that together spell a piece, the pair with the
highest score merges first (ties: the leftmost). Control, unknown and byte tokens are not pieces, so content cannot
spell them. (In llama.cpp it can, because every token is a piece.)
"""

from __future__ import annotations

import heapq
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.sentencepiece import METASPACE, SentencePieceNormalizer, crosses_words
from slm_core.tokenization.spec import VocabSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = re.compile(f"{METASPACE}*[^{METASPACE}]+|{METASPACE}+")
_MAX_CACHED_WORD = 64
_MAX_CACHED_WORDS = 16384


class SentencePieceBpe:
    """Encodes text between special tokens.

    Args:
        spec: the vocabulary; without scores, all merges have the same rank.
        normalizer: applied to the text first.
    """

    def __init__(self, spec: VocabSpec, normalizer: SentencePieceNormalizer) -> None:
        kinds = (TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED)
        self._ids = {spec.tokens[i]: i for i in spec.content_of_kind(*kinds)}
        self._scores = [0.0] * len(spec.tokens) if spec.scores is None else spec.scores.tolist()
        self._unused = frozenset(spec.content_of_kind(TokenKind.UNUSED))
        self._byte_ids = spec.byte_ids()
        self._unknown = spec.special.get("unknown")
        self._normalizer = normalizer
        self._by_word = not crosses_words(self._ids)
        self._short_word = lru_cache(_MAX_CACHED_WORDS)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that is never empty."""
        spelled = self._normalizer(text)
        ids: list[int] = []
        for word in _WORD.findall(spelled) if self._by_word else [spelled]:
            ids += self._short_word(word) if len(word) <= _MAX_CACHED_WORD else self._merge(word)
        return self._without_repeated_unknown(ids)

    def _merge(self, word: str) -> Sequence[int]:
        """Merge the characters of one word, in O(n log n)."""
        symbols = list(word)  # "" once merged into its left neighbour
        before, after = list(range(-1, len(symbols) - 1)), [*range(1, len(symbols)), -1]
        agenda: list[tuple[float, int, int, int]] = []  # negated score, left and right symbol, joint length
        halves: dict[str, tuple[str, str]] = {}

        def consider(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            piece = symbols[left] + symbols[right]
            if piece in self._ids:
                token = self._ids[piece]
                heapq.heappush(agenda, (-self._scores[token], left, right, len(piece)))
                if token in self._unused:
                    halves[piece] = symbols[left], symbols[right]

        for right in range(1, len(symbols)):
            consider(right - 1, right)
        while agenda:
            _, left, right, n_chars = heapq.heappop(agenda)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != n_chars:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [token for symbol in symbols if symbol for token in self._tokens(symbol, halves)]

    def _tokens(self, symbol: str, halves: dict[str, tuple[str, str]]) -> list[int]:
        """Ids of one symbol: a piece, the halves of an unused piece, or the bytes of a character without a piece."""
        token = self._ids.get(symbol)
        if token is None:
            tokens = [self._byte_ids[byte] for byte in symbol.encode()]
            byte_tokens = [i for i in tokens if i is not None]
            return byte_tokens if len(byte_tokens) == len(tokens) else [] if self._unknown is None else [self._unknown]
        if token in self._unused and symbol in halves:
            return [i for half in halves[symbol] for i in self._tokens(half, halves)]
        return [token]

    def _without_repeated_unknown(self, ids: list[int]) -> list[int]:
        if self._unknown not in ids:
            return ids
        return [i for at, i in enumerate(ids) if i != self._unknown or at == 0 or ids[at - 1] != i]
