"""SentencePiece vocabularies, BPE and unigram, compared with the sentencepiece package and llama.cpp."""

from __future__ import annotations

import base64
import io
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.exporting.vocabulary import vocabulary_metadata
from slm_core.tokenization.charsmap import CharsMap
from slm_core.tokenization.directory import directory_vocab

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SYMBOLS = ("<ud>", "<x y>")  # the notation in GGUF files
META_SYMBOLS = [symbol.replace(" ", "\u2581") for symbol in SYMBOLS]
SPACES = "\u2581\u2581\u2581"


class Trained(NamedTuple):
    """A vocabulary of the sentencepiece package and its metadata in a GGUF file."""

    proto: bytes
    processor: Any
    metadata: dict[str, Any]


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protobuf message, by number."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 2:
            n = varint()
            yield key >> 3, message[at : at + n]
            at += n
        elif key & 7 == 0:
            varint()
        else:
            at += {1: 8, 5: 4}[key & 7]


def with_unused(proto: bytes, ids: set[int]) -> bytes:
    """The model with these pieces marked as unused (field 3 of field 1 is 5)."""

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    n_pieces, parts = 0, []
    for number, payload in fields(proto):
        if number == 1:
            payload += b"\x18\x05" if n_pieces in ids else b""
            n_pieces += 1
        parts += [varint(number << 3 | 2), varint(len(payload)), payload]
    return b"".join(parts)


def narrowed(text: str) -> str:
    """The text with fewer distinct non-Latin characters, so that small vocabularies cover them."""
    return "".join(c if ord(c) < 0x250 else chr(ord(c) // 512 * 512 + ord(c) % 5) for c in text)


def kind_of(processor: Any, i: int) -> int:
    if processor.is_unknown(i):
        return UNKNOWN
    if processor.is_control(i):
        return CONTROL
    if processor.is_byte(i):
        return BYTE
    return USER_DEFINED if processor.id_to_piece(i).replace("\u2581", " ") in (*SYMBOLS, "   ") else NORMAL


def load(proto: bytes) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece package is the oracle of this test")
    return sentencepiece.SentencePieceProcessor(model_proto=proto)


def train(texts: list[str], model: str, **options: Any) -> Trained:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece package is the oracle of this test")
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=buffer,
        model_type=model,
        **{"user_defined_symbols": META_SYMBOLS, "character_coverage": 0.99, "minloglevel": 2} | options,
    )
    processor = load(buffer.getvalue())
    kinds = [kind_of(processor, i) for i in range(processor.get_piece_size())]
    pieces = [processor.id_to_piece(i) for i in range(len(kinds))]
    normalizer = dict(fields(dict(fields(buffer.getvalue()))[3]))
    metadata = {
        "model": "llama" if model == "bpe" else "t5",
        # like converters: user-defined tokens contain spaces
        "tokens": [p.replace("\u2581", " ") if k == USER_DEFINED else p for p, k in zip(pieces, kinds, strict=True)],
        "token_type": kinds,
        "scores": [processor.get_score(i) for i in range(len(kinds))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": options.get("add_dummy_prefix", True),
        "remove_extra_whitespaces": options["remove_extra_whitespaces"],
        "precompiled_charsmap": normalizer.get(2) or None,
    }
    return Trained(buffer.getvalue(), processor, metadata)


@pytest.fixture(scope="module")
def training_texts(make_texts):
    return [narrowed(text.replace("\n", " ").replace("\0", " ")) for text in make_texts(2000, seed=1)]


BPE_RULES = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}


@pytest.fixture(scope="module")
def bpe(training_texts):
    return train(training_texts, "bpe", vocab_size=2600, **BPE_RULES)


@pytest.fixture(scope="module")
def bpe_without_prefix(training_texts):
    """Like gemma's vocabulary: no leading space, and user-defined tokens for runs of spaces."""
    rules = {**BPE_RULES, "add_dummy_prefix": False, "user_defined_symbols": [*META_SYMBOLS, SPACES]}
    return train(training_texts, "bpe", vocab_size=2600, **rules)


@pytest.fixture(scope="module")
def unigram(training_texts):
    return train(training_texts, "unigram", vocab_size=1700, remove_extra_whitespaces=True)


def texts_for(make_texts, seed: int, spelled=()) -> list[str]:
    return [narrowed(text) for text in make_texts(500, seed=seed, only=lambda c: c != "\0", spelled=spelled)]


def assert_same(vocab, processor, texts: list[str]) -> None:
    for text in texts:
        ids = vocab.encode(text, add_special=True, parse_special=False)
        assert ids == processor.encode(text), f"{text!r}"
        assert vocab.decode(ids) == processor.decode(ids), f"{text!r}"


def test_bpe_equals_sentencepiece(bpe, write_gguf, open_vocab, make_texts):
    # no user-defined tokens: llama.cpp and slm-core add a space after them
    vocab = open_vocab(write_gguf(**{**bpe.metadata, "add_bos_token": False}))
    assert_same(vocab, bpe.processor, texts_for(make_texts, 21))


def test_bpe_without_prefix_equals_sentencepiece(bpe_without_prefix, write_gguf, open_vocab, make_texts):
    vocab = open_vocab(write_gguf(**{**bpe_without_prefix.metadata, "add_bos_token": False}))
    assert_same(vocab, bpe_without_prefix.processor, texts_for(make_texts, 20, spelled=(*SYMBOLS, "<ud", "   ", "  ")))


def test_bpe_equals_llama_cpp(bpe, write_gguf, open_vocab, llama_vocab, make_texts):
    path = write_gguf(**bpe.metadata)
    vocab, llama = open_vocab(path), llama_vocab(path)
    for i, text in enumerate(make_texts(500, seed=22, spelled=(*SYMBOLS, "<s>", "</s>", "<unk>", "<0x41>"))):
        adds, parses = bool(i & 1), bool(i & 2)
        ids = vocab.encode(text, add_special=adds, parse_special=parses)
        assert ids == llama.encode(text, add_special=adds, parse_special=parses), f"{text!r}"
    for special in (False, True):
        for token in range(vocab.size):
            assert vocab.token_bytes(token, special=special) == llama.token_bytes(token, special=special), token


def test_pieces_that_end_in_a_space_are_found(write_gguf, open_vocab, llama_vocab):
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "a\u2581", "a\u2581b", "\u2581a"]
    scores = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 6
    path = write_gguf(model="llama", tokens=tokens, scores=scores, token_type=kinds, add_bos_token=False)
    ids = open_vocab(path).encode("a b a", add_special=False, parse_special=False)
    assert ids == llama_vocab(path).encode("a b a")
    assert [tokens[i] for i in ids] == ["\u2581", "a\u2581b", "\u2581a"]


def test_unused_pieces_are_split(bpe, write_gguf, open_vocab, make_texts):
    pieces, kinds = bpe.metadata["tokens"], bpe.metadata["token_type"]
    unused = {i for i, kind in enumerate(kinds) if kind == NORMAL and i % 3 == 0 and len(pieces[i]) > 1}
    metadata = {**bpe.metadata, "token_type": [UNUSED if i in unused else kind for i, kind in enumerate(kinds)]}
    vocab = open_vocab(write_gguf(**{**metadata, "add_bos_token": False}))
    processor = load(with_unused(bpe.proto, unused))
    for text in texts_for(make_texts, 23):
        ids = vocab.encode(text, add_special=False, parse_special=False)
        assert ids == processor.encode(text), f"{text!r}"
        assert not unused & set(ids)


def test_characters_without_bytes_are_one_unknown_token(write_gguf, open_vocab):
    tokens, kinds = ["<unk>", "<s>", "</s>", "\u2581", "a"], [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL]
    vocab = open_vocab(
        write_gguf(model="llama", tokens=tokens, token_type=kinds, scores=[0.0] * 5, add_bos_token=False)
    )
    assert vocab.encode("a\u4e2d\u6587a", add_special=False, parse_special=False) == [3, 4, 0, 4]


@pytest.mark.parametrize("squeezes", [True, False])
def test_unigram_equals_sentencepiece(squeezes, training_texts, write_gguf, open_vocab, make_texts):
    trained = train(training_texts, "unigram", vocab_size=1700, remove_extra_whitespaces=squeezes)
    vocab = open_vocab(write_gguf(**{**trained.metadata, "add_eos_token": False}))
    score = dict(enumerate(trained.metadata["scores"])).__getitem__
    n_ties = 0
    for text in texts_for(make_texts, 24):
        ids, expected = vocab.encode(text, add_special=True, parse_special=False), trained.processor.encode(text)
        if ids != expected:  # ties, because sentencepiece rounds sums of scores to 32 bits
            assert sorted(map(score, ids)) == sorted(map(score, expected)), f"{text!r}"
            n_ties += 1
    assert n_ties < 10


def test_unigram_equals_llama_cpp(unigram, write_gguf, open_vocab, llama_vocab, make_texts):
    path = write_gguf(**unigram.metadata)
    vocab, llama = open_vocab(path), llama_vocab(path)
    assert (vocab.bos, vocab.eos, vocab.eog_ids) == (llama.bos, llama.eos, llama.eog_ids())
    for i, text in enumerate(make_texts(500, seed=26, spelled=(*SYMBOLS, "<s>", "</s>", "<unk>"))):
        adds, parses = bool(i & 1), bool(i & 2)
        ids = vocab.encode(text, add_special=adds, parse_special=parses)
        assert ids == llama.encode(text, add_special=adds, parse_special=parses), f"{text!r}"


def write_directory(folder: Path, metadata: dict[str, Any]) -> Path:
    """The files of a directory with XLM-RoBERTa's kind of tokenizer."""
    tokens, kinds = metadata["tokens"], metadata["token_type"]
    special = [i for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    stated = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special],
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(metadata["precompiled_charsmap"]).decode(),
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [*zip(tokens, metadata["scores"], strict=True)]},
    }
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps(stated))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_directories_with_unigrams_equal_sentencepiece(training_texts, make_texts, tmp_path):
    options = {"remove_extra_whitespaces": True, "user_defined_symbols": []}
    trained = train(training_texts[:600], "unigram", vocab_size=900, **options)
    vocab = directory_vocab(write_directory(tmp_path, trained.metadata))
    assert (vocab.size, vocab.bos, vocab.eos, vocab.unknown) == (len(trained.metadata["tokens"]), 1, 2, 0)
    score = dict(enumerate(trained.metadata["scores"])).__getitem__
    n_ties = 0
    for text in texts_for(make_texts, 27, spelled=("<s>", "</s>", "<unk>")):
        # Unlike sentencepiece, the library splits at all white space, and drops marks after mapped characters.
        text = "".join(c for c in " ".join(text.split()) if unicodedata.category(c)[0] not in "CM")
        ids, expected = vocab.encode(text, add_special=False, parse_special=False), trained.processor.encode(text)
        if ids != expected:  # ties, because sentencepiece rounds sums of scores to 32 bits
            assert sorted(map(score, ids)) == sorted(map(score, expected)), f"{text!r}"
            n_ties += 1
        if 0 not in ids:
            assert vocab.decode(ids) == trained.processor.decode(ids)
    assert n_ties < 10
    with pytest.raises(UnsupportedModel, match="a Unigram tokenizer cannot be written as GGUF"):
        vocabulary_metadata(tmp_path, vocab.size, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0, 1]]}}, "not a list of pieces and scores"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": {"a": 0}}}, "not a list of pieces and scores"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [[3, 0.0]]}}, "is not a text"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", "b"]]}}, "not a tokenizer"),
        ({"model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}}, "not a tokenizer"),
        ({"pre_tokenizer": None}, "without the pre-tokenizer Metaspace"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": 3}}, "not a tokenizer"),
    ],
)
def test_damaged_unigrams_are_refused(unigram, tmp_path, change, message):
    path = write_directory(tmp_path, unigram.metadata) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((InvalidModelFile, UnsupportedModel), match=message) as caught:
        directory_vocab(tmp_path)
    assert "\n" not in str(caught.value)


def test_unigram_falls_back_to_bytes(unigram, write_gguf, open_vocab):
    n = len(unigram.metadata["tokens"])
    vocab = open_vocab(
        write_gguf(
            **unigram.metadata
            | {
                "tokens": unigram.metadata["tokens"] + [f"<0x{byte:02X}>" for byte in range(256)],
                "token_type": unigram.metadata["token_type"] + [BYTE] * 256,
                "scores": unigram.metadata["scores"] + [-20.0] * 256,
                "add_eos_token": False,
            }
        )
    )
    _, *ids = vocab.encode("\U0001f9ff\U0001f9ff", add_special=False, parse_special=False)
    assert ids == [n + byte for byte in "\U0001f9ff\U0001f9ff".encode()]


def test_the_character_map_is_nmt_nfkc(unigram):
    charsmap = CharsMap(unigram.metadata["precompiled_charsmap"], "x")
    # nmt_nfkc: compatibility forms, composition of several characters, no control characters, one kind of space
    assert charsmap("\ufb01\u2460\uff21 \u30ab\u3099 e\u0301\tx\u0007\u3000\u200b|") == "fi1A \u30ac \u00e9 x  |"
    assert charsmap("\uff76\uff76\uff9e") == "\u30ab\u30ac"  # the longer key wins


def test_damaged_character_maps_are_refused(unigram, write_gguf, open_vocab):
    blob = unigram.metadata["precompiled_charsmap"]
    damaged = [
        blob[:3],
        blob[:5000],
        b"\xff\xff\xff\xff" + blob[4:],
        b"\0\0\0\0" + blob[4:],
        b"\x06\0\0\0" + blob[4:],
        blob[:-1] + b"x",
    ]
    for bad in damaged:
        path = write_gguf(**unigram.metadata | {"precompiled_charsmap": bad})
        with pytest.raises(InvalidModelFile, match=r"precompiled_charsmap is damaged") as caught:
            open_vocab(path)
        assert "\n" not in str(caught.value)
    path = write_gguf(**unigram.metadata | {"precompiled_charsmap": [1.5, 2.5]})
    with pytest.raises(InvalidModelFile, match="array of float32, not of bytes"):
        open_vocab(path)


def test_scrambled_character_maps_never_crash(unigram, make_texts):
    blob = np.frombuffer(unigram.metadata["precompiled_charsmap"], np.uint8)
    generator = np.random.default_rng(0)
    n_usable = 0
    for _ in range(40):
        scrambled = blob.copy()
        places = generator.integers(4, len(blob), 20_000)
        scrambled[places] = generator.integers(0, 256, len(places))
        scrambled[-1] = 0
        try:
            charsmap = CharsMap(scrambled.tobytes(), "x")
        except InvalidModelFile:
            continue
        n_usable += 1
        for text in make_texts(5, seed=3):
            charsmap(text)
    # random units mostly have an offset outside the map; zeroed units always give a usable map
    scrambled = blob.copy()
    scrambled[4 + 400 : 40_000] = 0
    charsmap = CharsMap(scrambled.tobytes(), "x")
    assert charsmap("abc") == "abc"
