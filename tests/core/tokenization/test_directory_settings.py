"""Tokens that only the settings of a directory have, or its older files; transformers is the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slm_core.errors import InvalidModelFile
from slm_core.tokenization.directory import directory_vocab

ROLES = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
TURN = {"content": "<turn>", "lstrip": False, "normalized": False, "rstrip": True, "single_word": False}
TEXTS = ("<s>a</s>", "a <turn>  b", "a<extra>b", "<turn>")
N_TOKENS = 256 + 3


def folder_with(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {**ROLES, "eos_token": "<turn>"}},
        {"tokenizer_config.json": {**ROLES, "eos_token": "<turn>", "added_tokens_decoder": {str(N_TOKENS): TURN}}},
        {"tokenizer_config.json": {**ROLES, "added_tokens_decoder": {str(N_TOKENS): TURN}, "pad_token": "<extra>"}},
        {"tokenizer_config.json": {**ROLES, "extra_special_tokens": {"image_token": "<extra>"}}},
        {"tokenizer_config.json": {**ROLES, "additional_special_tokens": ["<extra>", "<|im_end|>"]}},
        {"tokenizer_config.json": {}, "special_tokens_map.json": {"bos_token": "<s>", "eos_token": TURN}},
        {"tokenizer_config.json": ROLES, "special_tokens_map.json": {"eos_token": "<|im_end|>"}},
        {"tokenizer_config.json": ROLES, "added_tokens.json": {"<turn>": N_TOKENS}},
        {
            "tokenizer_config.json": {**ROLES, "added_tokens_decoder": {}},
            "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        },
    ],
)
def test_tokens_of_the_settings_have_the_ids_of_transformers(tmp_path, files):
    transformers = pytest.importorskip("transformers", reason="it is the reference: pip install transformers")
    folder = folder_with(tmp_path, files)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    vocab = directory_vocab(folder)
    assert (vocab.bos, vocab.eos, vocab.size) == (reference.bos_token_id, reference.eos_token_id, len(reference))
    assert vocab.eos in vocab.eog_ids
    for text in TEXTS:
        ids = reference.encode(text)
        assert vocab.encode(text, add_special=True, parse_special=True) == ids
        assert vocab.decode(ids, special=True) == reference.decode(ids)
        assert vocab.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_tokens_beyond_the_rows_of_the_model_are_not_added(tmp_path):
    folder = folder_with(tmp_path, {"tokenizer_config.json": {**ROLES, "pad_token": "<extra>"}})
    assert directory_vocab(folder, N_TOKENS).padding is None
    assert directory_vocab(folder, N_TOKENS + 1).padding == N_TOKENS


def test_an_added_token_with_another_id_is_refused(tmp_path):
    folder = folder_with(tmp_path, {"tokenizer_config.json": {**ROLES, "added_tokens_decoder": {"300": TURN}}})
    with pytest.raises(
        InvalidModelFile, match=r"token 300 of tokenizer_config\.json is missing, and the next one is 259"
    ):
        directory_vocab(folder, 400)
