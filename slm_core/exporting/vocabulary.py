"""The vocabulary of a directory as metadata of a GGUF file: ``tokenizer.ggml.*``.

The written vocabulary is read back, and has to encode sample texts like the directory: a vocabulary that a GGUF file
cannot express is refused.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import UnsupportedModel
from slm_core.exporting.pre_tokenizers import pre_name, sample_texts
from slm_core.foreign import reported
from slm_core.gguf import GgufFile, PlainValue, header
from slm_core.tokenization import build_vocab
from slm_core.tokenization.directory import DirectoryVocab, directory_vocab
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.sentencepiece import METASPACE
from slm_core.tokenization.vocab import GgufVocab

_PREFIX = "tokenizer.ggml."
_LONGEST_SHOWN = 60
_N_TEXTS, _N_PIECES, _SEED = 600, 8, 21
_log = logging.getLogger(__name__)

Metadata: TypeAlias = "dict[str, PlainValue | NDArray[Any]]"


def vocabulary_metadata(folder: Path, n_vocab: int, ends: Sequence[int]) -> Metadata:
    """The metadata of a directory's vocabulary.

    Args:
        folder: the directory.
        n_vocab: the number of the model's logits.
        ends: tokens that end an answer, from the configuration.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``directory_vocab``; or a GGUF file cannot express the vocabulary.
    """
    vocab = directory_vocab(folder, n_vocab, ends)
    with reported(UnsupportedModel, f"{folder}: its vocabulary cannot be written as GGUF"):
        return _checked_metadata(folder, vocab, ends)


def _checked_metadata(folder: Path, vocab: DirectoryVocab | GgufVocab, ends: Sequence[int]) -> Metadata:
    if isinstance(vocab, GgufVocab):
        keys = _world(vocab)
    else:
        keys = {**_encoder(folder, vocab), **_tokens(vocab), **_special(folder, vocab, ends)}
    metadata = {f"{_PREFIX}{key}": value for key, value in keys.items()}
    _check(folder, vocab, build_vocab(GgufFile.open(header(metadata))))
    return metadata


def _world(vocab: GgufVocab) -> Metadata:
    """RWKV World's vocabulary, whose tokens are spelled as in GGUF files."""
    spec = vocab.spec
    special: Metadata = {f"{role}_token_id": i for role, i in spec.special.items()}
    kinds = np.frombuffer(spec.content_kinds, np.uint8).astype(np.int32)
    return {"model": "rwkv", "tokens": spec.tokens, "token_type": kinds, **special, "add_bos_token": spec.add_bos}


def _encoder(folder: Path, vocab: DirectoryVocab) -> Metadata:
    """The keys that say how texts become tokens."""
    model = vocab.stated["model"]
    if vocab.is_unigram:
        raise UnsupportedModel(
            f"{folder}: a Unigram tokenizer cannot be written as GGUF, whose rules for combined characters differ"
            " (the directory itself can be loaded)"
        )
    if vocab.is_wordpiece:
        normalizer = vocab.stated.get("normalizer") or {}
        lowercase = normalizer.get("lowercase") is not False
        accents = normalizer.get("strip_accents")
        return {
            "model": "bert",
            "pre": "default",
            "normalizer.lowercase": lowercase,
            "normalizer.strip_accents": lowercase if accents is None else bool(accents),
        }
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    if not vocab.is_byte_level:
        prefix = vocab.adds_space
        return {
            "model": "llama",
            "pre": "default",
            "scores": _scores(vocab.tokens, merges),
            "add_space_prefix": prefix,
            "remove_extra_whitespaces": False,
        }
    pre = pre_name(vocab.tokenizer, vocab.stated)
    if pre is None:
        raise UnsupportedModel(f"{folder}: GGUF has no name for the pre-tokenizer of its tokenizer.json")
    return {"model": "gpt2", "pre": pre, "merges": [" ".join(merge) for merge in merges]}


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> NDArray[np.float32]:
    """Scores that keep the order of ``merges``: a merged piece gets the negative rank of its first merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    last = len(merges)
    return np.array([-float(ranks.get(token, last)) for token in tokens], np.float32)


def _tokens(vocab: DirectoryVocab) -> Metadata:
    """Spellings and kinds."""
    kinds = np.frombuffer(vocab.stored_kinds, np.uint8).astype(np.int32)
    tokens = [text or f"[PAD{i}]" for i, text in enumerate(vocab.tokens)]
    if vocab.is_wordpiece:
        normal = [kind == TokenKind.NORMAL for kind in kinds]
        pairs = zip(tokens, normal, strict=True)
        tokens = [_as_gguf_piece(token) if is_normal else token for token, is_normal in pairs]
    elif not vocab.is_byte_level:
        ids = {text: i for i, text in enumerate(tokens)}
        for byte in range(256):
            i = ids.get(f"<0x{byte:02X}>")
            if i is not None and kinds[i] == TokenKind.NORMAL:
                kinds[i] = TokenKind.BYTE
    unknown = vocab.unknown
    if unknown is not None and not vocab.is_byte_level:
        kinds[unknown] = TokenKind.UNKNOWN
    return {"tokens": tokens, "token_type": kinds}


def _as_gguf_piece(token: str) -> str:
    return token[2:] if token.startswith("##") else METASPACE + token


def _special(folder: Path, vocab: DirectoryVocab, ends: Sequence[int]) -> Metadata:
    """The roles of tokens, and the tokens that are added to texts."""
    special: Metadata = {}
    before, after = vocab.around
    if vocab.is_wordpiece:
        if len(before) != 1 or len(after) != 1:
            raise UnsupportedModel(f"{folder}: GGUF cannot express which tokens the tokenizer adds to texts")
        special |= {"bos_token_id": before[0], "cls_token_id": before[0], "seperator_token_id": after[0]}
    else:
        eos = vocab.eos if vocab.eos is not None else next(iter(ends), None)
        roles = {"bos": vocab.bos if vocab.bos is not None else next(iter(before), None), "eos": eos}
        special |= {f"{role}_token_id": i for role, i in roles.items() if i is not None}
        if before not in ([], [roles["bos"]]) or after not in ([], [roles["eos"]]):
            raise UnsupportedModel(f"{folder}: GGUF cannot express which tokens the tokenizer adds to texts")
        special |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
        others = [end for end in ends if end != eos and end not in vocab.known_ends]
        special |= {f"{role}_token_id": i for role, i in zip(("eot", "eom"), others, strict=False)}
    if vocab.unknown is not None:
        special["unknown_token_id"] = vocab.unknown
    if vocab.padding is not None:
        special["padding_token_id"] = vocab.padding
    return special


def _check(folder: Path, original: DirectoryVocab | GgufVocab, written: GgufVocab) -> None:
    """Compare the vocabulary of the metadata with the directory's.

    Raises:
        UnsupportedModel: they differ; the message shows a text.
    """
    for special in (False, True):
        for i in range(original.size):
            if written.token_bytes(i, special=special) != original.token_bytes(i, special=special):
                raise UnsupportedModel(f"{folder}: GGUF cannot express token {i} of its tokenizer")
    if written.eog_ids != original.eog_ids:
        missing = sorted(original.eog_ids ^ written.eog_ids)
        raise UnsupportedModel(f"{folder}: GGUF cannot express which tokens end an answer (such as {missing[0]})")
    kinds = original.stored_kinds if isinstance(original, DirectoryVocab) else original.spec.kinds
    for text in (*sample_texts(), *_texts_of_pieces(original, kinds)):
        expected = original.encode(text, add_special=True, parse_special=False)
        if written.encode(text, add_special=True, parse_special=False) != expected:
            shown = json.dumps(text[:_LONGEST_SHOWN])
            raise UnsupportedModel(f"{folder}: GGUF cannot express its tokenizer: {shown} has other tokens")
    texts = _texts_with_special(original, kinds)
    differing = [text for text in texts if _parsed(written, text) != _parsed(original, text)]
    if differing:
        shown = json.dumps(differing[0][:_LONGEST_SHOWN])
        _log.warning("%s: as GGUF, texts around control tokens have other tokens, such as %s", folder, shown)


def _parsed(vocab: DirectoryVocab | GgufVocab, text: str) -> list[int]:
    return vocab.encode(text, add_special=False, parse_special=True)


def _texts_of_pieces(vocab: DirectoryVocab | GgufVocab, kinds: bytes) -> Iterator[str]:
    """Texts of random tokens, so that rare merges are compared."""
    draw = random.Random(_SEED)  # noqa: S311  # nothing secret
    normal = [i for i, kind in enumerate(kinds) if kind == TokenKind.NORMAL]
    for _ in range(_N_TEXTS if normal else 0):
        data = b"".join(vocab.token_bytes(i) for i in draw.choices(normal, k=draw.randint(1, _N_PIECES)))
        yield data.decode("utf-8", "ignore")


def _texts_with_special(vocab: DirectoryVocab | GgufVocab, kinds: bytes) -> Iterator[str]:
    for i, kind in enumerate(kinds):
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED):
            spelled = vocab.token_bytes(i, special=True).decode("utf-8", "replace")
            yield f"a{spelled}b {spelled} c"
