"""The vocabulary of a GGUF file: read, checked, with llama.cpp's defaults for missing keys."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.known_tokens import apply_known_texts
from slm_core.tokenization.pretokenizers import PreTokenization, pre_tokenization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from slm_core.gguf import GgufFile
    from slm_core.types import InfillTokens

logger = logging.getLogger("slm_core.tokenization")

_PREFIX = "tokenizer.ggml."
MODEL_KEY = f"{_PREFIX}model"
NO_VOCAB = ("none", "no_vocab")
"""Values of ``MODEL_KEY`` for a file without a vocabulary."""
_NOT_TEXT = re.compile("[\ud800-\udfff]")  # the reader's marks of bytes that are not UTF-8
_BPE_MODELS = ("gpt2", "gemma4", "whitespace")
_MODELS = (*_BPE_MODELS, "llama", "bert", "t5", "rwkv")

# llama.cpp's defaults. llama.cpp also assumes Falcon's 11 as BOS and EOS of every byte-pair vocabulary. In other models
# token 11 would then end answers, so there is no such default here.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102},
    "t5": {"eos": 1, "unknown": 2},
}
_ID_NAMES = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "fim_pad", "fim_rep", "fim_sep"),
    *("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle"),  # the last three are deprecated
)


@dataclass(frozen=True)
class VocabSpec:
    """The data of a vocabulary; V is the number of tokens.

    Attributes:
        source: the file, for messages.
        model: ``tokenizer.ggml.model``.
        tokens: the stored spellings of the V tokens, all different.
        ids: id by spelling.
        kinds: the ``TokenKind`` of each token, V bytes; well-known control tokens are corrected.
        content_kinds: the kind of each token in content, V bytes. An ordinary token that llama.cpp treats as control
            (``</s>`` in Qwen vocabularies) is ordinary here, as in its own tokenizer. A token whose bytes are not UTF-8
            is control.
        scores: float32 [V], or ``None`` if the file has none.
        special: id by role (``bos``, ``eos``, ``unknown``, ``seperator``, ...), for the roles of this model.
        eog_ids: tokens that end an answer.
        shown_control: control tokens whose text is part of answers.
        infill: tokens for text with a gap; None without them.
        pre: the pre-tokenization; byte-pair vocabularies only.
        add_bos: begin a text with BOS.
        add_eos: end a text with EOS.
        add_space_prefix: add a space before the text, and before text after a special token.
        remove_extra_whitespaces: replace runs of spaces by one space, and remove spaces at both ends.
    """

    source: str
    model: str
    tokens: list[str]
    ids: Mapping[str, int]
    kinds: bytes
    content_kinds: bytes
    scores: NDArray[np.float32] | None
    special: Mapping[str, int]
    eog_ids: frozenset[int]
    shown_control: frozenset[int]
    infill: InfillTokens | None
    pre: PreTokenization | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool

    def of_kind(self, *kinds: TokenKind) -> list[int]:
        """Ids of the tokens of these kinds, ascending."""
        return _indices(self.kinds, kinds)

    def content_of_kind(self, *kinds: TokenKind) -> list[int]:
        """Ids of the tokens that have these kinds in content, ascending."""
        return _indices(self.content_kinds, kinds)

    def byte_ids(self) -> list[int | None]:
        """The token ``<0xXX>`` of each of the 256 bytes, or None."""
        return [self.ids.get(f"<0x{byte:02X}>") for byte in range(256)]


def read_spec(gguf: GgufFile) -> VocabSpec:
    """Read and check a vocabulary, except its merges.

    Raises:
        UnsupportedModel: there is no vocabulary, or one of an unknown kind.
        InvalidModelFile: it contradicts itself.
    """
    source = str(gguf.path)
    model = _model(gguf)
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(gguf.require(f"{_PREFIX}tokens", list[str]))]
    ids = _index(tokens, source)
    special = _special_ids(gguf, model, len(tokens))
    stored = _kinds(gguf, len(tokens))
    corrected = apply_known_texts(ids, bytearray(stored), special)
    _check_byte_tokens(tokens, corrected.kinds, source)
    pre = _pre(gguf, model)
    add_bos, add_eos = _adds(gguf, model, pre, special)
    return VocabSpec(
        source=source,
        model=model,
        tokens=tokens,
        ids=ids,
        scores=_scores(gguf, len(tokens)),
        special=special,
        pre=pre,
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=gguf.get(f"{_PREFIX}add_space_prefix", bool, model == "llama"),
        remove_extra_whitespaces=gguf.get(f"{_PREFIX}remove_extra_whitespaces", bool, False),
        content_kinds=_content_kinds(tokens, stored, corrected.kinds),
        **corrected._asdict(),
    )


def stated_spec(
    source: str, model: str, tokens: list[str], kinds: bytes, special: Mapping[str, int], *, add_bos: bool
) -> VocabSpec:
    """A vocabulary from files other than GGUF, without scores and added spaces; see ``VocabSpec``.

    Raises:
        InvalidModelFile: two tokens have the same spelling.
    """
    ids = _index(tokens, source)
    corrected = apply_known_texts(ids, bytearray(kinds), special)
    return VocabSpec(
        source=source,
        model=model,
        tokens=tokens,
        ids=ids,
        scores=None,
        special=special,
        pre=None,
        add_bos=add_bos,
        add_eos=False,
        add_space_prefix=False,
        remove_extra_whitespaces=False,
        content_kinds=_content_kinds(tokens, kinds, corrected.kinds),
        **corrected._asdict(),
    )


def _model(gguf: GgufFile) -> str:
    model = gguf.require(MODEL_KEY, str)
    if model in NO_VOCAB:
        raise UnsupportedModel(f"{gguf.path}: the file has no vocabulary (tokenizer.ggml.model is {model!r})")
    if model not in _MODELS:
        accepted = ", ".join(sorted(_MODELS))
        raise UnsupportedModel(f"{gguf.path}: unsupported tokenizer.ggml.model {model[:80]!r} (accepted: {accepted})")
    return model


def _index(tokens: list[str], source: str) -> dict[str, int]:
    if not tokens:
        raise InvalidModelFile(f"{source}: tokenizer.ggml.tokens is empty")
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        again = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise InvalidModelFile(f"{source}: tokens {again} and {ids[tokens[again]]} are both {tokens[again][:80]!r}")
    return ids


def _content_kinds(tokens: list[str], stored: bytes, corrected: bytes) -> bytes:
    stored_kinds = np.frombuffer(stored, np.uint8)
    kinds = np.where(stored_kinds == TokenKind.NORMAL, stored_kinds, np.frombuffer(corrected, np.uint8))
    if _NOT_TEXT.search("".join(tokens)):
        kinds[[i for i, text in enumerate(tokens) if _NOT_TEXT.search(text)]] = TokenKind.CONTROL
    return kinds.tobytes()


def _indices(stored: bytes, kinds: tuple[TokenKind, ...]) -> list[int]:
    indices: list[int] = np.flatnonzero(np.isin(np.frombuffer(stored, np.uint8), kinds)).tolist()
    return indices


def _kinds(gguf: GgufFile, n_tokens: int) -> bytes:
    stored = _array(gguf, "token_type", n_tokens)
    if stored is None:
        return bytes([TokenKind.NORMAL]) * n_tokens
    if stored.dtype.kind not in "iu" or not np.isin(stored, list(TokenKind)).all():
        raise InvalidModelFile(f"{gguf.path}: tokenizer.ggml.token_type has values other than the integers 0 to 6")
    return stored.astype(np.uint8).tobytes()


def _scores(gguf: GgufFile, n_tokens: int) -> NDArray[np.float32] | None:
    stored = _array(gguf, "scores", n_tokens)
    if stored is None:
        return None
    scores = stored.astype(np.float32)
    if not np.isfinite(scores).all():
        raise InvalidModelFile(f"{gguf.path}: tokenizer.ggml.scores has values that are not finite")
    return scores


def _array(gguf: GgufFile, name: str, n_tokens: int) -> NDArray[np.generic] | None:
    key = f"{_PREFIX}{name}"
    if key not in gguf.metadata:
        return None
    stored = gguf.require(key, np.ndarray)
    if len(stored) != n_tokens:
        raise InvalidModelFile(f"{gguf.path}: {key} has {len(stored)} values for {n_tokens} tokens")
    return stored


def _special_ids(gguf: GgufFile, model: str, n_tokens: int) -> dict[str, int]:
    special = {name: i for name, i in _DEFAULT_IDS.get(model, {}).items() if i < n_tokens}
    for name in _ID_NAMES:
        key = f"{_PREFIX}{name}_token_id"
        if key not in gguf.metadata:
            continue
        special[name] = gguf.require(key, int)
        if not 0 <= special[name] < n_tokens:
            raise InvalidModelFile(f"{gguf.path}: {key} is {special[name]}, but the tokens are 0 to {n_tokens - 1}")
    return special


def _pre(gguf: GgufFile, model: str) -> PreTokenization | None:
    if model not in _BPE_MODELS:
        return None
    source = str(gguf.path)
    name = gguf.get(f"{_PREFIX}pre", str, "")
    if model == "whitespace" and name not in ("", "whitespace"):
        raise UnsupportedModel(f"{source}: tokenizer.ggml.pre {name[:80]!r} with a whitespace vocabulary")
    if model != "gpt2":
        return pre_tokenization(model, source)
    if not name:
        logger.warning("%s: tokenizer.ggml.pre is missing; taking 'default', which may not be the model's", source)
    return pre_tokenization(name or "default", source)


def _adds(gguf: GgufFile, model: str, pre: PreTokenization | None, special: Mapping[str, int]) -> tuple[bool, bool]:
    if model == "bert":  # regardless of the file, as in llama.cpp and BERT
        _require_ids(gguf, special, "bos", "seperator")
        return True, False
    add_bos = gguf.get(f"{_PREFIX}add_bos_token", bool, model == "llama" or (pre is not None and pre.add_bos))
    add_eos = gguf.get(f"{_PREFIX}add_eos_token", bool, model == "t5")
    add_bos = add_bos or (pre is not None and pre.forces_bos)
    if add_bos:
        _require_ids(gguf, special, "bos")
    if add_eos:
        _require_ids(gguf, special, "eos")
    return add_bos, add_eos


def _require_ids(gguf: GgufFile, special: Mapping[str, int], *names: str) -> None:
    for name in names:
        if name not in special:
            raise InvalidModelFile(
                f"{gguf.path}: tokenizer.ggml.{name}_token_id is missing, but the vocabulary adds that token to texts"
            )


def _check_byte_tokens(tokens: list[str], kinds: bytes, source: str) -> None:
    spellings = {f"<0x{byte:02X}>" for byte in range(256)}
    for i in np.flatnonzero(np.frombuffer(kinds, np.uint8) == TokenKind.BYTE):
        if tokens[i] not in spellings:
            raise InvalidModelFile(f"{source}: byte token {i} is spelled {tokens[i][:80]!r}, not <0x00> to <0xFF>")
