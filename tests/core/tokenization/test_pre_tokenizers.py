r"""Every value of ``tokenizer.ggml.pre``, compared with llama.cpp and with the patterns of published models.

llama.cpp approximates some patterns. For these, texts are restricted to characters for which the approximation is
exact. The original patterns from the models' tokenizer.json run in the ``regex`` package as a second oracle.
"""

# ruff: noqa: RUF001  (the tests need characters that look alike)

from __future__ import annotations

import json
import logging
import unicodedata
from itertools import pairwise

import pytest

from slm_core.errors import UnsupportedModel
from slm_core.tokenization.pretokenizers import _DEEPSEEK_LETTERS, PRE_TOKENIZATIONS, build_pre_tokenizer

NORMAL, CONTROL, BYTE = 1, 3, 6
# The names in llama.cpp (src/llama-vocab.cpp).
NAMES = """
    default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano
    deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es
    jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4
    granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace refact command-r qwen2
    deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat chatglm-bpe glm4 glm5
    viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe chameleon
    minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe
    trillion granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4
    joyai-llm kimi-k2 ufakzeka grok-2 afmoe laguna minimax-m2 solar-open mellum2
""".split()  # noqa: SIM905  (a list literal would be five times as long)
PLAIN = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
COMPOSED = ("command-r", "modern-bert", "mpt", "olmo", "qwen2", "qwen35")
BOS = "<|begin|>"


def uncased(c: str) -> bool:
    """Not a mark, and cased only in ASCII: here llama.cpp has one class for all letters and none for marks."""
    return c.isascii() or unicodedata.category(c) in ("Lo", "Zs", "Po", "Sm", "Nd", "So")


def lower(c: str) -> bool:
    return uncased(c) and not ("A" <= c <= "Z")


def numberless(c: str) -> bool:
    return unicodedata.category(c)[0] != "N"


def ascii_space(c: str) -> bool:
    return c.isascii() or not c.isspace()


# Characters for which llama.cpp agrees with the model's tokenizer, and the reason why others differ.
SAME_IN_LLAMA_CPP = {
    **dict.fromkeys(
        ["gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie", "tekken", "granite-embed-multi-97m"], uncased
    ),
    **dict.fromkeys(["kimi-k2", "youtu"], lower),  # llama.cpp ignores case
    # llama.cpp ignores case, and joins the text before digits to the first group of digits
    **dict.fromkeys(["tiny_aya", "cohere2moe"], lambda c: lower(c) and numberless(c)),
    # digits as above; and U+F900, the start of a range, was composed to U+8C48 in the source of llama.cpp
    "afmoe": lambda c: numberless(c) and not "\u9fff" < c < "\uf900",
    "deepseek-llm": lambda c: numberless(c) and ascii_space(c),  # llama.cpp isolates runs of digits, not single digits
    "deepseek-coder": ascii_space,  # llama.cpp replaces other white space by a tab before it matches ranges
    "falcon": lambda c: not set(c.encode()) & set(b"\xb2\xb3\xb9\xbc\xbd\xbe"),  # digits after the mapping of bytes
    "superbpe": lambda c: c.isascii() or unicodedata.category(c) != "Nd",  # \d is ASCII in llama.cpp
}
OTHER_IN_LLAMA_CPP = ("falcon3", "gigachat")  # llama.cpp runs the pipelines of llama-3 and of gpt-2


def trained(texts: list[str], *, plain: bool) -> tuple[list[str], list[str]]:
    """Tokens and merges that cross words, numbers and punctuation, so that every split changes the ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if plain:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
        alphabet = {"limit_alphabet": 500, "special_tokens": [f"<0x{byte:02X}>" for byte in range(256)]}
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=2500, max_token_length=12, show_progress=False, **alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(merge) for merge in model["merges"]]


@pytest.fixture(scope="module")
def byte_level(make_texts):
    tokens, merges = trained(make_texts(2000, seed=1), plain=False)
    # tokens without merges: only a vocabulary that ignores merges finds them
    unreachable = ["QUICK", "Jumps", "camelCase", "HTTPServer", "\u0120Server", "\u0120brown", "......", "'LL", "-----"]
    return tokens + [token for token in unreachable if token not in tokens], merges


@pytest.fixture(scope="module")
def plain(make_texts):
    # llama.cpp truncates a token at NUL
    return trained(make_texts(2000, seed=1, only=lambda c: c != "\0"), plain=True)


def test_every_name_is_known():
    assert set(PRE_TOKENIZATIONS) == set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER_IN_LLAMA_CPP])
def test_equals_llama_cpp(name, request, write_gguf, open_vocab, llama_vocab, make_texts):
    tokens, merges = request.getfixturevalue("plain" if name in PLAIN else "byte_level")
    kinds = [BYTE if token.startswith("<0x") else NORMAL for token in tokens]
    path = write_gguf(
        model="whitespace" if name == "whitespace" else "gpt2",
        pre=name,
        tokens=[*tokens, BOS],
        token_type=[*kinds, CONTROL],
        merges=merges,
        bos_token_id=len(tokens),
        eos_token_id=len(tokens),
    )
    vocab, llama = open_vocab(path), llama_vocab(path)
    n_cut = 0
    for text in make_texts(150, seed=2, only=SAME_IN_LLAMA_CPP.get(name, lambda _: True)):
        ids = vocab.encode(text, add_special=True, parse_special=False)
        composed = unicodedata.normalize("NFC", text) if name in COMPOSED else text
        assert ids == llama.encode(composed, add_special=True), f"{name}: {text!r}"
        n_cut += len(ids)
    assert n_cut > 1500, "the texts are too short to distinguish pre-tokenizers"


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The patterns of tokenizer.json files, in their order.
PUBLISHED = {
    "llama-bpe": [LLAMA3],
    "glm4": [LLAMA3],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen35": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [GPT4O],
    "gigachat": [GPT4O],
    "granite-embed-multi-97m": [GPT4O],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "minicpm5": [
        r"\p{N}{1,3}",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "jais-2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|"
        r"\s{1,2}(?!\S)|\s{1}"
    ],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_WORDS],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "smollm": [r"\p{N}", GPT2],
}


def isolated(regex, pattern: str, piece: str) -> list[str]:
    """Matches and the text between them; an empty match splits."""
    ends = {0, len(piece)}
    for match in regex.finditer(pattern, piece, flags=regex.V1 if "&&" in pattern else regex.V0):
        ends |= set(match.span())
    places = sorted(ends)
    return [piece[start:end] for start, end in pairwise(places)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_the_published_pattern(name, make_texts):
    regex = pytest.importorskip("regex", reason="the regex package runs the published patterns in this test")
    pre_tokenizer = build_pre_tokenizer(PRE_TOKENIZATIONS[name])
    for text in make_texts(400, seed=3, spelled=["ſ'ſ 'ſ", "a b c", "É\u0301cole", "漢字かな", " " * 600]):
        pieces = [text]
        for pattern in PUBLISHED[name]:
            pieces = [part for piece in pieces for part in isolated(regex, pattern, piece)]
        # a byte-level piece has one character for each byte
        lengths = [len(piece) for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
        assert lengths == [len(piece.encode()) for piece in pieces], f"{name}: {text!r} is {pieces}"


FALCON = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "Digits", "individual_digits": False},
    {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False},
]
DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# Pre-tokenizers of tokenizer.json files. The last three are rewritten to run in linear time.
STAGES = {
    "falcon": FALCON,
    "falcon3": [*FALCON[:2], DIGITS],
    "smollm": [DIGITS, FALCON[1]],
    "tiny_aya": [split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(GPT4O), BYTES],
    "superbpe": [{"type": "Digits", "individual_digits": False}, split(r"(?=(\d{3})+(?!\d))"), BYTES],
    "deepseek-llm": [
        split(r"[\r\n]"),
        split(rf"\s?[{_DEEPSEEK_LETTERS}]+"),
        split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        split(r"\s+$"),
        split("[一-龥ࠀ-一가-\ud7ff]+"),
        DIGITS,
        BYTES,
    ],
}
NUMERIC = [
    "123½ ½1234",
    "12½12345x",
    "1234567abc",
    "9" * 20,
    " 1_000_000 ",
    "½" * 5 + "1" * 7,
    "\u0967\u0968\u0969\u0966",
]


@pytest.mark.parametrize("name", STAGES)
def test_equals_the_published_stages(name, make_texts):
    from tokenizers import Tokenizer, models

    described = json.loads(Tokenizer(models.BPE()).to_str())
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": STAGES[name]}
    reference = Tokenizer.from_str(json.dumps(described)).pre_tokenizer
    pre_tokenizer = build_pre_tokenizer(PRE_TOKENIZATIONS[name])
    for text in make_texts(600, seed=4, spelled=NUMERIC):
        expected = [piece for piece, _ in reference.pre_tokenize_str(text)]
        assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] == expected, f"{name}: {text!r}"


def test_falcon_splits_at_bytes_that_look_like_digits():
    pieces = [
        piece for piece, _ in build_pre_tokenizer(PRE_TOKENIZATIONS["falcon"]).pre_tokenize_str("Führer, x 12345")
    ]
    assert pieces == ["FÃ", "¼", "hrer", ",", "Ġx", "Ġ", "123", "45"]


def test_an_unknown_name_is_refused(write_gguf, open_vocab):
    path = write_gguf(model="gpt2", pre="qwen99", tokens=["a", "b", "ab"], merges=["a b"])
    with pytest.raises(UnsupportedModel, match=r"unknown tokenizer\.ggml\.pre 'qwen99' \(accepted: a\.x-4.*youtu\)"):
        open_vocab(path)


def test_a_missing_name_is_the_default_with_a_warning(
    byte_level, write_gguf, open_vocab, llama_vocab, make_texts, caplog
):
    tokens, merges = byte_level
    path = write_gguf(model="gpt2", tokens=tokens, token_type=[NORMAL] * len(tokens), merges=merges)
    with caplog.at_level(logging.WARNING, logger="slm_core.tokenization"):
        vocab = open_vocab(path)
    assert "tokenizer.ggml.pre is missing; taking 'default'" in caplog.text
    for text in make_texts(100, seed=5):
        assert vocab.encode(text, add_special=False, parse_special=False) == llama_vocab(path).encode(text), f"{text!r}"
