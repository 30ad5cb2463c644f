"""The ``tokenizer.ggml.pre`` of a tokenizer: the known pre-tokenization that splits all sample texts as it does.

Files state a pre-tokenizer in many forms, so results are compared instead of forms. llama.cpp's converter does the
same: it recognizes tokenizers by the hash of one text's tokens.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slm_core.tokenization.pretokenizers import (
    PRE_TOKENIZATIONS,
    PreTokenization,
    build_normalizer,
    build_pre_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PREFERRED = (
    *("gpt-2", "llama-bpe", "qwen2", "deepseek-r1-qwen", "smollm", "command-r", "falcon", "falcon3", "tekken"),
    *("gpt-4o", "smaug-bpe", "glm4", "olmo", "bloom", "deepseek-v3", "deepseek-llm", "deepseek-coder", "bailingmoe"),
)
"""If several names have the same pre-tokenization, these are tried first: most versions of llama.cpp know them."""
_N_SAMPLES, _LONGEST_SAMPLE, _SEED = 1500, 10, 20
_FRAGMENTS = (
    # Words, also with changes of case, and contractions.
    *("a", "Z", "word", "Word", "WORD", "camelCase", "HTTPServer", "it", "IT", "\u00e9", "\u00df", "na\u00efve"),
    *("'s", "'S", "'t", "'re", "'RE", "'ll", "'d", "'M", "'x", "\u2019s", "_", "__"),
    # Other scripts, marks, modifier and title case letters, letters without case.
    *("\u03b1\u0392", "\u0434\u0410", "\u4f60\u597d", "\u3042\u30a2", "\ud55c\uad6d", "\u0e01\u0e33", "\u0627\u0644"),
    *("\u0915\u093f", "\u01c5", "\u02b0", "\u0301", "e\u0301", "\u1100\u1161", "\u3131", "\u3105", "\u1780\u17b6"),
    *("\uf900", "\U00020000", "\U00010400"),
    # Digits.
    *("0", "7", "12", "123", "1234", "1234567", "\u0663", "\u0663\u0664\u0665\u0666", "\u00b2", "\u00bd", "\u2167"),
    # Punctuation and symbols.
    *("!", "?", ".", "...", ",", ";", ":", "-", "--", "/", "//", "\\", "(", ")", "[", "]", "{", "}", "<", ">", '"'),
    *("'", "''", "`", "```", "~", "@", "#", "$", "%", "^", "&", "*", "+", "=", "==", "|", "\u2026", "\u3002", "\uff0c"),
    *("\u3001", "\u0964", "\u06d4", "\u060c", "\u201c", "\u2014", "\u20ac", "\u2192", "\U0001f600", "\u200d", "\uff01"),
    # White space.
    *(" ", " ", " ", "  ", "   ", "    ", "     ", " " * 9, " " * 17, "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0"),
    *("\u3000", "\u0085", "\u200b", "\u2028"),
    # Texts with a meaning in single tokenizers.
    *("<sentinel:12>", "IMGIMGABCZ"),
)


@functools.cache
def sample_texts() -> tuple[str, ...]:
    """Sample texts. Any two different known pre-tokenizations split at least one of them differently."""
    draw = random.Random(_SEED)  # noqa: S311  # nothing secret
    return tuple("".join(draw.choices(_FRAGMENTS, k=draw.randint(1, _LONGEST_SAMPLE))) for _ in range(_N_SAMPLES))


def pre_name(tokenizer: Tokenizer, stated: Mapping[str, Any]) -> str | None:
    """The name of a byte-level tokenizer's pre-tokenization; None if it is unknown.

    Args:
        tokenizer: the tokenizer.
        stated: its ``tokenizer.json``.
    """
    ignores_merges = stated["model"].get("ignore_merges") is True
    fitting = {
        name: pre
        for name, pre in PRE_TOKENIZATIONS.items()
        if pre.byte_level and pre.ignore_merges == ignores_merges and not pre.drops_whitespace
    }
    expected = [_pieces(tokenizer.normalizer, tokenizer.pre_tokenizer, text) for text in sample_texts()]
    for name in sorted(fitting, key=_preference):
        if splits_like(fitting[name], expected):
            return name
    return None


def splits_like(pre: PreTokenization, expected: Sequence[Sequence[str]]) -> bool:
    """Whether a pre-tokenization splits the sample texts as expected."""
    normalizer, splitter = build_normalizer(pre, lowercase=False), build_pre_tokenizer(pre)
    return all(
        _pieces(normalizer, splitter, text) == pieces for text, pieces in zip(sample_texts(), expected, strict=True)
    )


def _pieces(normalizer: Any, splitter: Any, text: str) -> list[str]:
    if normalizer is not None:
        text = normalizer.normalize_str(text)
    return [text] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(text)]


def _preference(name: str) -> tuple[int, str]:
    return (_PREFERRED.index(name) if name in _PREFERRED else len(_PREFERRED)), name
