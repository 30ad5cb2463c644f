"""Control and user-defined tokens: when text is parsed as them, their text, and which of them are EOG."""

from __future__ import annotations

import pytest

from slm_core.errors import InvalidModelFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))] + [
    chr(256 + i) for i in range(68)
]


@pytest.fixture
def write_bpe(write_gguf):
    """A function that writes a byte-level vocabulary: one token per byte, and extra tokens with their types."""

    def write(extra: dict[str, int], merges=(), **metadata):
        return write_gguf(
            **{"model": "gpt2", "pre": "gpt-2", "merges": list(merges) or ["\u0120 \u0120"]}
            | {"tokens": [*BYTES, "\u0120\u0120", *extra], "token_type": [NORMAL] * 257 + list(extra.values())}
            | metadata
        )

    return write


def shown(vocab, text, **options):
    ids = vocab.encode(text, add_special=False, **options)
    return [vocab.token_bytes(i, special=True).decode() for i in ids]


def test_control_tokens_are_parsed_on_request_user_defined_tokens_always(write_bpe, open_vocab):
    vocab = open_vocab(write_bpe({"<c>": CONTROL, "<u>": USER_DEFINED, "<?>": UNKNOWN, "<n>": NORMAL}))
    assert shown(vocab, "<c><u><?><n>", parse_special=True) == ["<c>", "<u>", "<?>", "<", "n", ">"]
    assert shown(vocab, "<c><u><?>", parse_special=False) == ["<", "c", ">", "<u>", "<", "?", ">"]


def test_the_leftmost_longest_token_wins(write_bpe, open_vocab):
    vocab = open_vocab(write_bpe({"<a": USER_DEFINED, "<ab": USER_DEFINED, "ab>>": USER_DEFINED, "b>": USER_DEFINED}))
    assert shown(vocab, "x<ab>>y", parse_special=False) == ["x", "<ab", ">", ">", "y"]
    assert shown(vocab, "<ac>ab>>", parse_special=False) == ["<a", "c", ">", "ab>>"]


def test_the_text_of_tokens(write_bpe, open_vocab):
    kinds = {
        "<c>": CONTROL,
        "<u\u0120>": USER_DEFINED,
        "<?>": UNKNOWN,
        "<x>": UNUSED,
        "<0x41>": BYTE,
        "\u0120\u4e2d": NORMAL,
    }
    vocab = open_vocab(write_bpe(kinds))
    tokens = range(257, 263)
    assert [vocab.token_bytes(i) for i in tokens] == [
        b"",
        "<u\u0120>".encode(),
        b"",
        b"",
        b"A",
        "\u0120\u4e2d".encode(),
    ]
    assert [vocab.token_bytes(i, special=True) for i in tokens] == [
        *(b"<c>", "<u\u0120>".encode(), b"<?>", b"", b"A", "\u0120\u4e2d".encode())
    ]


def test_white_space_next_to_tokens(write_bpe, open_vocab):
    vocab = open_vocab(write_bpe({"<mask>": CONTROL}, pre="jina-v2-code"))
    assert shown(vocab, "a \u00a0\n<mask> b", parse_special=True) == ["a", "<mask>", " ", "b"]
    kinds = {"<|user|>": CONTROL, "</s>": USER_DEFINED, "<s>": CONTROL, "<|endoftext|>": CONTROL, "\n": USER_DEFINED}
    vocab = open_vocab(write_bpe(kinds, general__name="My Phi-3 tune", bos_token_id=259, eos_token_id=260))
    assert shown(vocab, "<|user|> \n\u2003 x<s> y", parse_special=True) == ["<|user|>", "x", "<s>", " ", "y"]


ENDS = (  # noqa: SIM905  (a list literal would be many lines)
    "<|eot_id|> <|im_end|> <|end|> <|flush|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] "
    "<|end_of_text|> <end_of_utterance> <eos> <turn|> <｜end▁of▁sentence｜> [e~["  # noqa: RUF001
).split(" ")


ROLES = ("prefix", "fim_pre", "suffix", "middle", "fim_sep")


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        (ENDS, {}),
        (["<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"], {}),
        (["<|calls|>", "<|flush|>", "<|end|>"], {}),
        (["<|call|>", "<|end|>"], {}),
        (["<|tool_response>", "</s>", "<turn|>"], {}),
        (["<|fim_pad|>", "<|fim_repo|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], {}),
        (["[PAD]", "<PRE>", "<SUF>", "<MID>"], {}),
        (["<a>", "<b>", "<c>", "<|fim_pad|>"], {"eot_token_id": 257, "eom_token_id": 258, "fim_pad_token_id": 259}),
        (["<a>", "<|fim_prefix|>", "unused0"], {"eos_token_id": 257, "prefix_token_id": 0}),
        (["<|fim_prefix|>", "<|code_suffix|>", "<MID>"], {"fim_mid_token_id": 3, "prefix_token_id": 4}),
        (
            ["<a>"],
            {f"{role}_token_id": i for i, role in enumerate(ROLES)},
        ),
    ],
)
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, NORMAL])
def test_known_tokens_equal_llama_cpp(texts, ids, kind, write_bpe, open_vocab, llama_vocab):
    path = write_bpe(dict.fromkeys(texts, kind), **{"eos_token_id": 0, "bos_token_id": 0} | ids)
    vocab, llama = open_vocab(path), llama_vocab(path)
    assert vocab.eog_ids == llama.eog_ids()
    assert vocab.infill == llama.infill
    for special in (False, True):
        pieces = [vocab.token_bytes(i, special=special) for i in range(vocab.size)]
        assert pieces == [llama.token_bytes(i, special=special) for i in range(vocab.size)]
    text = "x".join(texts)
    assert vocab.encode(text, add_special=False, parse_special=True) == llama.encode(text, parse_special=True)


def test_markup_of_gpt_oss_is_shown_but_not_parsed_in_content(write_bpe, open_vocab):
    vocab = open_vocab(write_bpe(dict.fromkeys(["<|return|>", "<|call|>", "<|end|>", "<|start|>"], CONTROL)))
    ids = vocab.encode("<|start|>x<|end|>", add_special=False, parse_special=True)
    assert vocab.decode(ids) == "<|start|>x<|end|>"
    assert len(vocab.encode("<|start|>x<|end|>", add_special=False, parse_special=False)) == 17


def test_merges_into_control_tokens_are_ignored(write_bpe, open_vocab):
    kinds = {"<s": NORMAL, "<s>": CONTROL, "s>": NORMAL}
    vocab = open_vocab(write_bpe(kinds, merges=["< s", "<s >", "s >"], pre="llama-bpe", bos_token_id=258))
    assert shown(vocab, "<s>", parse_special=False) == ["<s", ">"]
    assert shown(vocab, "<s>", parse_special=True) == ["<s>"]


def test_content_may_contain_normal_tokens_that_are_eog(write_bpe, open_vocab):
    # Qwen's vocabularies have an ordinary </s>
    kinds = {"</": NORMAL, "s>": NORMAL, "</s>": NORMAL}
    vocab = open_vocab(write_bpe(kinds, merges=["< /", "s >", "</ s>"], pre="sarvam-moe"))
    assert vocab.eog_ids == {259}
    assert vocab.encode("</s>", add_special=False, parse_special=False) == [259]


def test_bos_and_eos_are_added(write_bpe, open_vocab):
    extra = {"<b>": CONTROL, "<e>": CONTROL}
    ids = {"bos_token_id": 257, "eos_token_id": 258}

    def around(**metadata):
        vocab = open_vocab(write_bpe(extra, **ids | metadata))
        return [vocab.decode([i], special=True) for i in vocab.encode("", add_special=True, parse_special=False)]

    assert around() == []
    assert around(add_bos_token=True) == ["<b>"]
    assert around(add_bos_token=True, add_eos_token=True) == ["<b>", "<e>"]
    assert around(pre="llama-bpe") == ["<b>"]
    assert around(pre="llama-bpe", add_bos_token=False) == []


def test_gemma_always_begins_with_bos(write_gguf, open_vocab):
    metadata = {"model": "gemma4", "tokens": ["a", "b", "ab", "<bos>"], "token_type": [NORMAL] * 3 + [CONTROL]}
    vocab = open_vocab(write_gguf(**metadata, merges=["a b"], bos_token_id=3, add_bos_token=False))
    assert vocab.encode("ab", add_special=True, parse_special=False) == [3, 2]


def test_no_bos_nor_eos_unless_named(write_bpe, open_vocab):
    vocab = open_vocab(write_bpe({}))
    assert (vocab.bos, vocab.eos, vocab.eog_ids) == (None, None, frozenset())


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_to_add_must_be_defined(name, write_bpe, open_vocab):
    with pytest.raises(
        InvalidModelFile, match=rf"tokenizer\.ggml\.{name}_token_id is missing, but the vocabulary adds"
    ):
        open_vocab(write_bpe({}, **{f"add_{name}_token": True}))
