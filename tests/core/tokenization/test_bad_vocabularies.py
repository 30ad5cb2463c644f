"""Missing metadata, wrong types and contradictions: errors of one line that name the key and the file."""

from __future__ import annotations

import random

import pytest

from slm_core.errors import InvalidModelFile, SlmError, UnsupportedModel

TOKENS = ["<unk>", "a", "b", "ab", "<s>"]
GOOD = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "token_type": [2, 1, 1, 1, 3], "merges": ["a b"]}
SPM = {"model": "llama", "tokens": TOKENS, "token_type": [2, 1, 1, 1, 3], "scores": [0.0, -1.0, -2.0, -3.0, 0.0]}


def test_valid_vocabularies_are_accepted(write_gguf, open_vocab):
    assert open_vocab(write_gguf(**GOOD)).encode("ab", add_special=False, parse_special=False) == [3]
    assert open_vocab(write_gguf(**SPM)).encode("b", add_special=False, parse_special=False) == [0, 2]


BAD = {
    "no model": (GOOD, {"model": None}, r"'tokenizer\.ggml\.model' is missing"),
    "model of another type": (GOOD, {"model": 7}, r"'tokenizer\.ggml\.model' is uint32, but str is wanted"),
    "unknown model": (
        GOOD,
        {"model": "plamo2"},
        r"unsupported tokenizer\.ggml\.model 'plamo2' \(accepted: bert, gemma4, gpt2",
    ),
    "no vocabulary": (GOOD, {"model": "no_vocab"}, "the file has no vocabulary"),
    "no tokens": (GOOD, {"tokens": None}, r"'tokenizer\.ggml\.tokens' is missing"),
    "tokens of another type": (GOOD, {"tokens": [1, 2, 3]}, "array of 3 int32, but list.str. is wanted"),
    "tokens not an array": (GOOD, {"tokens": "abc"}, "is string, but list.str. is wanted"),
    "duplicate tokens": (GOOD, {"tokens": ["<unk>", "a", "b", "a", "<s>"]}, "tokens 1 and 3 are both 'a'"),
    "too few types": (GOOD, {"token_type": [1, 1]}, "token_type has 2 values for 5 tokens"),
    "too many types": (GOOD, {"token_type": [1] * 6}, "token_type has 6 values for 5 tokens"),
    "unknown type": (GOOD, {"token_type": [1, 1, 1, 1, 9]}, "other than the integers 0 to 6"),
    "negative type": (GOOD, {"token_type": [1, 1, 1, 1, -1]}, "other than the integers 0 to 6"),
    "types that are strings": (GOOD, {"token_type": ["a"] * 5}, "array of 5 string, but np.ndarray is wanted"),
    "types that are floats": (GOOD, {"token_type": [1.0] * 5}, "other than the integers 0 to 6"),
    "too few scores": (SPM, {"scores": [1.0]}, "scores has 1 values for 5 tokens"),
    "scores that are not numbers": (SPM, {"scores": [0.0, 1.0, 2.0, 3.0, float("nan")]}, "scores .* not finite"),
    "infinite scores": (SPM, {"scores": [0.0, 1.0, 2.0, 3.0, float("-inf")]}, "scores .* not finite"),
    "bos outside": (GOOD, {"bos_token_id": 5}, "bos_token_id is 5, but the tokens are 0 to 4"),
    "eot outside": (GOOD, {"eot_token_id": 2**32 - 1}, "eot_token_id is 4294967295, but the tokens are 0 to 4"),
    "eos of another type": (GOOD, {"eos_token_id": "<s>"}, "is string, but int is wanted"),
    "add_bos of another type": (GOOD, {"add_bos_token": 1}, "is uint32, but bool is wanted"),
    "no merges": (GOOD, {"merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
    "merges of another type": (GOOD, {"merges": [1, 2]}, "array of 2 int32, but list.str. is wanted"),
    "merge without a space": (GOOD, {"merges": ["a b", "ab"]}, "merges 1 is 'ab', not two tokens with a space between"),
    "merge of one token": (GOOD, {"merges": ["a "]}, "merges 0 is 'a ', not two tokens"),
    "empty merge": (GOOD, {"merges": [""]}, "merges 0 is '', not two tokens"),
    "merge of three tokens": (GOOD, {"merges": ["a b a"]}, "merges 0 needs the token 'b a', which is missing"),
    "merge of an unknown token": (GOOD, {"merges": ["a b", "a c"]}, "merges 1 needs the token 'c', which is missing"),
    "merge into an unknown token": (GOOD, {"merges": ["b a"]}, "merges 0 needs the token 'ba', which is missing"),
    "pre of another type": (GOOD, {"pre": 1}, "is uint32, but str is wanted"),
    "bad byte token": (SPM, {"tokens": ["<0xGG>", "a", "b", "c", "d"], "token_type": [6, 1, 1, 1, 1]}, "byte token 0"),
    "lower-case byte token": (
        SPM,
        {"tokens": ["<0xff>", "a", "b", "c", "d"], "token_type": [6] + [1] * 4},
        "byte token 0",
    ),
    "bos to add outside": (SPM, {"tokens": ["a"], "token_type": [1], "scores": [0.0]}, "bos_token_id is missing"),
    "unigram without unknown": (
        SPM,
        {"model": "t5", "tokens": ["a", "b"], "token_type": [1, 1], "scores": None},
        "unknown",
    ),
    "whitespace with another pre": (GOOD, {"model": "whitespace"}, "'gpt-2' with a whitespace vocabulary"),
    "space prefix of another type": (SPM, {"add_space_prefix": "yes"}, "is string, but bool is wanted"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_vocabularies_are_refused(case, write_gguf, open_vocab):
    good, changes, message = BAD[case]
    path = write_gguf(**good | changes)
    with pytest.raises((InvalidModelFile, UnsupportedModel), match=message) as caught:
        open_vocab(path)
    assert "\n" not in str(caught.value), "the message has more than one line"
    assert str(path) in str(caught.value), "the message does not name the file"


def test_empty_tokens_get_a_text(write_gguf, open_vocab, llama_vocab):
    path = write_gguf(**GOOD | {"tokens": ["", "a", "b", "ab", "<s>"], "eos_token_id": 4, "bos_token_id": 4})
    vocab = open_vocab(path)
    assert vocab.token_bytes(0, special=True) == llama_vocab(path).token_bytes(0, special=True) == b"[EMPTY_0]"


@pytest.mark.parametrize(("good", "model"), [(GOOD, "gpt2"), (SPM, "llama"), (SPM, "t5"), (GOOD, "bert")])
def test_tokens_that_are_not_utf8(good, model, tmp_path, write_gguf, open_vocab):
    ids = {"bos_token_id": 4, "seperator_token_id": 4, "unknown_token_id": 0, "eos_token_id": 4}
    changes = {"model": model, "merges": ["a @@"], "tokens": ["<unk>", "a", "@@", "a@@", "<s>"]}
    sound = write_gguf(**good | ids | changes)
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(sound.read_bytes().replace(b"@@", b"\xe4\xb8"))  # two thirds of a character
    vocab = open_vocab(damaged)
    assert vocab.token_bytes(3) == b"a\xe4\xb8"
    assert not {2, 3} & set(vocab.encode("a\u4e2da", add_special=False, parse_special=True))


def test_random_damage_raises_only_model_errors(write_gguf, tmp_path, open_vocab):
    sound = write_gguf(**GOOD).read_bytes()
    draw = random.Random(5)
    n_refused = 0
    for i in range(300):
        data = bytearray(sound)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(24, len(data))] = draw.randrange(256)
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(data)
        try:
            open_vocab(path).encode("ab <s>", add_special=True, parse_special=True)
        except SlmError as error:
            n_refused += 1
            assert "\n" not in str(error), f"{error}"
    assert n_refused > 100, "the damage is too mild to test anything"
