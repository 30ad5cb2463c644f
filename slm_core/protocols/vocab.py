"""The noun Vocab: converts text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slm_core.types import InfillTokens


class Vocab(Protocol):
    """The model's vocabulary. ``encode`` returns the ids of the model's reference tokenizer."""

    @property
    def size(self) -> int:
        """The number of tokens V; ids are 0 to V-1."""
        ...

    @property
    def bos(self) -> int | None:
        """The token that begins a sequence, if the model has one."""
        ...

    @property
    def eos(self) -> int | None:
        """The token that ends a sequence, if the model has one."""
        ...

    @property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends an answer (EOS, EOT, ...)."""
        ...

    @property
    def infill(self) -> InfillTokens | None:
        """The tokens for text with a gap; None if the model was not trained with such text."""
        ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Turn text into token ids. Any string is valid: empty, with NUL, with unpaired surrogates.

        Args:
            text: the text.
            add_special: add the tokens that the model file specifies around a text (BOS, EOS).
            parse_special: parse the spelling of control tokens as control tokens; otherwise they are plain text.

        Raises:
            InvalidOption: the value is not a text.
        """
        ...

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        """The bytes of a token; b"" for a control token unless ``special``.

        Raises:
            InvalidToken: the id is not an integer, or is outside the vocabulary.
        """
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
            InvalidOption: the value is not a list.
            InvalidToken: an id is not an integer, or is outside the vocabulary.
        """
        ...
