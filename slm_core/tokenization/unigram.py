"""SentencePiece's unigram model (``tokenizer.ggml.model`` = ``t5``): the likeliest segmentation of a text.

The search is the Unigram model of the ``tokenizers`` library (T. Kudo, "Subword Regularization", 2018).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slm_core.tokenization.encoding import encoding
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.spec import VocabSpec

if TYPE_CHECKING:
    from slm_core.tokenization.sentencepiece import SentencePieceNormalizer

_NEVER_SPELLED = " "  # normalized text has no space, so this piece never matches


class Unigram:
    """Encodes text between special tokens.

    Control, unknown, byte and unused tokens are not pieces. A user-defined token has a higher score than any other
    piece, as in SentencePiece. A character without a piece becomes byte tokens if the vocabulary has all 256, otherwise
    the unknown token, one for each run.

    Args:
        spec: the vocabulary, with scores.
        normalizer: applied to the text first.
        unknown: id of the unknown token.
    """

    def __init__(self, spec: VocabSpec, normalizer: SentencePieceNormalizer, unknown: int) -> None:
        from tokenizers import Tokenizer, models

        scores = [0.0] * len(spec.tokens) if spec.scores is None else spec.scores.tolist()
        user_defined = frozenset(spec.content_of_kind(TokenKind.USER_DEFINED))
        self._normalizer = normalizer
        self._ids = [unknown, *spec.content_of_kind(TokenKind.NORMAL, TokenKind.USER_DEFINED)]
        self._bytes = [i for i in spec.byte_ids() if i is not None]
        pieces = [(spec.tokens[i], 0.0 if i in user_defined else scores[i]) for i in self._ids[1:]]
        self._tokenizer = Tokenizer(models.Unigram([(_NEVER_SPELLED, 0.0), *pieces], 0, False))

    def encode(self, text: str) -> list[int]:
        """Ids of a text that is never empty."""
        encoded = encoding(self._tokenizer, self._normalizer(text))
        if len(self._bytes) < 256 or 0 not in encoded.ids:
            return [self._ids[i] for i in encoded.ids]
        ids: list[int] = []
        for i, piece in zip(encoded.ids, encoded.tokens, strict=True):
            ids += [self._ids[i]] if i else [self._bytes[byte] for byte in piece.encode()]
        return ids
