"""The vocabulary of a model that has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from slm_core.errors import VocabError


class MissingVocab:
    """A vocabulary without texts: the model takes and returns tokens only.

    Args:
        source: the model, for messages.
        size: the number of its logits V.
        reason: why there is none, for messages.
    """

    bos = None
    eos = None
    eog_ids: frozenset[int] = frozenset()
    infill = None

    def __init__(self, source: str, size: int, reason: str = "the model has no vocabulary") -> None:
        self._source, self._reason = source, reason
        self.size = size

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Raise ``VocabError``."""
        self._refuse()

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        """Raise ``VocabError``."""
        self._refuse()

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Raise ``VocabError``."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise VocabError(f"{self._source}: {self._reason} (accepted: slm.load with tokenizer=)")
