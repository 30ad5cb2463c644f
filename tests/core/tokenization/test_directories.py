"""Vocabularies of directories: round trips of GGUF files, and comparisons with transformers on the same files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import InvalidModelFile, InvalidToken, UnsupportedModel, VocabError
from slm_core.gguf import GgufFile
from slm_core.loading import demo_model_path
from slm_core.tokenization import build_vocab
from slm_core.tokenization.directory import directory_vocab
from slm_core.tokenization.export import tokenizer_files

VOCABS = ("gpt-2", "qwen2", "llama-spm", "phi-3")
CTC = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
SPELLED = ("<|im_end|>", "</s>", "<s>", "<unk>", "</", "<0x0A>", "<bos>", "<|endoftext|>", "<|user|>\n ", "<|eot_id|>")


def write(path: Path, folder: Path) -> Path:
    with GgufFile.open(path) as gguf:
        for name, text in tokenizer_files(gguf, 2048).items():
            (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def demo(tmp_path) -> Path:
    return write(demo_model_path(), tmp_path)


def changed(folder: Path, change) -> Path:
    file = folder / "tokenizer.json"
    stated = json.loads(file.read_text(encoding="utf-8"))
    change(stated)
    file.write_text(json.dumps(stated), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", VOCABS)
def test_a_published_vocabulary_survives_a_round_trip(name, published, open_vocab, make_texts, tmp_path) -> None:
    original = open_vocab(published(name))
    restored = directory_vocab(write(published(name), tmp_path), original.size)
    assert (restored.size, restored.bos, restored.eos, restored.eog_ids) == (
        original.size,
        original.bos,
        original.eos,
        original.eog_ids,
    )
    for special in (False, True):
        wrong = [
            i
            for i in range(original.size)
            if restored.token_bytes(i, special=special) != original.token_bytes(i, special=special)
        ]
        assert not wrong, f"{name}: bytes of tokens {wrong[:10]} differ, special={special}"
    for i, text in enumerate(make_texts(600, seed=4, spelled=SPELLED)):
        flags = {"add_special": bool(i & 1), "parse_special": bool(i & 2)}
        assert restored.encode(text, **flags) == original.encode(text, **flags), f"{name}: {text!r}, {flags}"


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_transformers_reads_the_files_like_us(name, published, make_texts, tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="it is the reference: pip install transformers")
    vocab = directory_vocab(write(published(name), tmp_path))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (vocab.bos, vocab.eos) == (reference.bos_token_id, reference.eos_token_id)
    for text in make_texts(300, seed=5, spelled=SPELLED):
        if "\ud7ff" < text < "\ue000" or not text.isprintable():
            continue
        assert vocab.encode(text, add_special=True, parse_special=True) == reference.encode(text), f"{name}: {text!r}"
        ids = reference.encode(text, add_special_tokens=False)
        assert vocab.decode(ids, special=True) == reference.decode(ids, skip_special_tokens=False), f"{name}: {text!r}"


@pytest.mark.parametrize("shared", [True, False])
def test_added_tokens_keep_their_ids(tmp_path, make_texts, shared) -> None:
    """Like Qwen's file: control and user-defined tokens are added after the vocabulary and are not part of it."""
    path = make_tiny_model("qwen2").write(tmp_path / "m.gguf")
    with GgufFile.open(path) as gguf:
        original = build_vocab(gguf)

    def apart(stated) -> None:
        for token in stated["added_tokens"][0 if shared else 1 :]:
            del stated["model"]["vocab"][token["content"]]
        if not shared:  # the unknown token belongs to the model
            stated["model"]["unk_token"] = stated["added_tokens"][0]["content"]

    restored = directory_vocab(changed(write(path, tmp_path), apart))
    for i, text in enumerate(make_texts(500, seed=6, spelled=("<|im_end|>", "<think>", "</think>", "<|im_", "<think"))):
        flags = {"add_special": bool(i & 1), "parse_special": bool(i & 2)}
        assert restored.encode(text, **flags) == original.encode(text, **flags), f"{text!r}, {flags}"


def test_ids_beyond_the_tokenizer_have_no_text(demo) -> None:
    vocab = directory_vocab(demo, 2100, ends=[7])
    assert (vocab.size, vocab.token_bytes(2099, special=True), 7 in vocab.eog_ids) == (2100, b"", True)
    with pytest.raises(InvalidToken):
        vocab.token_bytes(2100)


def test_content_never_becomes_a_control_token_by_merges(demo) -> None:
    """A tokenizer whose merges spell a control token."""

    def spell(stated) -> None:
        text, vocab = "<|im_end|>", stated["model"]["vocab"]
        stated["model"]["merges"][:0] = [[text[:i], text[i]] for i in range(1, len(text))]
        stated["model"]["vocab"] |= {text[:i]: 3000 + i for i in range(1, len(text)) if text[:i] not in vocab}
        stated["pre_tokenizer"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }

    vocab = directory_vocab(changed(demo, spell))
    (end,) = vocab.encode("<|im_end|>", add_special=False, parse_special=True)
    content = vocab.encode("<|im_end|>", add_special=False, parse_special=False)
    assert end not in content
    assert vocab.decode(content) == "<|im_end|>"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: s["model"].update(type="Unigram", vocab=[["a", 0.0]]), UnsupportedModel, "Unigram"),
        (lambda s: s["model"].update(type="WordLevel"), UnsupportedModel, "WordLevel"),
        (lambda s: s.update(decoder=CTC), UnsupportedModel, "CTC"),
        (lambda s: s.update(model=None), UnsupportedModel, "model"),
        (lambda s: s["model"].pop("merges"), InvalidModelFile, "merges"),
        (lambda s: s["model"].update(merges=[["never", "there"]]), InvalidModelFile, "not a tokenizer"),
        (lambda s: s["model"].update(merges=[3]), InvalidModelFile, "not a tokenizer"),
        (lambda s: s["model"]["vocab"].update(far=1 << 30), InvalidModelFile, "tokens, but the model has"),
        (lambda s: s.update(added_tokens=[3]), InvalidModelFile, "not a tokenizer"),
        (lambda s: s.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}}), InvalidModelFile, "not a tok"),
    ],
)
def test_damaged_and_unknown_tokenizers_are_refused_in_one_line(demo, change, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        directory_vocab(changed(demo, change), 2048)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_fails_at_a_text_raises_an_error_of_one_line(tmp_path) -> None:
    """The library detects an unknown token that is missing in its vocabulary only when it needs the token."""
    Tokenizer(models.BPE({"a": 0, "b": 1}, [], unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    vocab = directory_vocab(tmp_path)
    assert vocab.encode("ab", add_special=False, parse_special=True) == [0, 1]
    with pytest.raises(VocabError, match="cannot encode this text") as caught:
        vocab.encode("c", add_special=False, parse_special=True)
    assert "\n" not in str(caught.value)


def test_a_wordpiece_vocabulary_without_its_unknown_token_is_refused(tmp_path) -> None:
    Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidModelFile, match="'unk_token' is not in its vocabulary"):
        directory_vocab(changed(tmp_path, lambda stated: stated["model"].update(unk_token="?")))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00", '{"model": {"type": "BPE"}}'])
def test_files_that_are_not_a_tokenizer_are_refused(tmp_path, text) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises((InvalidModelFile, UnsupportedModel), match=r"tokenizer\.json"):
        directory_vocab(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path) -> None:
    with pytest.raises(InvalidModelFile, match=r"there is no tokenizer\.json"):
        directory_vocab(tmp_path)


def test_a_vocabulary_that_cannot_be_written_is_refused_by_name(tmp_path) -> None:
    tiny = make_tiny_model("llama")
    path = replace(tiny, metadata={**tiny.metadata, "tokenizer.ggml.model": "t5"}).write(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model 't5'"):
        write(path, tmp_path)


@pytest.mark.parametrize("old", [False, True])
def test_wordpiece_is_read_like_the_library(tmp_path, make_texts, old) -> None:
    """Old files lack the type of the model. Content that spells a control token stays text."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!?[]'", "é"]
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *letters,
        *(f"##{letter}" for letter in letters),
        "the",
        "##ing",
        "cls",
    ]
    library = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    library.post_processor, library.decoder = (
        processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
        decoders.WordPiece(),
    )
    library.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    library.save(str(tmp_path / "tokenizer.json"))
    if old:
        changed(tmp_path, lambda stated: stated["model"].pop("type"))
    vocab = directory_vocab(tmp_path)
    for text in make_texts(200, seed=6, spelled=("[CLS]", "[SEP]", "[UNK]")):
        for add_special in (False, True):
            expected = library.encode(text, add_special_tokens=add_special).ids
            assert vocab.encode(text, add_special=add_special, parse_special=True) == expected, text
    ids = vocab.encode("the [CLS] thing", add_special=True, parse_special=False)
    assert [pieces[i] for i in ids] == ["[CLS]", "the", "[", "cls", "]", "t", "##h", "##ing", "[SEP]"]
    assert vocab.decode(ids) == "the [ cls ] thing"
