"""The vocabulary of a GGUF file, behind the contract's Vocab protocol."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from slm_core.argument_checks import IDS, check_text, checked_id, checked_list
from slm_core.display import count, signature
from slm_core.tokenization.pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slm_core.tokenization.spec import VocabSpec
    from slm_core.tokenization.special import SpecialTokens

_MAX_CACHED_TOKENS = 65536
_MAX_CACHED_PIECES = 2048
_LONGEST_CACHED_PIECE = 8192  # characters


class Encoder(Protocol):
    """Encodes text without special tokens."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text that is never empty."""
        ...


class GgufVocab:
    """Text to token ids and back. Immutable; threads may share it.

    Text is a sequence of Unicode characters: a pair of surrogates is one character, an unpaired surrogate becomes
    U+FFFD. Text that spells a control token becomes that token only with ``parse_special``; user-defined tokens are
    always recognized.

    Attributes:
        size: number of tokens V.
        bos: the token that begins a sequence, or None.
        eos: the token that ends a sequence, or None.
        eog_ids: every token that ends an answer.
        infill: the tokens for text with a gap, or None.
        spec: the data of the vocabulary.
    """

    def __init__(self, spec: VocabSpec, encoder: Encoder, special: SpecialTokens) -> None:
        self.spec = spec
        self.size = len(spec.tokens)
        self.bos = spec.special.get("bos")
        self.eos = spec.special.get("eos")
        self.eog_ids = spec.eog_ids
        self.infill = spec.infill
        self._encoder = encoder
        self._encode_again = lru_cache(_MAX_CACHED_PIECES)(encoder.encode)
        self._special = special
        self._before = [spec.special["bos"]] if spec.add_bos else []
        self._after = [spec.special["eos"]] if spec.add_eos else []
        if spec.model == "bert":
            self._after.append(spec.special["seperator"])
        self._is_wordpiece = spec.model == "bert"
        self._strips_space = spec.pre is None and (spec.add_space_prefix or self._is_wordpiece)
        self._text_of = lru_cache(_MAX_CACHED_TOKENS)(Pieces(spec).text_of)

    def __repr__(self) -> str:
        return signature(self, count(self.size, "token"))

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Encode a text to the ids of the model's reference tokenizer.

        Args:
            text: any string.
            add_special: add the tokens that the file specifies around a text (BOS, EOS; BERT's [CLS] and [SEP]).
            parse_special: recognize spelled-out control tokens; otherwise they are plain text.

        Raises:
            InvalidOption: not a text.
        """
        check_text("text", text)
        ids: list[int] = []
        for piece in self._special.split(well_formed(text), parse_special=parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_piece(piece)
        return [*self._before, *ids, *self._after] if add_special else ids

    def _encode_piece(self, piece: str) -> list[int]:
        """Ids of text without special tokens, cached: each turn encodes the whole chat again, most of it unchanged."""
        return self._encoder.encode(piece) if len(piece) > _LONGEST_CACHED_PIECE else self._encode_again(piece)

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        """Bytes of one token. A control token gives b"", or its text if ``special``.

        Raises:
        InvalidToken: the id is not an integer, or is outside the vocabulary.
        """
        if type(id) is not int or not 0 <= id < self.size:
            id = checked_id(id, self.size)  # noqa: A001
        return self._text_of(id, special=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a run of tokens; bytes that are not UTF-8 become U+FFFD.

        If the vocabulary adds a space before a text, one leading space is removed, so that decoding is the inverse of
        encoding. Text after a special token keeps its space, as in the ``tokenizers`` library. A stream of
        ``token_bytes`` keeps every space. BERT's words are joined by spaces, except before ``.``, ``?``, ``!`` and
        ``,``.

        Raises:
            InvalidOption: not a list.
            InvalidToken: an id is not an integer, or is outside the vocabulary.
        """
        pieces = [self.token_bytes(i, special=special) for i in checked_list("ids", ids, IDS)]
        if self._is_wordpiece:
            pieces = [piece.lstrip(b" ") if piece in (b" .", b" ?", b" !", b" ,") else piece for piece in pieces]
        data = b"".join(pieces)
        if self._strips_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")


def well_formed(text: str) -> str:
    """A text without surrogates: a pair becomes its character, an unpaired surrogate U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
