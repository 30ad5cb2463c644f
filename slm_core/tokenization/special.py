"""Splits a text at the special tokens that it spells."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.matcher import LongestMatcher
from slm_core.tokenization.spec import VocabSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slm_core.gguf import GgufFile

_WHITE_SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # the Unicode property
_AT_END = re.compile(f"{_WHITE_SPACE}+\\Z")
_AT_START = re.compile(f"{_WHITE_SPACE}+")


class SpecialTokens:
    """The tokens that are matched in a text before anything else.

    User-defined tokens always match. Control tokens and the unknown token match only if special tokens are parsed. The
    longest match at each offset wins, as in the ``tokenizers`` library and in SentencePiece. (llama.cpp searches the
    whole text for the longest token first. The result differs only if two tokens overlap.)

    Args:
        spec: the vocabulary.
        strips: tokens that absorb white space; see ``read_strips``.
    """

    def __init__(self, spec: VocabSpec, strips: tuple[frozenset[int], frozenset[int]]) -> None:
        self._ids = spec.ids
        self._left_strips, self._right_strips = strips
        user_defined = [spec.tokens[i] for i in spec.of_kind(TokenKind.USER_DEFINED)]
        control = [spec.tokens[i] for i in spec.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)]
        self._always = LongestMatcher(user_defined)
        self._parsed = LongestMatcher(user_defined + control)

    def split(self, text: str, *, parse_special: bool) -> Iterator[str | int]:
        """Yield the pieces of a text in order: token ids, and the non-empty texts between them."""
        done = 0
        for start, end in (self._parsed if parse_special else self._always).finditer(text):
            if start < done:  # a right-stripping token removed it, because it spells white space
                continue
            token = self._ids[text[start:end]]
            before = text[done:start]
            if token in self._left_strips:
                before = _AT_END.sub("", before)
            if before:
                yield before
            yield token
            space = _AT_START.match(text, end) if token in self._right_strips else None
            done = space.end() if space else end
        if done < len(text):
            yield text[done:]


def read_strips(gguf: GgufFile, spec: VocabSpec) -> tuple[frozenset[int], frozenset[int]]:
    """Tokens that strip the white space on their left, and on their right.

    GGUF files do not store this property; like llama.cpp, this function uses the names of models.
    """
    name = gguf.get("general.name", str, "").lower()
    pre = gguf.get("tokenizer.ggml.pre", str, "")
    architecture = gguf.get("general.architecture", str, "")
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")
    ):
        return _ids_of(spec, "<mask>"), frozenset()
    if "phi-3" in name or "phi3" in name:
        special = spec.of_kind(TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
        plain = _ids_of(spec, "<unk>", "<s>", "<|endoftext|>")
        return frozenset(), (frozenset(special) | _ids_of(spec, "</s>")) - plain
    if "modern-bert" in name:
        return _ids_of(spec, "[MASK]"), frozenset()
    return frozenset(), frozenset()


def token_text(token: object) -> str:
    """The text of a token in a directory's settings, which may be a string or an object; "" for none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _ids_of(spec: VocabSpec, *texts: str) -> frozenset[int]:
    return frozenset(spec.ids[text] for text in texts if text in spec.ids)
