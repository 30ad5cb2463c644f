"""The contract's clauses about vocabularies, tested on published vocabularies."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slm_core.errors import InvalidToken

VOCABS = ("gpt-2", "llama-bpe", "llama-spm", "gemma-4", "phi-3")
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=80)
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def well_formed(text: str) -> str:
    """The text as UTF-16: pairs of surrogates are joined, unpaired surrogates are replaced."""
    return text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "replace")


@pytest.fixture(scope="module", params=VOCABS)
def vocab(request, published, open_vocab):
    return open_vocab(published(request.param))


@few
@given(text=ANY_TEXT)
def test_decode_inverts_encode(vocab, text):
    ids = vocab.encode(text, add_special=False, parse_special=False)
    # a SentencePiece vocabulary reads a literal U+2581 as a space
    spelled = well_formed(text) if vocab.size in (50257, 128256) else well_formed(text).replace("\u2581", " ")
    assert vocab.decode(ids) == spelled


@few
@given(text=ANY_TEXT)
def test_bytes_of_tokens_add_up_to_the_text(vocab, text):
    ids = vocab.encode(text, add_special=False, parse_special=False)
    joined = b"".join(vocab.token_bytes(i) for i in ids).decode("utf-8", "replace")
    assert vocab.decode(ids) in (joined, joined.removeprefix(" "))


@few
@given(text=ANY_TEXT)
def test_content_never_becomes_a_control_token(vocab, text):
    for spelled in ("<s>", "</s>", "<|endoftext|>", "<|eot_id|>", "<bos>", "<turn|>", "<unk>", "<|end|>"):
        ids = vocab.encode(text + spelled, add_special=False, parse_special=False)
        assert b"".join(vocab.token_bytes(i) for i in ids).endswith(spelled.encode()), f"{spelled} is hidden in {ids}"


def test_empty_text(vocab):
    assert vocab.encode("", add_special=False, parse_special=False) == []
    with_bos = vocab.encode("", add_special=True, parse_special=False)
    assert with_bos in ([], [vocab.bos])
    assert vocab.decode([]) == ""


def test_ids_outside_the_vocabulary_are_refused(vocab):
    for i in (-1, vocab.size, 2**31):
        with pytest.raises(InvalidToken, match=f"token {i} is outside the vocabulary \\(0 to {vocab.size - 1}\\)"):
            vocab.token_bytes(i)
        with pytest.raises(InvalidToken):
            vocab.decode([0, i])


def test_ids_may_be_an_array(vocab):
    ids = vocab.encode("Hello, wörld", add_special=False, parse_special=False)
    assert vocab.decode(np.array(ids, np.int32)) == "Hello, wörld"


def test_characters_split_between_tokens(published, open_vocab):
    vocab = open_vocab(published("llama-spm"))
    ids = vocab.encode("\U0001f9ff", add_special=False, parse_special=False)
    assert [vocab.token_bytes(i) for i in ids] == [b" ", b"\xf0", b"\x9f", b"\xa7", b"\xbf"]
    assert vocab.decode(ids) == "\U0001f9ff"
    assert vocab.decode(ids[:-1]) == "\ufffd"


def test_surrogates(published, open_vocab):
    vocab = open_vocab(published("gpt-2"))

    def ids(text):
        return vocab.encode(text, add_special=False, parse_special=False)

    assert ids("a\ud83d\ude80b") == ids("a\U0001f680b")
    assert ids("a\ud83db\ude80") == ids("a\ufffdb\ufffd")


def test_control_tokens_are_hidden_by_default(published, open_vocab):
    vocab = open_vocab(published("llama-bpe"))
    ids = vocab.encode("<|begin_of_text|>Hi<|eot_id|>", add_special=False, parse_special=True)
    assert ids[0] == vocab.bos
    assert vocab.decode(ids) == "Hi"
    assert vocab.decode(ids, special=True) == "<|begin_of_text|>Hi<|eot_id|>"


def test_one_leading_space_is_removed(published, open_vocab):
    vocab = open_vocab(published("llama-spm"))
    for text in ("word", " word", "   word", "", " "):
        ids = vocab.encode(text, add_special=True, parse_special=False)
        assert vocab.decode(ids) == text
    first, *_ = vocab.encode("word", add_special=False, parse_special=False)
    assert vocab.token_bytes(first) == b" word"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("unit", ["a", " ", "9", "\n", "<", "é", "中", "\0", "hello world "])
def test_long_runs_take_linear_time(vocab, unit):
    # 100,000 characters take a second or two; a quadratic algorithm would take many minutes
    text = unit * (100_000 // len(unit))
    ids = vocab.encode(text, add_special=False, parse_special=True)
    assert vocab.decode(ids) == text


def test_importing_loads_no_tokenizer_library():
    code = "import sys, slm_core.tokenization; print('tokenizers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
