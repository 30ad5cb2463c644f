"""Vocabularies of directories as metadata of GGUF files: read by us and by llama.cpp."""

# ruff: noqa: RUF001  (characters that look alike are in published patterns)

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slm_core.errors import UnsupportedModel
from slm_core.exporting.pre_tokenizers import pre_name, sample_texts
from slm_core.exporting.vocabulary import vocabulary_metadata
from slm_core.gguf import GgufFile, header
from slm_core.loading import demo_model_path
from slm_core.tokenization import build_vocab
from slm_core.tokenization.directory import directory_vocab
from slm_core.tokenization.export import tokenizer_files
from slm_core.tokenization.pretokenizers import PRE_TOKENIZATIONS, build_normalizer, build_pre_tokenizer

VOCABS = {"gpt-2": "gpt-2", "qwen2": "qwen2", "llama-bpe": "llama-bpe", "llama-spm": "default", "phi-3": "default"}
"""Published vocabularies, with their ``tokenizer.ggml.pre``."""
GPT2_ALPHABET = pre_tokenizers.ByteLevel.alphabet()
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
PLAIN_BYTES = {**BYTES, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(pattern: str, behavior: str = "Isolated", *, invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


PUBLISHED: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]], bool]] = {
    "gpt-2": (None, [{**BYTES, "use_regex": True}], False),
    "qwen2": ({"type": "NFC"}, [split(QWEN2), PLAIN_BYTES], False),
    "deepseek-r1-qwen": (None, [split(QWEN2), PLAIN_BYTES], False),
    "llama-bpe": (None, [split(LLAMA3), PLAIN_BYTES], True),
    "smaug-bpe": (None, [split(LLAMA3, "Removed", invert=True), PLAIN_BYTES], False),
    "smollm": (None, [DIGITS, {**BYTES, "use_regex": True}], False),
    "command-r": ({"type": "NFC"}, [DIGITS, {**BYTES, "use_regex": True}], False),
    "olmo": ({"type": "NFC"}, [{**BYTES, "use_regex": True}], False),
    "bloom": (None, [split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), PLAIN_BYTES], False),
    "deepseek-v3": (
        None,
        [
            split(r"\p{N}{1,3}"),
            split(r"[一-龥぀-ゟ゠-ヿ]+"),
            split(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            PLAIN_BYTES,
        ],
        False,
    ),
    "falcon": (
        None,
        [
            {"type": "Punctuation", "behavior": "Contiguous"},
            {**BYTES, "use_regex": True},
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        ],
        False,
    ),
}
"""Pre-tokenizers as published tokenizer.json files state them: normalizer, steps, ``ignore_merges``."""


def write_file(folder: Path, n_vocab: int, ends: tuple[int, ...] = ()) -> Path:
    """Write a directory's vocabulary as a GGUF file that llama.cpp reads."""
    metadata = vocabulary_metadata(folder, n_vocab, ends)
    path = folder / "vocab.gguf"
    path.write_bytes(header({"general.architecture": "llama", **metadata}))
    return path


def directory(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def exported(published, open_vocab, tmp_path_factory) -> Callable[[str], Path]:
    """A function from the name of a published vocabulary to its file after a directory and another export."""

    @cache
    def export(name: str) -> Path:
        original, folder = open_vocab(published(name)), tmp_path_factory.mktemp(name)
        with GgufFile.open(published(name)) as file:
            directory(folder, tokenizer_files(file, 2048))
        return write_file(folder, original.size, tuple(sorted(original.eog_ids)))

    return export


@pytest.mark.parametrize("name", VOCABS)
def test_a_published_vocabulary_survives(name, published, open_vocab, llama_vocab, make_texts, exported) -> None:
    """Through a directory to another GGUF file; llama.cpp splits texts by both files alike."""
    original, path = open_vocab(published(name)), exported(name)
    with GgufFile.open(path) as file:
        assert file.require("tokenizer.ggml.pre", str) == VOCABS[name]
    restored = open_vocab(path)
    assert (restored.size, restored.bos, restored.eos) == (original.size, original.bos, original.eos)
    assert (restored.eog_ids, restored.infill) == (original.eog_ids, original.infill)
    before, after = llama_vocab(published(name)), llama_vocab(path)
    assert after.eog_ids() == before.eog_ids()
    # phi-3's tokens strip the white space after them, which files express by the model's name.
    only = (lambda c: ord(c) < 128 or not c.isspace()) if name == "phi-3" else (lambda c: True)
    for i, text in enumerate(make_texts(400, seed=7, only=only, spelled=["<|im_end|>"])):
        flags = {"add_special": bool(i & 1), "parse_special": bool(i & 2) and name != "phi-3"}
        assert restored.encode(text, **flags) == original.encode(text, **flags), f"{text!r}"
        assert after.encode(text, **flags) == before.encode(text, **flags), f"llama.cpp, {text!r}"


@pytest.mark.parametrize("name", VOCABS)
def test_texts_have_the_publishers_tokens(name, published, open_vocab, exported) -> None:
    vocab = open_vocab(exported(name))
    texts = Path(f"{published(name)}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    outputs = Path(f"{published(name)}.out").read_text(encoding="utf-8").splitlines()
    for text, output in zip(texts, outputs, strict=False):
        expected = [int(token) for token in output.split()]
        assert vocab.encode(text, add_special=False, parse_special=False) == expected, f"{text!r}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pre_tokenizers_are_recognized(name) -> None:
    normalizer, steps, ignore_merges = PUBLISHED[name]
    vocab = {letter: i for i, letter in enumerate(sorted(GPT2_ALPHABET))}
    stated = {
        "version": "1.0",
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": ignore_merges},
    }
    assert pre_name(Tokenizer.from_str(json.dumps(stated)), stated) == name


def test_an_unknown_pre_tokenizer_has_no_name() -> None:
    stated = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"[a-m]+|[^a-m]+"), PLAIN_BYTES]},
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    assert pre_name(Tokenizer.from_str(json.dumps(stated)), stated) is None


def test_the_sample_texts_tell_all_pre_tokenizations_apart() -> None:
    """Otherwise a tokenizer could get another one's name. Two patterns differ in form, but not in meaning."""
    names = {(pre.splits, pre.normalizer): name for name, pre in PRE_TOKENIZATIONS.items() if pre.byte_level}
    splits = {}
    for name in names.values():
        normalizer = build_normalizer(PRE_TOKENIZATIONS[name], lowercase=False)
        splitter = build_pre_tokenizer(PRE_TOKENIZATIONS[name])
        texts = [text if normalizer is None else normalizer.normalize_str(text) for text in sample_texts()]
        splits[name] = [[piece for piece, _ in splitter.pre_tokenize_str(text)] for text in texts]
    assert len(splits) > 30
    alike = [{a, b} for a, b in combinations(splits, 2) if splits[a] == splits[b]]
    assert alike == [{"stablelm2", "llada-moe"}]  # Qwen's pattern, and Ling's


def wordpiece(folder: Path, *, lowercase: bool) -> Path:
    """A small vocabulary of BERT's kind."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "dog",
        "run",
        "##s",
        "##ning",
        "Dog",
        "a",
        "b",
        "##b",
        "é",
    ]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(words[:5])
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece(tmp_path, llama_vocab, lowercase) -> None:
    folder = wordpiece(tmp_path, lowercase=lowercase)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = write_file(folder, 15)
    with GgufFile.open(path) as file:
        vocab = build_vocab(file)
    for text in ("the dog runs", "Dogs running", "abba bb", "é É", "unknown the", "the [MASK] dog"):
        expected = reference.encode(text).ids
        assert vocab.encode(text, add_special=True, parse_special=True) == expected, text
        if lowercase:  # llama.cpp always takes lower case
            assert llama_vocab(path).encode(text, add_special=True, parse_special=True) == expected, text


def test_what_gguf_cannot_express_is_refused(tmp_path) -> None:
    """The merges of a tokenizer without scores may depend on more than the merged piece."""
    vocab = {piece: i for i, piece in enumerate(["a", "b", "c", "ab", "bc", "abc", "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("b", "c"), ("a", "b"), ("ab", "c")]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    assert directory_vocab(tmp_path).encode("abc", add_special=False, parse_special=False) == [0, 4]
    with pytest.raises(UnsupportedModel, match="GGUF cannot express its tokenizer"):
        vocabulary_metadata(tmp_path, 7, ())


def test_two_unknown_ends_have_a_role_and_more_are_refused(open_vocab, tmp_path) -> None:
    with GgufFile.open(demo_model_path()) as file:
        directory(tmp_path, tokenizer_files(file, 2048))
    size = open_vocab(demo_model_path()).size
    metadata = vocabulary_metadata(tmp_path, size, (5, 6))
    assert (metadata["tokenizer.ggml.eot_token_id"], metadata["tokenizer.ggml.eom_token_id"]) == (5, 6)
    with pytest.raises(UnsupportedModel, match=r"which tokens end an answer \(such as 7\)"):
        vocabulary_metadata(tmp_path, size, (5, 6, 7))


def test_ids_without_tokens_are_unused(open_vocab, tmp_path, llama_vocab) -> None:
    with GgufFile.open(demo_model_path()) as file:
        directory(tmp_path, tokenizer_files(file, 2048))
    size = open_vocab(demo_model_path()).size
    llama = llama_vocab(write_file(tmp_path, size + 3))
    assert llama.size == size + 3
    assert llama.token_bytes(size + 2, special=False) == b""
