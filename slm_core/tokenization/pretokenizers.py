r"""Pre-tokenization: how text is split before byte-pair merges, for each value of ``tokenizer.ggml.pre``.

A name is for the tokenizer of a published model. The patterns are from this model's tokenizer.json, in Oniguruma
syntax, which the ``tokenizers`` library uses. llama.cpp defines the names (src/llama-vocab.cpp) and approximates
patterns that std::regex cannot express. Here the original patterns are used, because the contract requires the
reference tokenizer. llama.cpp also omits Unicode normalization (Qwen, Command-R and the GPT-NeoX family compose to NFC)
and uses another model's pipeline for falcon, falcon3 and gigachat. If the original is not public, the patterns are
llama.cpp's.

Three originals take time quadratic in the length of a run of digits or spaces. They are rewritten here to split at the
same places in linear time, with ``\G`` (where the previous match ended) and possessive quantifiers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from slm_core.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from slm_core.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """The pre-tokenization of one family of byte-pair vocabularies.

    Attributes:
        splits: patterns, applied in order; each splits every piece into its matches and the text between them.
        byte_splits: patterns applied after bytes are mapped to GPT-2's 256 printable characters.
        byte_level: whether tokens are spelled in GPT-2's characters; otherwise in plain text, with ``<0xXX>`` for bytes
            that no token spells.
        normalizer: applied first: ``nfc``, or ``metaspace`` (each space becomes U+2581).
        ignore_merges: whether a piece that is a token needs no merges.
        add_bos: whether a text begins with BOS unless the file says otherwise.
        forces_bos: whether a text begins with BOS even if the file says otherwise.
        drops_whitespace: whether whitespace only separates pieces.
    """

    splits: tuple[str, ...]
    byte_splits: tuple[str, ...] = ()
    byte_level: bool = True
    normalizer: Literal["nfc", "metaspace"] | None = None
    ignore_merges: bool = False
    add_bos: bool = False
    forces_bos: bool = False
    drops_whitespace: bool = False


def pre_tokenization(name: str, source: str) -> PreTokenization:
    """Look up a value of ``tokenizer.ggml.pre``.

    Raises:
        UnsupportedModel: the name is unknown.
    """
    if name not in PRE_TOKENIZATIONS:
        accepted = ", ".join(sorted(PRE_TOKENIZATIONS))
        raise UnsupportedModel(f"{source}: unknown tokenizer.ggml.pre {name[:80]!r} (accepted: {accepted})")
    return PRE_TOKENIZATIONS[name]


def composes(gguf: GgufFile) -> bool:
    """Whether the file's reference tokenizer applies Unicode NFC first; engines without NFC need to know."""
    pre = PRE_TOKENIZATIONS.get(gguf.get("tokenizer.ggml.pre", str, ""))
    return pre is not None and pre.normalizer == "nfc"


def build_normalizer(pre: PreTokenization, *, lowercase: bool) -> Normalizer | None:
    """Make the ``tokenizers`` library's normalizer; ``None`` if text is not normalized."""
    from tokenizers import normalizers

    steps: list[Normalizer] = [normalizers.Lowercase()] if lowercase else []
    if pre.normalizer == "nfc":
        steps.append(normalizers.NFC())
    elif pre.normalizer == "metaspace":
        steps.append(normalizers.Replace(" ", "\u2581"))
    return normalizers.Sequence(steps) if steps else None


def build_pre_tokenizer(pre: PreTokenization) -> PreTokenizer:
    """Make the pre-tokenizer of the ``tokenizers`` library."""
    from tokenizers import Regex, pre_tokenizers

    def isolated(pattern: str) -> PreTokenizer:
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    steps = [isolated(pattern) for pattern in pre.splits]
    if pre.drops_whitespace:
        steps.append(pre_tokenizers.WhitespaceSplit())
    if pre.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    steps += [isolated(pattern) for pattern in pre.byte_splits]
    return pre_tokenizers.Sequence(steps)


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ASCII_PUNCTUATION = r"!-/:-@\[-`{-~"


def _cased_words(suffix: str, but: str = "") -> str:
    """Words that end at a change from lower to upper case, like in GPT-4o."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_MINICPM5 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")
_UFAKZEKA = _QWEN2.removeprefix(f"{_CONTRACTION}|")
_GPT4O = rf"{_cased_words(f'{_CONTRACTION}?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_YOUTU = _GPT4O.replace(r"|\p{N}{1,3}|", r"|\p{N}|")
_TEKKEN = rf"{_cased_words('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI_K2 = (
    rf"\p{{Han}}+|{_cased_words(f'{_CONTRACTION}?', but=_NOT_HAN)}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "|".join(
    [*(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s{1}"]
)
_BAILINGMOE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DIGIT_RUNS_FROM_RIGHT = r"(?<!\p{N})\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))|(?<=\p{N})\G\p{N}{3}"
_PUNCTUATION_RUNS = rf"[{_ASCII_PUNCTUATION}\p{{P}}]+"

# DeepSeek's words; the families that share them differ in newlines after punctuation.
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}",
)
_CJK_TO_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

# The cased letters that deepseek-llm lists one by one.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    r"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    r"\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    r"\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)

# superbpe cuts where `(?=(\d{3})+(?!\d))` matches the empty string. A piece runs from one cut to the next: three digits
# (if it starts at a cut), then other characters and runs too short to be cut, then what a longer run has over.
_SUPERBPE_PIECES = (
    r"\G(?:(?:(?<=\d)\d{3}|\d{3}(?=(?:\d{3})*+(?!\d)))(?:[^\d]++|(?<!\d)\d{1,2}(?!\d))*"
    r"(?:(?<!\d)\d{1,2}(?=(?:\d{3})++(?!\d)))?"
    r"|(?:[^\d]++|(?<!\d)\d{1,2}(?!\d))++(?:(?<!\d)\d{1,2}(?=(?:\d{3})++(?!\d)))?|\d{1,2}(?=(?:\d{3})++(?!\d)))"
)


_gpt2 = PreTokenization((_GPT2,))
_digits_gpt2 = PreTokenization((r"\p{N}", _GPT2))
_llama3 = PreTokenization((_LLAMA3,), ignore_merges=True, add_bos=True)
_llama3_plain = PreTokenization((_LLAMA3,))
_qwen2 = PreTokenization((_QWEN2,))
_gpt4o = PreTokenization((_GPT4O,))
_deepseek3 = PreTokenization(_DEEPSEEK3)
_bloom = PreTokenization((_BLOOM,))
_metaspace = PreTokenization(("\\n+",), byte_level=False, normalizer="metaspace")
_gemma4 = replace(_metaspace, add_bos=True, forces_bos=True)
_tiny_aya = PreTokenization((r"(?<!\d)\d{1,3}(?=(?:\d{3})*+\b)|(?<=\d)\G\d{3}", _GPT4O))

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    # Byte-level splitting by GPT-2's pattern.
    **dict.fromkeys(
        ["a.x-4.0", "exaone4", "gpt-2", "granite-docling", "jais", "jina-de", "jina-es", "jina-v1-en", "jina-v2-code"],
        _gpt2,
    ),
    **dict.fromkeys(["jina-v2-de", "jina-v2-es", "mellum", "phi-2", "roberta-bpe", "trillion"], _gpt2),
    **dict.fromkeys(["modern-bert", "mpt", "olmo"], replace(_gpt2, normalizer="nfc")),
    # The same after isolating every digit.
    **dict.fromkeys(["codeshell", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder"], _digits_gpt2),
    "command-r": replace(_digits_gpt2, normalizer="nfc"),
    # Punctuation first; digits once the bytes are mapped, where characters such as the superscript two count as digits.
    "falcon": PreTokenization((_PUNCTUATION_RUNS, _GPT2), (r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon3": PreTokenization((_PUNCTUATION_RUNS, _GPT2), (r"\p{N}",), add_bos=True),
    # Words with a leading character, digits in threes.
    **dict.fromkeys(["falcon-h1", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0"], _llama3),
    "pixtral": _llama3,
    **dict.fromkeys(["chatglm-bpe", "dbrx", "smaug-bpe"], _llama3_plain),
    **dict.fromkeys(["glm4", "glm5"], replace(_llama3_plain, ignore_merges=True)),
    "jais-2": PreTokenization((_JAIS2,)),
    "minicpm5": PreTokenization((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    # The same with single digits.
    "qwen2": replace(_qwen2, normalizer="nfc"),
    **dict.fromkeys(["deepseek-r1-qwen", "f2llmv2", "grok-2", "hunyuan", "kormo", "megrez", "solar-open"], _qwen2),
    "stablelm2": _qwen2,
    "qwen35": PreTokenization((_QWEN35,), normalizer="nfc"),
    "ufakzeka": PreTokenization((_UFAKZEKA,)),
    "laguna": PreTokenization((r"\n+", _QWEN2)),
    "bailingmoe": PreTokenization((_BAILINGMOE,)),
    "bailingmoe2": PreTokenization((_BAILINGMOE,)),
    "llada-moe": PreTokenization((_BAILINGMOE,)),
    "seed-coder": PreTokenization((_SEED_CODER,)),
    "exaone-moe": PreTokenization((_EXAONE_MOE,)),
    # Words split by case.
    **dict.fromkeys(["gigachat", "gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"], _gpt4o),
    "granite-embed-multi-97m": replace(_gpt4o, ignore_merges=True),
    "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, add_bos=True),
    "kimi-k2": PreTokenization((_KIMI_K2,)),
    "tiny_aya": _tiny_aya,
    "cohere2moe": _tiny_aya,
    "youtu": PreTokenization(
        (
            r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
            r"\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            _YOUTU,
        ),
        ignore_merges=True,
    ),
    # DeepSeek, and models with the same patterns.
    "deepseek-llm": PreTokenization(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"(?<!\s)\s++$",
            _CJK_TO_HANGUL,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenization((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_TO_HANGUL, r"\p{N}")),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"], _deepseek3),
    "spark2_5": PreTokenization((*_DEEPSEEK3[:2], rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "afmoe": PreTokenization(
        (
            _DIGIT_RUNS_FROM_RIGHT,
            r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
            r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
            _DEEPSEEK3[2],
        )
    ),
    # Others.
    **dict.fromkeys(["bloom", "gpt3-finnish", "poro-chat"], _bloom),
    "viking": PreTokenization((_BLOOM, r"\p{N}")),
    "superbpe": PreTokenization((r"\p{N}+", _SUPERBPE_PIECES)),
    "chameleon": PreTokenization(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            r"\p{N}",
            rf"[\p{{P}}{_ASCII_PUNCTUATION}]",
            _GPT2,
        ),
        add_bos=True,
    ),
    # Merges over plain text: SentencePiece's alphabet with byte-pair merges.
    "gemma4": _gemma4,
    "granite-embed-multi-311m": _gemma4,
    "sarvam-moe": _metaspace,
    "whitespace": PreTokenization((), byte_level=False, drops_whitespace=True),
}
