"""RWKV World's longest match over bytes, compared with llama.cpp."""

from __future__ import annotations

import pytest

from slm_core.errors import InvalidModelFile

NORMAL, CONTROL, UNUSED = 1, 3, 5


def spelled(piece: bytes) -> str:
    """The notation of llama.cpp's converter."""
    return repr(piece)[2:-1]


@pytest.fixture(scope="module")
def path(make_texts, write_gguf):
    """A vocabulary of every byte and of runs of bytes from texts, which may begin and end inside characters."""
    data = [text.encode() for text in make_texts(300, seed=1)]
    runs = {text[i : i + 2 + (i * 7 + len(text)) % 9] for text in data for i in range(0, len(text), 5)}
    runs |= {b"\n\n", b"\\", b"\\n", b"\t\t", b"it's", b'"quoted"', b"  "}
    pieces = [bytes([i]) for i in range(256)] + sorted(run for run in runs if len(run) > 1)
    tokens = ["<s>", *map(spelled, pieces), "[PAD1]"]
    kinds = [CONTROL] + [NORMAL] * len(pieces) + [UNUSED]
    end = 1 + pieces.index(b"\n\n")
    return write_gguf(
        architecture="rwkv7", model="rwkv", tokens=tokens, token_type=kinds, eot_token_id=end, eos_token_id=0
    )


def test_equals_llama_cpp(path, open_vocab, llama_vocab, make_texts):
    vocab, llama = open_vocab(path), llama_vocab(path)
    assert vocab.eog_ids == llama.eog_ids()
    texts = [*make_texts(300, seed=2), "a\n\nb\\n\\ \t\t", "\0", 'it\'s "quoted"  ']
    for text in texts:
        ids = vocab.encode(text, add_special=False, parse_special=False)
        assert ids == llama.encode(text), f"{text!r}"
        assert vocab.decode(ids) == text
    for special in (False, True):
        used = range(vocab.size - 1)  # llama.cpp shows unused tokens only for this tokenizer
        pieces = [vocab.token_bytes(i, special=special) for i in used]
        assert pieces == [llama.token_bytes(i, special=special) for i in used]


def test_content_never_becomes_a_control_token(path, open_vocab):
    """Unlike in llama.cpp, whose trie contains control tokens."""
    vocab = open_vocab(path)
    assert 0 not in vocab.encode("a<s>b", add_special=False, parse_special=False)
    assert 0 in vocab.encode("a<s>b", add_special=False, parse_special=True)


def test_every_byte_needs_a_token(write_gguf, open_vocab):
    tokens = [spelled(bytes([i])) for i in range(256) if i != 0x9F]
    with pytest.raises(InvalidModelFile, match="no token for the byte 0x9f"):
        open_vocab(write_gguf(model="rwkv", tokens=tokens))
