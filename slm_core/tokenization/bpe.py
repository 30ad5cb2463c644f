"""Byte-pair encoding with a list of merges (``tokenizer.ggml.model`` = ``gpt2``, ``gemma4`` or ``whitespace``).

The merges are run by the BPE model of the ``tokenizers`` library (R. Sennrich et al., 2016).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slm_core.errors import InvalidModelFile
from slm_core.tokenization.encoding import encoding
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.pretokenizers import PreTokenization, build_normalizer, build_pre_tokenizer
from slm_core.tokenization.spec import VocabSpec

if TYPE_CHECKING:
    from slm_core.gguf import GgufFile

_MERGES = "tokenizer.ggml.merges"


class BytePairs:
    """Encodes text between special tokens. Merges never produce control or unknown tokens.

    Args:
        spec: the vocabulary.
        gguf: the file, for the merges.
        pre: the pre-tokenization.

    Raises:
        UnsupportedModel: there are no merges.
        InvalidModelFile: a merge is not two tokens whose concatenation is a token.
    """

    def __init__(self, spec: VocabSpec, gguf: GgufFile, pre: PreTokenization) -> None:
        from tokenizers import Tokenizer, models

        lowercase = pre.drops_whitespace and gguf.get("tokenizer.ggml.normalizer.lowercase", bool, False)
        vocab = dict(spec.ids)
        for i in spec.content_of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN):
            del vocab[spec.tokens[i]]
        merges = _pairs(gguf.require(_MERGES, list[str]), spec.source)
        options = {"byte_fallback": not pre.byte_level, "ignore_merges": pre.ignore_merges}
        try:
            model = models.BPE(vocab, merges, **options)
        except Exception:  # the library raises a bare Exception and does not say which merge
            model = models.BPE(vocab, _checked(merges, vocab, spec), **options)
        self._tokenizer = Tokenizer(model)
        normalizer = build_normalizer(pre, lowercase=lowercase)
        if normalizer is not None:
            self._tokenizer.normalizer = normalizer
        self._tokenizer.pre_tokenizer = build_pre_tokenizer(pre)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that is never empty."""
        ids: list[int] = encoding(self._tokenizer, text).ids
        return ids

    def to_json(self) -> str:
        """The tokenizer in the JSON format of the ``tokenizers`` library, without control tokens."""
        return self._tokenizer.to_str()


def _pairs(merges: list[str], source: str) -> list[tuple[str, str]]:
    """Split each merge at its first space that is not its first character."""
    pairs = [merge.partition(" ")[::2] for merge in merges]
    if all(map(all, pairs)):
        return pairs
    for i, merge in enumerate(merges):
        at = merge.find(" ", 1)
        pairs[i] = merge[:at], merge[at + 1 :]
        if at < 0 or not pairs[i][1]:
            raise InvalidModelFile(f"{source}: {_MERGES} {i} is {merge[:80]!r}, not two tokens with a space between")
    return pairs


def _checked(merges: list[tuple[str, str]], vocab: dict[str, int], spec: VocabSpec) -> list[tuple[str, str]]:
    """Drop merges that use or produce control tokens, which content must not contain; refuse missing tokens."""
    usable = []
    for i, (left, right) in enumerate(merges):
        for part in (left, right, left + right):
            if part not in spec.ids:
                raise InvalidModelFile(f"{spec.source}: {_MERGES} {i} needs the token {part[:80]!r}, which is missing")
        if left in vocab and right in vocab and left + right in vocab:
            usable.append((left, right))
    return usable
