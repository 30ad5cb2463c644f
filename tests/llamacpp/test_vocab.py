"""Edge cases of llama.cpp's vocabulary, against published cases and the vocabulary of slm-core."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slm_core.errors import InvalidModelFile, InvalidToken, ModelClosed, VocabError
from slm_core.gguf import GgufFile
from slm_core.protocols import Vocab
from slm_core.tokenization import build_vocab
from slm_llamacpp import library
from slm_llamacpp.handle import Handle
from slm_llamacpp.vocab import LlamaCppVocab
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.models import changed_model, sentencepiece_model

PUBLISHED = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2")
TEXTS = (
    "",
    "\0",
    "a\0b",
    "<|im_start|>user\n\0<|im_end|>",
    "  two  spaces ",
    "x\ud800y",
    "\ud83d\ude00",
    "\udfff",
    "héllo wörld",
    "\U0001f600" * 3,
)


@pytest.fixture
def vocab(load: LoadModel, llama_file: Path) -> Vocab:
    return load(llama_file).vocab


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_cases_and_the_other_vocabulary(shared_dir: Path, name: str) -> None:
    path = shared_dir / "oracles" / "vocabs" / f"ggml-vocab-{name}.gguf"
    api = library.load()
    params = api.llama_model_default_params()
    params.vocab_only = True
    handle = Handle(api.llama_model_load_from_file(str(path).encode(), params), api.llama_model_free, name)
    with GgufFile.open(path) as gguf:
        theirs, ours = LlamaCppVocab(api, handle, gguf), build_vocab(gguf)
    check_published(theirs, path)
    check_agreement(theirs, ours)
    handle.free()


def check_published(vocab: Vocab, path: Path) -> None:
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(f"{path.name}.out").read_text().splitlines()
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):
        expected = [int(word) for word in line.split()]
        assert vocab.encode(text, add_special=False, parse_special=False) == expected, repr(text)


def check_agreement(theirs: Vocab, ours: Vocab) -> None:
    assert (theirs.size, theirs.bos, theirs.eos) == (ours.size, ours.bos, ours.eos)
    assert theirs.eog_ids == ours.eog_ids
    assert theirs.infill == ours.infill
    for text in TEXTS:
        for flags in ({"add_special": True, "parse_special": True}, {"add_special": False, "parse_special": False}):
            ids = ours.encode(text, **flags)
            assert theirs.encode(text, **flags) == ids, f"{text!r}, {flags}"
            assert theirs.decode(ids) == ours.decode(ids), f"{text!r}, {flags}"
    sample = [*range(0, theirs.size, 97), *theirs.eog_ids]
    for special in (False, True):
        actual, expected = ({i: v.token_bytes(i, special=special) for i in sample} for v in (theirs, ours))
        assert actual == expected


def test_special_tokens(vocab: Vocab) -> None:
    text = "<|im_start|>a<|im_end|>"
    parsed = vocab.encode(text, add_special=True, parse_special=True)
    assert (len(parsed), parsed[0]) == (4, vocab.bos)
    assert vocab.decode(parsed) == "a"
    assert vocab.decode(parsed, special=True) == f"<|endoftext|>{text}"
    plain = vocab.encode(text, add_special=False, parse_special=False)
    assert vocab.decode(plain) == text
    assert not set(plain) & vocab.eog_ids


@pytest.mark.parametrize("token", [-1, 305, 2**31, -(2**31)])
def test_tokens_out_of_range_never_reach_llamacpp(vocab: Vocab, token: int) -> None:
    assert vocab.size == 305
    for call in (lambda: vocab.token_bytes(token), lambda: vocab.decode([0, token])):
        with pytest.raises(InvalidToken, match=rf"{token} .* \(0 to 304\)"):
            call()


def test_long_words_do_not_overflow_the_stack(tmp_path: Path) -> None:
    # tekken splits text with std::regex, which recurses per character: a run of 100,000 would overflow the stack.
    path = changed_model(tmp_path / "tekken.gguf", tokenizer__ggml__pre="tekken")
    script = (
        "import sys; from pathlib import Path; from slm_core.types import ModelOptions;"
        "from slm_llamacpp.backend import LlamaCppBackend;"
        "model = LlamaCppBackend().load(Path(sys.argv[1]), ModelOptions(n_threads=1));"
        "text = 'x' * 300_000;"
        "ids = model.vocab.encode(text, add_special=False, parse_special=False);"
        "print(model.vocab.decode(ids) == text)"
    )
    process = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (0, "True\n"), process.stderr


def test_texts_with_more_tokens_than_the_first_buffer_holds(vocab: Vocab) -> None:
    text = "é" * 40_000  # two tokens per character, one per byte
    assert len(vocab.encode(text, add_special=True, parse_special=True)) == 80_001


def test_many_threads(vocab: Vocab) -> None:
    texts = [f"hello the dog {i} " * (1 + 40 * (i % 3)) for i in range(60)]
    expected = [vocab.encode(text, add_special=True, parse_special=True) for text in texts]
    before = threading.stack_size()
    with ThreadPoolExecutor(8) as pool:
        actual = list(pool.map(lambda text: vocab.encode(text, add_special=True, parse_special=True), texts))
    assert actual == expected
    assert threading.stack_size() == before


def test_after_close(load: LoadModel, llama_file: Path) -> None:
    model = load(llama_file)
    vocab = model.vocab
    model.close()
    for call in (lambda: vocab.encode("a", add_special=True, parse_special=True), lambda: vocab.token_bytes(1)):
        with pytest.raises(ModelClosed, match="is closed"):
            call()
    with pytest.raises(ModelClosed):
        vocab.encode("a" * 5000, add_special=True, parse_special=True)


class TestSentencePiece:
    def test_unknown_characters_become_byte_tokens(self, load: LoadModel, tmp_path: Path) -> None:
        vocab = load(sentencepiece_model(tmp_path / "bytes.gguf", byte_tokens=True)).vocab
        ids = vocab.encode("hello é\0", add_special=False, parse_special=False)
        assert vocab.decode(ids) == "hello é\0"
        assert vocab.token_bytes(ids[0]) == b" "
        assert b"".join(map(vocab.token_bytes, ids)) == " hello é\0".encode()

    def test_characters_without_tokens_are_refused(self, load: LoadModel, tmp_path: Path) -> None:
        vocab = load(sentencepiece_model(tmp_path / "plain.gguf", byte_tokens=False)).vocab
        assert vocab.decode(vocab.encode("hello hell", add_special=True, parse_special=False)) == "hello hell"
        with pytest.raises(VocabError, match="no token for 'z'"):
            vocab.encode("hezo", add_special=False, parse_special=False)


def test_control_tokens_are_never_content_in_rwkv_vocabularies(load: LoadModel, tmp_path: Path) -> None:
    tokens = ["<s>", *(repr(bytes([i]))[2:-1] for i in range(256)), *(f"piece {i}" for i in range(48))]
    path = changed_model(
        tmp_path / "rwkv.gguf",
        tokenizer__ggml__model="rwkv",
        tokenizer__ggml__pre=None,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[3] + [1] * 304,
        tokenizer__ggml__bos_token_id=None,
        tokenizer__ggml__eos_token_id=0,
        tokenizer__ggml__padding_token_id=None,
        tokenizer__ggml__add_bos_token=False,
    )
    vocab = load(path).vocab
    assert vocab.encode("a<s>b", add_special=False, parse_special=True)[1] == 0
    with pytest.raises(VocabError, match="'<s>' for a control token"):
        vocab.encode("a<s>b", add_special=False, parse_special=False)
    with GgufFile.open(path) as gguf:
        assert vocab.encode("piece 7é", add_special=False, parse_special=False) == build_vocab(gguf).encode(
            "piece 7é", add_special=False, parse_special=False
        )


class TestAddedTokens:
    """llama.cpp assumes token 11 (Falcon's) as BOS and EOS if a byte-pair vocabulary names none."""

    def test_bos_and_eos_are_not_assumed(self, load: LoadModel, tmp_path: Path) -> None:
        path = changed_model(
            tmp_path / "model.gguf",
            tokenizer__ggml__add_bos_token=False,
            tokenizer__ggml__bos_token_id=None,
            tokenizer__ggml__eos_token_id=None,
        )
        vocab = load(path).vocab
        assert (vocab.bos, vocab.eos) == (None, None)
        with GgufFile.open(path) as gguf:
            assert vocab.eog_ids == build_vocab(gguf).eog_ids
        assert 11 not in vocab.eog_ids

    def test_adding_a_missing_bos_is_an_error(self, load: LoadModel, tmp_path: Path) -> None:
        path = changed_model(tmp_path / "model.gguf", tokenizer__ggml__bos_token_id=None)
        with pytest.raises(InvalidModelFile, match="bos_token_id is missing"):
            load(path)


def test_two_tokens_with_the_same_text_are_an_error(load: LoadModel, tmp_path: Path) -> None:
    tokens: list[Any] = [f"t{i}" for i in range(305)]
    tokens[7] = "t3"
    with pytest.raises(InvalidModelFile, match="tokens 3 and 7 are both 't3'"):
        load(changed_model(tmp_path / "model.gguf", tokenizer__ggml__tokens=tokens))


@pytest.mark.parametrize("model", ["none", "no_vocab"])
def test_no_vocabulary(load: LoadModel, tmp_path: Path, model: str) -> None:
    loaded = load(changed_model(tmp_path / "model.gguf", tokenizer__ggml__model=model, llama__vocab_size=305))
    with pytest.raises(VocabError, match="has no vocabulary"):
        loaded.vocab.encode("a", add_special=False, parse_special=False)
