"""BERT's WordPiece, compared with llama.cpp and with the reference implementation in transformers."""

from __future__ import annotations

import json
import unicodedata

import pytest

from slm_core.errors import InvalidModelFile

NORMAL, UNKNOWN, CONTROL = 1, 2, 3
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
KINDS = [CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL]
IDS = {"padding_token_id": 0, "unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3, "mask_token_id": 4}


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def trained(request, make_texts):
    """Whether the vocabulary is uncased, and BERT's pieces in order of id."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=request.param)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=2500, limit_alphabet=700, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(make_texts(2000, seed=1, only=lambda c: c != "\u2581"), trainer)
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    return request.param, sorted(pieces, key=pieces.get)


def as_gguf(piece: str) -> str:
    if piece in SPECIAL:
        return piece
    return piece[2:] if piece.startswith("##") else "\u2581" + piece


@pytest.fixture(scope="module")
def path(trained, write_gguf):
    uncased, pieces = trained
    return write_gguf(
        model="bert",
        tokens=[as_gguf(piece) for piece in pieces],
        token_type=KINDS + [NORMAL] * (len(pieces) - len(KINDS)),
        normalizer__lowercase=None,
        **IDS,
        **({} if uncased else {"tokenizer__ggml__normalizer__lowercase": False}),
    )


def plain(c: str) -> bool:
    """Whether llama.cpp normalizes a character like BERT: no Hangul, no vertical white space, no controls."""
    syllable_or_mark = "\u1100" <= c <= "\u11ff" or "\uac00" <= c <= "\ud7a3" or unicodedata.category(c) in ("Mc", "Me")
    return not syllable_or_mark and c not in "\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2581" and unicodedata.category(c) != "Cf"


def test_equals_llama_cpp(path, open_vocab, llama_vocab, make_texts):
    vocab, llama = open_vocab(path), llama_vocab(path)
    assert (vocab.bos, vocab.eos, vocab.eog_ids) == (llama.bos, llama.eos, llama.eog_ids())
    for i, text in enumerate(make_texts(400, seed=31, only=plain, spelled=SPECIAL)):
        adds, parses = bool(i & 1), bool(i & 2)
        ids = vocab.encode(text, add_special=adds, parse_special=parses)
        assert ids == llama.encode(text, add_special=adds, parse_special=parses), f"{text!r}"
    for special in (False, True):
        pieces = [vocab.token_bytes(i, special=special) for i in range(vocab.size)]
        assert pieces == [llama.token_bytes(i, special=special) for i in range(vocab.size)]


def test_equals_bert(trained, path, open_vocab, make_texts):
    legacy = pytest.importorskip(
        "transformers.models.bert.tokenization_bert_legacy", reason="transformers has BERT's reference in this test"
    )
    uncased, pieces = trained
    ids = {piece: i for i, piece in enumerate(pieces)}
    words = legacy.BasicTokenizer(do_lower_case=uncased)
    cut = legacy.WordpieceTokenizer(ids, unk_token="[UNK]")
    vocab = open_vocab(path)
    texts = make_texts(400, seed=32, only=lambda c: c != "\u2581")
    for drawn in [*texts, "x" * 101, "Ab" * 50, "İstanbul"]:
        text = unicodedata.normalize("NFC", drawn)  # transformers normalizes to NFC first, the original does not
        expected = [ids[piece] for word in words.tokenize(text) for piece in cut.tokenize(word)]
        assert vocab.encode(text, add_special=False, parse_special=False) == expected, f"{text!r}"


def test_decoded_text_is_words_with_spaces(path, open_vocab):
    vocab = open_vocab(path)
    ids = vocab.encode("hello world!", add_special=True, parse_special=False)
    assert vocab.decode(ids) == "hello world!"
    assert vocab.decode(ids, special=True) == "[CLS] hello world![SEP]"
    assert b"".join(vocab.token_bytes(i) for i in ids) == b" hello world !"


@pytest.mark.parametrize("name", ["bos", "seperator", "unknown"])
def test_bert_requires_its_special_tokens(name, write_gguf, open_vocab):
    ids = {key: i for key, i in IDS.items() if not key.startswith(name)}
    metadata = {"model": "bert", "tokens": [*SPECIAL, "\u2581a"], "token_type": [*KINDS, NORMAL], **ids}
    with pytest.raises(InvalidModelFile, match=rf"tokenizer\.ggml\.{name}_token_id is missing"):
        open_vocab(write_gguf(**metadata))
