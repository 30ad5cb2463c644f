"""BERT's WordPiece (``tokenizer.ggml.model`` = ``bert``): words split into the longest pieces from left to right.

GGUF spells pieces at the beginning of a word with U+2581, and other pieces unchanged; BERT spells other pieces with
``##``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slm_core.tokenization.encoding import encoding
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.sentencepiece import METASPACE
from slm_core.tokenization.spec import VocabSpec

if TYPE_CHECKING:
    from slm_core.gguf import GgufFile

_CONTINUES = "##"


class WordPiece:
    """Encodes text between special tokens; a word that cannot be split into pieces becomes the unknown token.

    Args:
        spec: the vocabulary.
        gguf: the file, for the options of the normalizer.
        unknown: id of the unknown token.
    """

    def __init__(self, spec: VocabSpec, gguf: GgufFile, unknown: int) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        lowercase = gguf.get("tokenizer.ggml.normalizer.lowercase", bool, True)
        strip_accents = gguf.get("tokenizer.ggml.normalizer.strip_accents", bool, lowercase)
        pieces = {_as_bert(spec.tokens[i]): i for i in spec.content_of_kind(TokenKind.NORMAL, TokenKind.UNUSED)}
        pieces[spec.tokens[unknown]] = unknown
        self._tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=spec.tokens[unknown]))
        self._tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=strip_accents, lowercase=lowercase)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> list[int]:
        """Ids of a text that is never empty."""
        ids: list[int] = encoding(self._tokenizer, text).ids
        return ids


def _as_bert(piece: str) -> str:
    return piece.removeprefix(METASPACE) if piece.startswith(METASPACE) else _CONTINUES + piece
