"""Toys that read and write text wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slm_conformance.faults.registry import fault
from slm_conformance.toy import ToyModel
from slm_conformance.toy_context import ToyContext
from slm_core.protocols import Vocab
from slm_core.types import EditLevel


class _WrongVocab:
    """A vocabulary that passes everything on; its descendants get one thing wrong."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.size, self.bos, self.eos, self.eog_ids = vocab.size, vocab.bos, vocab.eos, vocab.eog_ids

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._vocab.encode(text, add_special=add_special, parse_special=parse_special)

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002
        return self._vocab.token_bytes(id, special=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._vocab.decode(ids, special=special)


class _AlwaysSpecial(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return super().encode(text, add_special=add_special, parse_special=True)


class _Strict(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return super().encode(text.encode().decode(), add_special=add_special, parse_special=parse_special)


class _Alone(_WrongVocab):
    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(super(_Alone, self).decode([token], special=special) for token in ids)


@fault("TestVocabulary::test_control_tokens_are_parsed_or_not")
class SpecialAlwaysParsed(ToyModel):
    """Spelled-out control tokens are always those tokens."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.vocab = _AlwaysSpecial(self.vocab)


@fault("TestVocabulary::test_any_string_is_text")
class SurrogatesRaise(ToyModel):
    """A text with an unpaired surrogate raises ``UnicodeEncodeError``."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.vocab = _Strict(self.vocab)


@fault("TestVocabulary::test_bytes_join_back")
class TokensDecodedAlone(ToyModel):
    """``decode`` joins the texts of tokens, not their bytes, so that characters of several tokens break."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.vocab = _Alone(self.vocab)
