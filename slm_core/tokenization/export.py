"""Exports the vocabulary of a GGUF file to the files of the ``tokenizers`` library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from slm_core.errors import UnsupportedModel
from slm_core.tokenization.bpe import BytePairs
from slm_core.tokenization.directory import SETTINGS, TOKENIZER
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.sentencepiece import METASPACE
from slm_core.tokenization.spec import VocabSpec, read_spec
from slm_core.tokenization.special import read_strips

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slm_core.gguf import GgufFile

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_REPLACE = {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}
_SENTENCEPIECE: list[dict[str, Any]] = [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_files(gguf: GgufFile, n_ctx: int) -> dict[str, str]:
    """``tokenizer.json`` and ``tokenizer_config.json``, by name.

    Args:
        gguf: the open file.
        n_ctx: the longest text in tokens, for the settings.

    Raises:
        UnsupportedModel: the vocabulary is not a byte-pair vocabulary, or has tokens that are not UTF-8.
        InvalidModelFile: the vocabulary contradicts itself.
    """
    spec = read_spec(gguf)
    try:
        "".join(spec.tokens).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedModel(f"{spec.source}: a token is not UTF-8, which {TOKENIZER} cannot hold") from error
    tokenizer = _byte_pairs(gguf, spec) if spec.pre is not None else _sentencepiece(gguf, spec)
    tokenizer["added_tokens"] = _added_tokens(gguf, spec)
    tokenizer["post_processor"] = _post_processor(spec)
    settings = _settings(spec, n_ctx)
    return {name: json.dumps(data, ensure_ascii=False) for name, data in ((TOKENIZER, tokenizer), (SETTINGS, settings))}


def _byte_pairs(gguf: GgufFile, spec: VocabSpec) -> dict[str, Any]:
    assert spec.pre is not None
    to_json: dict[str, Any] = json.loads(BytePairs(spec, gguf, spec.pre).to_json())
    to_json["model"]["vocab"] = _vocabulary(spec)
    if spec.pre.byte_level:
        to_json["decoder"] = _BYTE_LEVEL
    elif spec.pre.normalizer == "metaspace":
        to_json["decoder"] = {"type": "Sequence", "decoders": _SENTENCEPIECE}
    return to_json


def _sentencepiece(gguf: GgufFile, spec: VocabSpec) -> dict[str, Any]:
    """A byte-pair model; scores are ranks in SentencePiece's byte-pair models, so they order the merges."""
    charsmap = gguf.get(_CHARSMAP, np.ndarray, np.zeros(0, np.uint8))
    if spec.model != "llama" or spec.scores is None or len(charsmap) or spec.remove_extra_whitespaces:
        feature = "a character map" if len(charsmap) else f"tokenizer.ggml.model {spec.model!r}"
        raise UnsupportedModel(f"{spec.source}: {feature} cannot be written as {TOKENIZER} yet (accepted: byte pairs)")
    prefix = [{"type": "Prepend", "prepend": METASPACE}] if spec.add_space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spec.add_space_prefix else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
    unknown = spec.special.get("unknown")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else spec.tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": _vocabulary(spec),
        "merges": _merges_by_score(spec, spec.scores.tolist()),
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*_SENTENCEPIECE, *strip]},
        "model": model,
    }


def _merges_by_score(spec: VocabSpec, scores: list[float]) -> list[list[str]]:
    kinds = (TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED)
    ids = {spec.tokens[i]: i for i in spec.content_of_kind(*kinds)}
    merges: list[tuple[float, int, int, list[str]]] = []
    for piece, i in ids.items():
        for split in range(1, len(piece)):
            left, right = ids.get(piece[:split]), ids.get(piece[split:])
            if left is not None and right is not None:
                merges.append((-scores[i], left, right, [piece[:split], piece[split:]]))
    return [pair for *_, pair in sorted(merges)]


def _vocabulary(spec: VocabSpec) -> dict[str, int]:
    unused = set(spec.of_kind(TokenKind.UNUSED))
    return {text: i for i, text in enumerate(spec.tokens) if i not in unused}


def _added_tokens(gguf: GgufFile, spec: VocabSpec) -> list[dict[str, Any]]:
    left, right = read_strips(gguf, spec)
    user_defined = set(spec.of_kind(TokenKind.USER_DEFINED))
    return [
        {
            "id": i,
            "content": spec.tokens[i],
            "single_word": False,
            "lstrip": i in left,
            "rstrip": i in right,
            "normalized": False,
            "special": i not in user_defined,
        }
        for i in spec.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
    ]


def _post_processor(spec: VocabSpec) -> dict[str, Any] | None:
    before = ["bos"] if spec.add_bos else []
    after = ["eos"] if spec.add_eos else []
    if not before and not after:
        return None

    def special(role: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": spec.tokens[spec.special[role]], "type_id": 0}}

    def parts(letter: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": letter, "type_id": 0}}
        return [*map(special, before), text, *map(special, after)]

    ids = {spec.tokens[spec.special[role]]: spec.special[role] for role in (*before, *after)}
    special_tokens = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ids.items()}
    return {
        "type": "TemplateProcessing",
        "single": parts("A"),
        "pair": [*parts("A"), *parts("B")],
        "special_tokens": special_tokens,
    }


def _settings(spec: VocabSpec, n_ctx: int) -> dict[str, Any]:
    roles: Mapping[str, str] = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
    named = {key: spec.tokens[spec.special[role]] for role, key in roles.items() if role in spec.special}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": n_ctx,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": spec.add_bos,
        "add_eos_token": spec.add_eos,
        **named,
    }
