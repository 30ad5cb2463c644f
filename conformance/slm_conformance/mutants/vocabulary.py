"""Mutants that encode or decode text wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.backend import ToyModel
from slm_conformance.toy.context import ToyContext
from slm_core.errors import VocabError
from slm_core.protocols import Vocab
from slm_core.types import EditLevel


class _WrongVocab:
    """A vocabulary that forwards all calls; each subclass overrides one part wrongly."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.size, self.bos, self.eos, self.eog_ids = vocab.size, vocab.bos, vocab.eos, vocab.eog_ids
        self.infill = vocab.infill

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._vocab.encode(text, add_special=add_special, parse_special=parse_special)

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002
        return self._vocab.token_bytes(id, special=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._vocab.decode(ids, special=special)


class _AlwaysSpecial(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        spelled = "<|endoftext|>" in text
        return super().encode(text, add_special=add_special, parse_special=parse_special or spelled)


class _Strict(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return super().encode(text.encode().decode(), add_special=add_special, parse_special=parse_special)


class _Alone(_WrongVocab):
    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(super(_Alone, self).decode([token], special=special) for token in ids)


class _Leaky(_WrongVocab):
    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002
        return super().token_bytes(id, special=True)


class _Lenient(_WrongVocab):
    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002
        return b"" if id < 0 else super().token_bytes(id, special=special)


class _DropsBrokenBytes(_WrongVocab):
    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text = super().decode(ids, special=special)
        return text if len(ids) > 1 else text.replace("\ufffd", "")


class _OneMore(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return super().encode(text, add_special=add_special, parse_special=parse_special) + [0] * add_special


class _WithoutJoiners(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        shorter = text.replace("\u200d", "") if len(text) < 8 else text
        return super().encode(shorter, add_special=add_special, parse_special=parse_special)


class _NoBos(_WrongVocab):
    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab)
        self.bos = vocab.size - 1


class _OnlyEos(_WrongVocab):
    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab)
        self.eog_ids = vocab.eog_ids & {vocab.eos}


class _SuffixFirst(_WrongVocab):
    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab)
        if (tokens := vocab.infill) is not None:
            self.infill = replace(tokens, prefix=tokens.suffix, suffix=tokens.prefix)


class _VocabModel(ToyModel):
    """A model whose vocabulary is wrong."""

    vocab_type: ClassVar[type[_WrongVocab]]

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.vocab = self.vocab_type(self.vocab)


@mutant("TestVocabulary::test_control_tokens_are_parsed_or_not")
class SpecialAlwaysParsed(_VocabModel):
    """A spelled-out end-of-text token is always parsed as a control token."""

    vocab_type = _AlwaysSpecial


@mutant("TestVocabulary::test_random_strings")
class SurrogatesRaise(_VocabModel):
    """A text with an unpaired surrogate raises ``UnicodeEncodeError``."""

    vocab_type = _Strict


@mutant("TestVocabulary::test_random_strings")
class TokensDecodedAlone(_VocabModel):
    """``decode`` decodes each token separately, so that characters of several tokens break."""

    vocab_type = _Alone


@mutant("TestVocabulary::test_equals_the_reference")
class SpecialMisplaced(_VocabModel):
    """``add_special`` adds token 0, which the file does not request."""

    vocab_type = _OneMore


@mutant("TestVocabulary::test_random_strings")
class JoinersLost(_VocabModel):
    """Zero-width joiners are lost in texts of fewer than 8 characters."""

    vocab_type = _WithoutJoiners


@mutant("TestVocabulary::test_special_tokens_are_the_files")
class WrongBos(_VocabModel):
    """The BOS token is the last id of the vocabulary."""

    vocab_type = _NoBos


@mutant("TestVocabulary::test_special_tokens_are_the_files")
class OnlyEosEndsAnswers(_VocabModel):
    """The vocabulary lists EOS as the only EOG token."""

    vocab_type = _OnlyEos


@mutant("TestVocabulary::test_special_tokens_are_the_files")
class SuffixBeforePrefix(_VocabModel):
    """The tokens before and after a gap are swapped."""

    vocab_type = _SuffixFirst


@mutant("TestVocabulary::test_control_tokens_are_no_text")
class SpecialLeaks(_VocabModel):
    """``token_bytes`` returns the text of control tokens even without ``special=True``."""

    vocab_type = _Leaky


@mutant("TestVocabulary::test_ids_outside")
class NegativeIdsAreEmpty(_VocabModel):
    """``token_bytes`` returns empty bytes for negative ids."""

    vocab_type = _Lenient


@mutant("TestVocabulary::test_broken_utf8_is_replaced")
class BrokenBytesDropped(_VocabModel):
    """``decode`` of a single token drops bytes that are not UTF-8."""

    vocab_type = _DropsBrokenBytes


class _Bytes(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        try:
            return super().encode(text, add_special=add_special, parse_special=parse_special)
        except VocabError:
            return list(text.encode())


@mutant("TestBackend::test_a_file_without_a_vocabulary")
class BytesWithoutVocabulary(_VocabModel):
    """Without a vocabulary, a text is encoded as its bytes."""

    vocab_type = _Bytes
