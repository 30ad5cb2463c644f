"""RWKV World's vocabulary file, compared with the reference tokenizer in the ``rwkv`` package and with GGUF files."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import rwkv
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER
from tokenizers import Tokenizer

from slm_core.errors import InvalidModelFile
from slm_core.tokenization import GgufVocab, directory_vocab
from world_json import END as JSON_END
from world_json import world_tokenizer

PUBLISHED = Path(rwkv.__file__).parent / "rwkv_vocab_v20230424.txt"
NORMAL, CONTROL, UNUSED = 1, 3, 5
SIZE = 65536
END = "<|rwkv_tokenizer_end_of_text|>"
BYTES = "".join(f"{i + 1} {bytes([i])!r} 1\n" for i in range(256))
PUBLISHED_SETTINGS = {
    "added_tokens_decoder": {"0": {"content": END, "special": True, "lstrip": False}},
    "bos_token": END,
    "eos_token": "\n\n",
    "tokenizer_class": "RwkvTokenizer",
}


def write(folder: Path, text: str, settings: dict[str, Any] | None = None) -> Path:
    (folder / PUBLISHED.name).write_text(text, encoding="utf-8")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def reference() -> TRIE_TOKENIZER:
    return TRIE_TOKENIZER(str(PUBLISHED))


@pytest.fixture(scope="module")
def vocab(tmp_path_factory) -> GgufVocab:
    text = PUBLISHED.read_text(encoding="utf-8")
    return directory_vocab(write(tmp_path_factory.mktemp("world"), text, PUBLISHED_SETTINGS), SIZE, ends=[0])


def test_tokens_have_the_bytes_of_the_reference(vocab, reference):
    assert vocab.size == SIZE
    assert [vocab.token_bytes(i) for i in range(1, SIZE)] == [reference.idx2token.get(i, b"") for i in range(1, SIZE)]


def test_texts_have_the_tokens_of_the_reference(vocab, reference, make_texts):
    pages = (Path(__file__).parents[3] / "docs").glob("*.md")
    texts = [*make_texts(600, seed=7, spelled=("\n\n", END, "<s>")), *(page.read_text() for page in pages)]
    for text in texts:
        if any("\ud800" <= character < "\ue000" for character in text):  # which the reference cannot encode
            continue
        ids = vocab.encode(text, add_special=True, parse_special=False)
        assert ids == reference.encode(text), f"{text[:200]!r}"
        assert vocab.decode(ids) == text


def test_the_settings_name_token_0(vocab, reference):
    prompt = f"{END}User: hi\n\nAssistant:"
    ids = vocab.encode(prompt, add_special=False, parse_special=True)
    assert ids == [0, *reference.encode("User: hi\n\nAssistant:")]
    assert (vocab.bos, vocab.eos, vocab.eog_ids) == (0, 0, {0, 261})
    assert (vocab.token_bytes(0), vocab.token_bytes(0, special=True)) == (b"", END.encode())


def test_the_vocabulary_equals_that_of_a_gguf_file(vocab, reference, write_gguf, open_vocab, tmp_path, make_texts):
    """The GGUF file of llama.cpp's converter, which ignores settings."""
    tokens = ["<s>", *(repr(reference.idx2token[i])[2:-1] for i in range(1, 65530))]
    tokens += [f"[PAD{i}]" for i in range(65530, SIZE)]
    kinds = [CONTROL, *[NORMAL] * 65529, *[UNUSED] * 6]
    file = write_gguf(model="rwkv", tokens=tokens, token_type=kinds, eot_token_id=261, bos_token_id=0, eos_token_id=0)
    gguf_vocab = open_vocab(file)
    vocab_of_file = directory_vocab(write(tmp_path, PUBLISHED.read_text(encoding="utf-8")), SIZE)
    assert (vocab_of_file.size, vocab_of_file.bos, vocab_of_file.eos, vocab_of_file.eog_ids) == (
        gguf_vocab.size,
        gguf_vocab.bos,
        gguf_vocab.eos,
        gguf_vocab.eog_ids,
    )
    for special in (False, True):
        ids = range(SIZE)
        assert [vocab_of_file.token_bytes(i, special=special) for i in ids] == [
            gguf_vocab.token_bytes(i, special=special) for i in ids
        ]
    for i, text in enumerate(make_texts(100, seed=8, spelled=("<s>", "\n\n"))):
        flags = {"add_special": bool(i & 1), "parse_special": bool(i & 2)}
        assert vocab_of_file.encode(text, **flags) == gguf_vocab.encode(text, **flags), f"{text!r}, {flags}"


@pytest.fixture(scope="module")
def as_json(tmp_path_factory, reference) -> Path:
    folder = tmp_path_factory.mktemp("json")
    world_tokenizer(reference.idx2token, SIZE).save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_json_of_the_same_tokens_is_the_same_vocabulary(as_json, vocab, reference, make_texts):
    """Compared with the reference, and with the library on short texts; only the text of token 0 differs."""
    json_vocab, library = directory_vocab(as_json, SIZE), Tokenizer.from_file(str(as_json / "tokenizer.json"))
    assert (json_vocab.size, json_vocab.bos, json_vocab.eos, json_vocab.eog_ids) == (SIZE, None, None, {0, 261})
    assert [json_vocab.token_bytes(i) for i in range(SIZE)] == [vocab.token_bytes(i) for i in range(SIZE)]
    for text in make_texts(300, seed=11, spelled=("\n\n", JSON_END)):
        if any("\ud800" <= character < "\ue000" for character in text):
            continue
        ids = json_vocab.encode(text, add_special=True, parse_special=False)
        assert ids == reference.encode(text), f"{text[:200]!r}"
        assert json_vocab.encode(text, add_special=True, parse_special=True) == library.encode(text).ids, (
            f"{text[:200]!r}"
        )
    assert json_vocab.encode(JSON_END, add_special=False, parse_special=True) == [0]
    assert (json_vocab.token_bytes(0), json_vocab.token_bytes(0, special=True)) == (b"", JSON_END.encode())


def test_settings_next_to_a_tokenizer_json_define_further_tokens(tmp_path, reference):
    pieces = {i: piece for i, piece in reference.idx2token.items() if i < 270}
    world_tokenizer(pieces, 300).save(str(tmp_path / "tokenizer.json"))
    added = {"0": {"content": JSON_END, "special": True}, "300": {"content": "<|im_end|>", "special": True}}
    settings = {"added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab = directory_vocab(tmp_path, 310)
    assert (vocab.bos, vocab.eos, vocab.eog_ids) == (None, 300, {0, 261, 300})
    assert vocab.encode("a<|im_end|>", add_special=False, parse_special=True) == [98, 300]


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", {"max_input_chars_per_word": 5}),
        ("model", {"continuing_subword_prefix": "a"}),
        ("pre_tokenizer", {"use_regex": True}),
        ("pre_tokenizer", {"add_prefix_space": True}),
        ("normalizer", {"type": "Lowercase"}),
    ],
)
def test_a_tokenizer_json_that_differs_uses_the_library(tmp_path, reference, part, change):
    """With another model, pre-tokenizer or normalizer, the library encodes instead of our longest match."""
    pieces = {i: piece for i, piece in reference.idx2token.items() if i < 6000}
    library = world_tokenizer(pieces, 6000)
    stated = json.loads(library.to_str())
    stated[part] = (stated[part] or {}) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    text = "Hello THERE, all of you"
    expected = Tokenizer.from_str(json.dumps(stated)).encode(text).ids
    assert expected != reference.encode(text)
    assert directory_vocab(tmp_path).encode(text, add_special=False, parse_special=True) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stated: stated["model"]["vocab"].update(a=7), "not one per token"),
        (lambda stated: stated["model"]["vocab"].update(a=-1), "not integers from 0"),
        (lambda stated: stated["model"]["vocab"].update(a=1 << 40), "not integers from 0"),
        (lambda stated: stated["model"]["vocab"].update(a="7"), "not integers from 0"),
        (lambda stated: stated["model"]["vocab"].pop("a"), "no token for the byte 0x61"),
        (lambda stated: stated.update(added_tokens=3), "'added_tokens' is not a list"),
        (lambda stated: stated.update(added_tokens=[3]), "'added_tokens' is not a list"),
        (lambda stated: stated.update(added_tokens=[{"content": "ab"}]), "added token 'None'"),
        (lambda stated: stated.update(added_tokens=[{"id": 300, "content": ""}]), "added token '300'"),
        (lambda stated: stated["model"].update(unk_token=["a"]), "tokenizer"),
    ],
)
def test_a_damaged_tokenizer_json_of_the_same_tokens_is_refused(tmp_path, reference, change, message):
    pieces = {i: piece for i, piece in reference.idx2token.items() if i < 270}
    stated = json.loads(world_tokenizer(pieces, 270).to_str())
    change(stated)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    with pytest.raises(InvalidModelFile, match=message) as caught:
        directory_vocab(tmp_path, 310)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "literal",
    [r"'\x80\xe9'", r"b'\x80\xe9'", r"'\u200b\U0001f600'", r'"it\'s \"x\""', r"'\\\n\r\t'", "'\u2028é'", r"b'\\x41'"],
)
def test_literals_are_read_like_python(tmp_path, literal):
    expected = ast.literal_eval(literal)
    expected = expected.encode() if isinstance(expected, str) else expected
    vocab = directory_vocab(write(tmp_path, f"{BYTES}300 {literal} {len(expected)}\n"))
    assert vocab.token_bytes(300) == expected
    assert (vocab.size, vocab.token_bytes(299, special=True)) == (301, b"")


def test_settings_may_add_tokens_after_those_of_the_file(tmp_path):
    """Settings may give a token of the file another id, as transformers does for "\\n\\n": the file's id counts."""
    added = {
        "0": {"content": END, "special": True},
        "300": {"content": "<|im_end|>", "special": True},
        "301": {"content": "<tool>", "special": False},
        "302": {"content": "\n\n", "special": True},
    }
    settings = {"added_tokens_decoder": added, "add_bos_token": True, "bos_token": {"content": END}}
    vocab = directory_vocab(write(tmp_path, BYTES + r"257 '\n\n' 2" + "\n", settings), 310, ends=[300])
    assert vocab.encode("<|im_end|><tool>\n\n", add_special=True, parse_special=True) == [0, 300, 301, 257]
    assert 300 not in vocab.encode("<|im_end|>", add_special=False, parse_special=False)
    assert vocab.encode("<tool>", add_special=False, parse_special=False) == [301]
    assert vocab.eog_ids == {0, 257, 300}
    assert vocab.token_bytes(302, special=True) == b""


def test_the_first_token_of_a_text_may_be_another(tmp_path):
    """Like in finetuned models: token 0 is still EOG."""
    added = {"300": {"content": "<|start|>", "special": True}, "301": {"content": "<|end|>", "special": True}}
    settings = {"added_tokens_decoder": added, "add_bos_token": True, "bos_token": "<|start|>", "eos_token": "<|end|>"}
    vocab = directory_vocab(write(tmp_path, BYTES, settings), 310)
    assert (vocab.bos, vocab.eos, vocab.eog_ids) == (300, 301, {0, 301})
    assert vocab.encode("a", add_special=True, parse_special=False) == [300, 98]
    assert vocab.token_bytes(0, special=True) == b"<s>"


def test_content_never_becomes_a_control_token_of_the_file(tmp_path):
    """The settings define a control token that a line of the file contains, too."""
    settings = {"added_tokens_decoder": {"257": {"content": "<|end|>", "special": True}}}
    vocab = directory_vocab(write(tmp_path, BYTES + "257 '<|end|>' 7\n", settings))
    assert vocab.encode("<|end|>", add_special=False, parse_special=True) == [257]
    assert 257 not in vocab.encode("<|end|>", add_special=False, parse_special=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no tokens"),
        ("\n", r"line 1: '' is not a token"),
        (f"{BYTES}\n257 'ab' 2\n", r"line 257: '' is not a token"),
        (f"{BYTES}257 'ab' 3\n", r"line 257: .* is not a token"),
        (f"{BYTES}257 'é' 1\n", r"line 257: .* is not a token"),
        (f"{BYTES}257 '' 0\n", r"line 257: .* is not a token"),
        (f"{BYTES}0 'ab' 2\n", r"line 257: .* is not a token"),
        (f"{BYTES}-1 'ab' 2\n", r"line 257: .* is not a token"),
        (f"{BYTES}99999999 'ab' 2\n", r"line 257: .* is not a token"),
        (f"{BYTES}٢٥٧ 'ab' 2\n", r"line 257: .* is not a token"),
        (f"{BYTES}256 'ab' 2\n", r"line 257: .*the id or the bytes of another"),
        (f"{BYTES}257 'a' 1\n", r"line 257: .*the id or the bytes of another"),
        (f"{BYTES}257 __import__('os').abort() 2\n", r"line 257: .* is not a token"),
        (f"{BYTES}257 'a' + 'b' 2\n", r"line 257: .* is not a token"),
        (f"{BYTES}257 f'{{1}}' 1\n", r"line 257: .* is not a token"),
        (f"{BYTES}257 ('a' 2\n", r"line 257: .* is not a token"),
        (f"{BYTES}257 {'(' * 10_000} 2\n", r"line 257: .* is not a token"),
        (f"{BYTES}257 '{'a' * 10_000}' 10000\n", r"line 257: .* is not a token"),
        (f"{BYTES}257 {'9' * 10_000} 1\n", r"line 257: .* is not a token"),
        (BYTES + r"257 '\ud800' 3" + "\n", r"line 257: .* is not a token"),
        (BYTES + r"257 '\Uffffffff' 4" + "\n", r"line 257: .* is not a token"),
        (BYTES + r"257 '\d' 2" + "\n", r"line 257: .* is not a token"),
        (BYTES + r"257 '\N{DIGIT TWO}' 1" + "\n", r"line 257: .* is not a token"),
        (BYTES + r"257 b'\u0041' 1" + "\n", r"line 257: .* is not a token"),
        (BYTES + "257 b'é' 1\n", r"line 257: .* is not a token"),
        (BYTES + "257 'a'\n", r"line 257: .* is not a token"),
        (BYTES.replace("160 ", "700 ", 1).replace("257 ", "160 ", 1), "701 tokens, but the model has 310"),
        (BYTES.replace(r"160 b'\x9f' 1" + "\n", ""), "no token for the byte 0x9f"),
    ],
)
def test_invalid_vocabularies_are_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(InvalidModelFile, match=message) as caught:
        directory_vocab(write(tmp_path, text), 310)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_invalid_utf8_and_files_that_are_too_large_are_refused(tmp_path):
    path = tmp_path / PUBLISHED.name
    path.write_bytes(b"1 '\xff' 1\n")
    with pytest.raises(InvalidModelFile, match="cannot be read"):
        directory_vocab(tmp_path)
    with path.open("wb") as file:
        file.truncate(1 << 27)
    with pytest.raises(InvalidModelFile, match="larger than"):
        directory_vocab(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"added_tokens_decoder": 3}, "not an object"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added token 'x'"),
        ({"added_tokens_decoder": {"-1": {"content": "a"}}}, "added token '-1'"),
        ({"added_tokens_decoder": {"300": 3}}, "added token '300'"),
        ({"added_tokens_decoder": {"300": {"content": ""}}}, "added token '300'"),
        ({"added_tokens_decoder": {"300": {"content": "ab"}, "301": {"content": "ab"}}}, "300 and 301 are both 'ab'"),
        ({"added_tokens_decoder": {"7": {"content": "ab"}}}, "added token 7 .* other bytes"),
        ({"added_tokens_decoder": {"999999": {"content": "ab"}}}, "1000000 tokens, but the model has 310"),
        ({"added_tokens_decoder": {"1000000": {"content": "ab"}}}, "added token '1000000'"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(tmp_path, settings, message):
    with pytest.raises(InvalidModelFile, match=message) as caught:
        directory_vocab(write(tmp_path, BYTES, settings), 310)
    assert "\n" not in str(caught.value)


def test_eog_ids_outside_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(InvalidModelFile, match="outside the vocabulary of 310"):
        directory_vocab(write(tmp_path, BYTES), 310, ends=[310])


def test_a_tokenizer_of_another_kind_has_priority(tmp_path):
    (write(tmp_path, BYTES) / "tokenizer.json").write_text("{}")
    with pytest.raises(Exception, match=r"tokenizer\.json"):
        directory_vocab(tmp_path)
