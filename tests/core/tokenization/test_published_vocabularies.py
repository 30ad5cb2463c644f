"""Published vocabularies: ids equal those of their publishers and of llama.cpp."""

from __future__ import annotations

import unicodedata

import pytest

VOCABS = ("gpt-2", "qwen2", "llama-bpe", "gemma-4", "llama-spm", "phi-3")
SPELLED = ("<|im_end|>", "</s>", "<s>", "<unk>", "</", "<0x0A>", "<bos>", "<|endoftext|>", "<|user|>\n ", "<|end|>")


@pytest.mark.parametrize("name", VOCABS)
def test_published_ids(name, published, open_vocab):
    path = published(name)
    # newline="" keeps the carriage returns of some cases
    with path.with_suffix(".gguf.inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    vocab = open_vocab(path)
    assert len(texts) >= 46
    for text, line in zip(texts, lines, strict=False):
        ids = vocab.encode(text, add_special=False, parse_special=False)
        assert ids == [int(i) for i in line.split()], f"{name}: {text!r}"
        assert vocab.decode(ids) == text, f"{name}: {text!r} is not decoded to itself"


def as_reference(name: str, text: str) -> str:
    """The input for which llama.cpp gives the ids of the model's tokenizer: llama.cpp does not normalize to NFC."""
    return unicodedata.normalize("NFC", text) if name == "qwen2" else text


def only_for(name: str):
    """Characters to draw: phi-3's special tokens strip any white space after them, but llama.cpp only strips ASCII."""
    return (lambda c: c.isascii() or not c.isspace()) if name == "phi-3" else (lambda _: True)


@pytest.mark.parametrize("name", VOCABS)
def test_random_texts_equal_llama_cpp(name, published, open_vocab, llama_vocab, make_texts):
    vocab, llama = open_vocab(published(name)), llama_vocab(published(name))
    for i, text in enumerate(make_texts(1200, seed=11, only=only_for(name), spelled=SPELLED)):
        adds, parses = bool(i & 1), bool(i & 2)
        ids = vocab.encode(text, add_special=adds, parse_special=parses)
        expected = llama.encode(as_reference(name, text), add_special=adds, parse_special=parses)
        assert ids == expected, f"{name}: {text!r}, add_special={adds}, parse_special={parses}"


@pytest.mark.parametrize("name", VOCABS)
def test_every_token_equals_llama_cpp(name, published, open_vocab, llama_vocab):
    vocab, llama = open_vocab(published(name)), llama_vocab(published(name))
    assert (vocab.size, vocab.bos, vocab.eos) == (llama.size, llama.bos, llama.eos)
    assert vocab.eog_ids == llama.eog_ids()
    for special in (False, True):
        expected = [llama.token_bytes(i, special=special) for i in range(vocab.size)]
        wrong = [i for i in range(vocab.size) if vocab.token_bytes(i, special=special) != expected[i]]
        assert not wrong, f"{name}: bytes of tokens {wrong[:10]} differ, special={special}"


def test_runs_of_newlines_equal_llama_cpp(published, open_vocab, llama_vocab):
    vocab, llama = open_vocab(published("gemma-4")), llama_vocab(published("gemma-4"))
    for n in (*range(1, 40), 63, 64, 65, 100):
        for text in ("\n" * n, "a" + "\n" * n + " b", "\r\n" * n, "\n " * n):
            assert vocab.encode(text, add_special=False, parse_special=False) == llama.encode(text), f"{text!r}"


def test_qwen_composes_text(published, open_vocab):
    vocab = open_vocab(published("qwen2"))
    composed, decomposed = "Caf\u00e9 Vi\u1ec7t", "Cafe\u0301 Vie\u0323\u0302t"
    ids = vocab.encode(decomposed, add_special=False, parse_special=False)
    assert ids == vocab.encode(composed, add_special=False, parse_special=False)
    assert vocab.decode(ids) == composed


def test_right_stripping_removes_any_white_space(published, open_vocab):
    vocab = open_vocab(published("phi-3"))
    expected = vocab.encode("<|user|>Hi", add_special=False, parse_special=True)
    assert vocab.encode("<|user|>\n \u00a0\u3000\x85Hi", add_special=False, parse_special=True) == expected
    unstripped = vocab.encode("<|endoftext|> Hi", add_special=False, parse_special=True)
    assert unstripped != vocab.encode("<|endoftext|>Hi", add_special=False, parse_special=True)
