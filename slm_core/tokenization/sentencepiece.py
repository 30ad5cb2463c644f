"""SentencePiece's normalizer (normalizer.cc): character map, extra spaces, U+2581 for spaces."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slm_core.tokenization.charsmap import CharsMap

METASPACE = "\u2581"


class SentencePieceNormalizer:
    """Normalizes text for a SentencePiece vocabulary.

    Args:
        charsmap: applied first.
        add_space_prefix: add a space before the text.
        remove_extra_whitespaces: replace each run of spaces by one space, and remove spaces at both ends.
    """

    def __init__(self, charsmap: CharsMap, *, add_space_prefix: bool, remove_extra_whitespaces: bool) -> None:
        self._charsmap = charsmap
        self._prefix = METASPACE if add_space_prefix else ""
        self._squeezes = remove_extra_whitespaces

    def __call__(self, text: str) -> str:
        """Normalize one text; the result may be empty."""
        text = self._charsmap(text)
        if self._squeezes:
            text = re.sub(" +", " ", text).lstrip(" ")
        spelled = self._prefix + text.replace(" ", METASPACE)
        return spelled.rstrip(METASPACE) if self._squeezes else spelled


def crosses_words(pieces: Iterable[str]) -> bool:
    """Whether any piece extends past the end of a word, so that words cannot be encoded separately."""
    return re.search(f"[^{METASPACE}\0]{METASPACE}", "\0".join(pieces)) is not None
