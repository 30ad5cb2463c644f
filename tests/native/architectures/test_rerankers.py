"""Directories of rerankers: transformers computes the same scores of the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

import slm_core as slm
from native.architectures.engines import encoder_states
from native.architectures.exported import export
from slm_core.checkpoints import Checkpoint
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.ranking import RankHead

QUERY = "what runs"
TEXTS = ("the dog runs", "a ship", "the dog and the cat run, and what runs is not said in this text", "b")
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3}
ONE_LABEL = {"num_labels": 1, "vocab_size": 120}
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = ["the", "dog", "runs", "run", "what", "ship", "cat", "and", "text", "this", "is", "not", "said", "in", "a"]


def _sizes(n_positions: int, n_types: int | None = None) -> dict[str, Any]:
    types = {} if n_types is None else {"type_vocab_size": n_types}
    return {**SIZES, **ONE_LABEL, **types, "max_position_embeddings": n_positions}


def _wordpiece() -> Tokenizer:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz"]
    tokens += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return tokenizer


def _byte_pairs() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[-60:] + list("\u0120abcdefghijklmnopqrstuvwxyz,<>/")
    tokens = dict.fromkeys([*SPECIAL, *letters, "th", "the", "ru", "do"])
    merges = [("t", "h"), ("th", "e"), ("r", "u"), ("d", "o")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _unigram() -> Tokenizer:
    pieces = [(token, 0.0) for token in SPECIAL]
    pieces += [(f"\u2581{word}", -2.0 - i / 8) for i, word in enumerate(WORDS)]
    pieces += [(letter, -7.0 - i / 8) for i, letter in enumerate("\u2581abcdefghijklmnopqrstuvwxyz,<>/")]
    tokenizer = Tokenizer(models.Unigram(pieces, 3, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


BERT_ROLES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
ROBERTA_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
MODERN_BERT = {
    **_sizes(96),
    "local_attention": 8,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": None,
    "eos_token_id": None,
}
CASES: dict[str, tuple[Any, Any, Tokenizer, dict[str, str]]] = {
    "bert": (BertForSequenceClassification, BertConfig(**_sizes(96, 1)), _wordpiece(), BERT_ROLES),
    "bert-two-types": (BertForSequenceClassification, BertConfig(**_sizes(96, 2)), _wordpiece(), BERT_ROLES),
    "roberta": (RobertaForSequenceClassification, RobertaConfig(**_sizes(98, 1)), _byte_pairs(), ROBERTA_ROLES),
    "xlm-roberta": (
        XLMRobertaForSequenceClassification,
        XLMRobertaConfig(**_sizes(98, 1)),
        _unigram(),
        ROBERTA_ROLES,
    ),
    "modernbert-mean": (
        ModernBertForSequenceClassification,
        ModernBertConfig(**MODERN_BERT, classifier_pooling="mean"),
        _wordpiece(),
        BERT_ROLES,
    ),
    "modernbert-cls": (
        ModernBertForSequenceClassification,
        ModernBertConfig(**MODERN_BERT, classifier_pooling="cls", classifier_bias=True),
        _wordpiece(),
        BERT_ROLES,
    ),
}


def save(folder: Path, name: str, seed: int = 5) -> tuple[Any, PreTrainedTokenizerFast]:
    """A random reranker and its tokenizer, saved by transformers; matrices far from 0, so that scores differ."""
    kind, config, tokenizer, roles = CASES[name]
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    fast.save_pretrained(folder)
    return model, fast


EXPORTED = {
    "bert": ("native", "llamacpp"),
    "bert-two-types": ("native",),
    "roberta": ("native", "llamacpp"),
    "modernbert-mean": ("native", "llamacpp"),
    "modernbert-cls": ("native",),
}
"""The backends that rank by the exported file. llama.cpp knows no ``classifier_bias`` and no second token type."""


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("reranker") / request.param
    return folder, *save(folder, request.param)


def theirs(model: Any, tokenizer: Any, text: str) -> tuple[list[int], float]:
    """The tokens of a pair and its score, by transformers."""
    inputs = tokenizer(QUERY, text, return_token_type_ids=model.config.model_type == "bert", return_tensors="pt")
    if getattr(model.config, "type_vocab_size", 1) == 1:
        inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        return inputs["input_ids"][0].tolist(), float(model(**inputs).logits[0, 0])


def test_scores_equal_transformers(saved: tuple[Path, Any, Any]) -> None:
    """Of float32: the errors of the forward pass are below 1e-5 of a state, and the head adds 48 of them."""
    folder, model, tokenizer = saved
    pairs, scores = zip(*(theirs(model, tokenizer, text) for text in TEXTS), strict=True)
    assert max(scores) - min(scores) > 0.02, "the scores are alike: the test could not fail"
    with slm.load(folder, backend="native") as loaded:
        assert loaded.info.ranks
        ranking = loaded.rerank(QUERY, TEXTS)
        with Checkpoint(folder) as directory:
            head = RankHead.read(directory)
        assert [head.pair(loaded.vocab, QUERY, text) for text in TEXTS] == list(pairs)
        controls = [token for token in ("<s>", "</s>", "[CLS]", "[SEP]") if token in tokenizer.get_vocab()]
        content = loaded.vocab.encode("".join(controls), add_special=False, parse_special=False)
        assert set(content).isdisjoint(tokenizer.convert_tokens_to_ids(controls)), "a text spells control tokens"
    np.testing.assert_allclose(ranking.scores, scores, rtol=1e-4, atol=1e-4)


def test_directories_without_the_head_embed(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """Like published embedding models, whose pooling is in a file of sentence-transformers."""
    _, model, tokenizer = saved
    model.base_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    ids = tokenizer(TEXTS[2])["input_ids"]
    with slm.load(tmp_path, backend="native") as loaded:
        assert (loaded.info.ranks, loaded.info.pooling) == (False, "mean")
        states = loaded.hidden_states(TEXTS[2])
    expected = encoder_states(model.base_model, ids)
    np.testing.assert_allclose(states, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_exported_files_rank_alike(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """llama.cpp has a smaller GELU table, so its states differ by up to 2e-3."""
    folder, *_ = saved
    if folder.name not in EXPORTED:
        return
    with slm.load(folder, backend="native") as directory:
        expected = directory.rerank(QUERY, TEXTS)
    path = export(folder, tmp_path / "reranker.gguf")
    for backend in EXPORTED[folder.name]:
        with slm.load(path, backend=backend) as file:
            ranking = file.rerank(QUERY, TEXTS)
        assert ranking.n_tokens == expected.n_tokens
        bound = 0 if backend == "native" else 2e-2
        np.testing.assert_allclose(ranking.scores, expected.scores, rtol=0, atol=bound, err_msg=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, "a classifier of 2 labels"),
        ({"id2label": None}, "a classifier of 2 labels"),
        ({"pad_token_id": -1}, "'pad_token_id' is -1"),
        ({"pad_token_id": 97}, "'pad_token_id' is 97, beyond the 98 positions"),
        ({"pad_token_id": 2**31 - 1}, "'pad_token_id' is 2147483647, beyond"),
    ],
)
def test_other_classifiers_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save(tmp_path, "xlm-roberta")
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((InvalidModelFile, UnsupportedModel), match=message), Checkpoint(tmp_path) as directory:
        RankHead.read(directory)
