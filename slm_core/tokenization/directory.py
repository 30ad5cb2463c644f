"""Vocabularies of model directories: ``tokenizer.json``, read by the ``tokenizers`` library, and its settings.

The library's own encoder is the reference for such a directory. If spelled-out control tokens have to stay text, the
encoder runs without them. Supported are byte-pair models (byte-level and SentencePiece decoders), BERT's WordPiece, and
SentencePiece's unigram model.
``world`` reads RWKV World's vocabulary, which has another format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from slm_core.argument_checks import IDS, check_text, checked_id, checked_list
from slm_core.checkpoints import WORLD, vocabulary_of
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.foreign import reported
from slm_core.jsonfile import read_json
from slm_core.tokenization.encoding import encoding
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.known_tokens import apply_known_texts
from slm_core.tokenization.pieces import from_byte_level, from_metaspace, stored
from slm_core.tokenization.special import token_text
from slm_core.tokenization.vocab import GgufVocab, well_formed
from slm_core.tokenization.world import is_world, read_world, world_of_json, world_vocab

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
NO_TOKENIZER = (
    f"there is no {TOKENIZER}, and no {WORLD} of RWKV; make one:"
    " transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)
_OLD_ROLES, _OLD_ADDED = "special_tokens_map.json", "added_tokens.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_MODELS = ("BPE", "WordPiece", "Unigram")
_MAX_SIZE = 1 << 24
_MAX_CACHED_TOKENS = 65536
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def directory_vocab(folder: Path, size: int | None = None, ends: Sequence[int] = ()) -> DirectoryVocab | GgufVocab:
    """Read the vocabulary of a directory.

    Args:
        folder: contains ``tokenizer.json`` or RWKV World's vocabulary, and usually ``tokenizer_config.json``.
        size: number of the model's logits; ids that the tokenizer lacks have empty text. None for the tokenizer's size.
        ends: additional ids that end an answer.

    Raises:
        InvalidModelFile: a file is missing or damaged, or the tokenizer has more tokens than the model.
        UnsupportedModel: the kind of the tokenizer is unknown.
    """
    path = vocabulary_of(folder)
    if not path.is_file():
        raise InvalidModelFile(f"{folder}: {NO_TOKENIZER}")
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    data = {} if path.name == WORLD else read_json(path)
    vocab: DirectoryVocab | GgufVocab
    if path.name == WORLD:
        vocab = world_vocab(path, read_world(path), settings, size, ends)
    elif is_world(data):
        pieces, added = world_of_json(path, data)
        vocab = world_vocab(path, pieces, {"added_tokens_decoder": added} | settings, size, ends, unnamed=None)
    else:
        with reported(InvalidModelFile, f"{path}: not a tokenizer"):
            vocab = DirectoryVocab(path, data, _with_older(folder, settings), size, ends)
    if size is not None and not all(0 <= end < size for end in ends):
        raise InvalidModelFile(f"{folder}: a token that ends answers is outside the vocabulary of {size}")
    return vocab


def _with_older(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the roles and added tokens of a directory's older files, which transformers prefers."""
    if "added_tokens_decoder" in settings:
        return settings
    roles, added = (read_json(folder / name) if (folder / name).exists() else {} for name in (_OLD_ROLES, _OLD_ADDED))
    return {**settings, **roles, "added_tokens_decoder": {str(i): {"content": text} for text, i in added.items()}}


class DirectoryVocab:
    """Text to token ids and back, by a ``tokenizer.json``. Immutable; threads may share it.

    Args:
        source: the file, for messages.
        stated: its content.
        settings: the content of ``tokenizer_config.json``.
        size: see ``directory_vocab``.
        ends: see ``directory_vocab``.

    Attributes:
        size: number of tokens V.
        bos: the token that begins a sequence, or None; BERT's is CLS.
        eos: the token that ends a sequence, or None.
        eog_ids: every token that ends an answer.
        infill: the tokens for text with a gap, or None.
        stated: the content of the file.
        tokenizer: the tokenizer of the ``tokenizers`` library.
        tokens: the spellings of all tokens; "" for ids that the tokenizer lacks.
        stored_kinds: the kinds of all tokens in the file, V bytes.
        known_ends: the tokens that end an answer by their texts, or as the EOS token.
        around: the tokens that are added before and after a text.
        unknown: the token for text that the vocabulary cannot spell, or None.
        padding: the token that fills up batches, or None.
        is_wordpiece: whether it is BERT's WordPiece.
        is_unigram: whether it is SentencePiece's unigram model.
        is_byte_level: whether tokens are spelled in GPT-2's characters for bytes.
        adds_space: whether a text begins with a space that is not in it.
    """

    def __init__(
        self, source: Path, stated: dict[str, Any], settings: dict[str, Any], size: int | None, ends: Sequence[int]
    ) -> None:
        _check_model(source, stated)
        self.tokenizer = self._full_tokenizer = _tokenizer(source, stated)
        self.stated = stated = _with_missing(source, self._full_tokenizer, stated, settings, size)
        ids = dict(self._full_tokenizer.get_vocab(with_added_tokens=True))
        added = self._full_tokenizer.get_added_tokens_decoder()
        n_tokens = max(ids.values(), default=-1) + 1
        self.size = n_tokens if size is None else size
        if not 0 < n_tokens <= min(self.size, _MAX_SIZE):
            raise InvalidModelFile(f"{source}: {n_tokens} tokens, but the model has {self.size}")
        control = {token.content for token in added.values() if token.special}
        self._content = _content_tokenizer(source, self._full_tokenizer, stated, control)
        self._before, self._after = self.around = _around(self._full_tokenizer)
        self.tokens = self._tokens = [""] * self.size
        kinds = bytearray([TokenKind.UNUSED]) * self.size
        for text, i in ids.items():
            self._tokens[i], kinds[i] = text, TokenKind.NORMAL
        for i, token in added.items():
            kinds[i] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
        self.stored_kinds = bytes(kinds)
        roles = ("bos", "eos", "unk", "pad")
        self.bos, self.eos, unknown, self.padding = (
            ids.get(token_text(settings.get(f"{role}_token"))) for role in roles
        )
        if self.bos is None and self._before:
            self.bos = self._before[0]
        self.unknown = _unknown(stated["model"], ids, unknown)
        special = {"eos": self.eos} if self.eos is not None else {}
        corrected = apply_known_texts(ids, kinds, special)
        self.known_ends = corrected.eog_ids
        self.eog_ids = self.known_ends | frozenset(ends)
        self.infill = corrected.infill
        self._kinds, self._shown = corrected.kinds, corrected.shown_control
        self._normal, self._strips_space = _decoder(source, stated.get("decoder"))
        self.is_wordpiece, self.is_unigram = (_model_kind(stated["model"]) == each for each in ("WordPiece", "Unigram"))
        self.is_byte_level = self._normal is from_byte_level
        self.adds_space = self._strips_space and not self.is_wordpiece
        self._bytes_of = lru_cache(_MAX_CACHED_TOKENS)(self._render)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Turn text into token ids; see ``protocols.Vocab``."""
        check_text("text", text)
        text = well_formed(text)
        if parse_special:
            with_special: list[int] = encoding(self._full_tokenizer, text, add_special=add_special).ids
            return with_special
        ids = encoding(self._content, text).ids
        return [*self._before, *ids, *self._after] if add_special else ids

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        """Bytes of one token; b"" for a control token unless ``special``.

        Raises:
            InvalidToken: the id is not an integer, or is outside the vocabulary.
        """
        if type(id) is not int or not 0 <= id < self.size:
            id = checked_id(id, self.size)  # noqa: A001
        return self._bytes_of(id, special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a run of tokens, without the space that the vocabulary adds before a text.

        Raises:
            InvalidOption: not a list.
            InvalidToken: an id is not an integer, or is outside the vocabulary.
        """
        data = b"".join(self.token_bytes(i, special=special) for i in checked_list("ids", ids, IDS))
        if self._strips_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def _render(self, token: int, special: bool) -> bytes:
        kind, text = self._kinds[token], self._tokens[token]
        if kind == TokenKind.NORMAL:
            return self._normal(text)
        if kind == TokenKind.USER_DEFINED or (kind == TokenKind.CONTROL and (special or token in self._shown)):
            return stored(text)
        return b""


def _check_model(source: Path, stated: Mapping[str, Any]) -> None:
    model = stated.get("model")
    kind = _model_kind(model) if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in _MODELS:
        raise UnsupportedModel(f"{source}: tokenizer model {str(kind)[:80]!r} (accepted: {', '.join(_MODELS)})")
    if kind == "Unigram":
        _check_unigram(source, stated)
        return
    has_merges = isinstance(model.get("merges"), list) or kind == "WordPiece"
    if not (isinstance(model.get("vocab"), dict) and has_merges):
        raise InvalidModelFile(f"{source}: the tokenizer's model has no vocabulary or no merges")
    if kind == "WordPiece" and model.get("unk_token") not in model["vocab"]:
        raise InvalidModelFile(f"{source}: the tokenizer's 'unk_token' is not in its vocabulary")


def _check_unigram(source: Path, stated: Mapping[str, Any]) -> None:
    """Check the pieces, and that texts reach the model without spaces: ``_without_pieces`` relies on it."""
    vocab = stated["model"].get("vocab")
    if not (isinstance(vocab, list) and all(isinstance(entry, list) and len(entry) == 2 for entry in vocab)):
        raise InvalidModelFile(f"{source}: the vocabulary of the tokenizer's model is not a list of pieces and scores")
    if not all(isinstance(piece, str) for piece, _ in vocab):
        raise InvalidModelFile(f"{source}: a piece of the tokenizer's vocabulary is not a text")
    if not any(step.get("type") == "Metaspace" for step in steps_of(stated.get("pre_tokenizer"), "pretokenizers")):
        raise UnsupportedModel(f"{source}: a Unigram tokenizer without the pre-tokenizer Metaspace is not known here")


def _unknown(model: Mapping[str, Any], ids: Mapping[str, int], stated: int | None) -> int | None:
    """The token for text that the model cannot spell, or the unknown token in the settings."""
    if isinstance(model.get("unk_id"), int):
        unknown: int = model["unk_id"]
        return unknown
    text = model.get("unk_token")
    return ids.get(text, stated) if isinstance(text, str) else stated


def _model_kind(model: Mapping[str, Any]) -> object:
    """The type of a tokenizer's model; derived from its keys in old files, which do not name it."""
    if "type" in model:
        return model["type"]
    return "BPE" if "merges" in model else "WordPiece" if "continuing_subword_prefix" in model else None


def _tokenizer(source: Path, stated: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer

    with reported(InvalidModelFile, f"{source}: not a tokenizer"):
        tokenizer = Tokenizer.from_str(json.dumps(stated))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _with_missing(
    source: Path, tokenizer: Any, stated: dict[str, Any], settings: Mapping[str, Any], size: int | None
) -> dict[str, Any]:
    """Add the tokens that only the settings have, as transformers does, while the model has rows for them.

    Returns:
        The content of the tokenizer afterwards.

    Raises:
        InvalidModelFile: the settings state another id than the next one.
    """
    from tokenizers import AddedToken

    added = sorted(
        ((int(i), token) for i, token in (settings.get("added_tokens_decoder") or {}).items()), key=itemgetter(0)
    )
    named = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    special = [*map(settings.get, _ROLES), *(named.values() if isinstance(named, dict) else named)]
    ids = {token_text(token): i for i, token in added}
    tokens = {token_text(token): token for token in [*reversed(special), *(token for _, token in added)]}
    texts = [text for text in dict.fromkeys([*ids, *map(token_text, special)]) if text]
    missing = [text for text in texts if tokenizer.token_to_id(text) is None]
    missing = missing[: None if size is None else max(0, size - tokenizer.get_vocab_size())]
    for text in missing:
        token = tokens[text] if isinstance(tokens[text], dict) else {}
        is_special = text in map(token_text, special) or token.get("special", False)
        flags = {name: token[name] for name in _FLAGS if name in token}
        tokenizer.add_tokens([AddedToken(text, special=is_special, **flags)])
        if ids.get(text) not in (None, next_id := tokenizer.token_to_id(text)):
            raise InvalidModelFile(
                f"{source}: token {ids[text]} of {SETTINGS} is missing, and the next one is {next_id}"
            )
    return {**stated, "added_tokens": json.loads(tokenizer.to_str())["added_tokens"]} if missing else stated


def _content_tokenizer(source: Path, tokenizer: Any, stated: Mapping[str, Any], control: set[str]) -> Any:
    """The tokenizer for content, in which control tokens are plain text. Shares its model if possible."""
    from tokenizers import Tokenizer

    model = stated["model"]
    if _model_kind(model) == "Unigram":
        return _tokenizer(source, _without_pieces(stated, control))
    listed = bool(model.get("ignore_merges")) and not control.isdisjoint(model["vocab"])
    if listed or any(len(text) == 1 or text == model.get("unk_token") for text in control & model["vocab"].keys()):
        return _tokenizer(source, _without(stated, control))
    if any(not control.isdisjoint(_parts(merge)) for merge in model.get("merges", ())):
        return _tokenizer(source, _without(stated, control))
    shared = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(tokenizer, part) is not None:
            setattr(shared, part, getattr(tokenizer, part))
    added = tokenizer.get_added_tokens_decoder()
    shared.add_tokens([token for _, token in sorted(added.items())])
    shared.encode_special_tokens = True
    if any(shared.token_to_id(token.content) != i for i, token in added.items()):
        return _tokenizer(source, _without(stated, control))
    return shared


def _without(stated: Mapping[str, Any], control: set[str]) -> dict[str, Any]:
    """The tokenizer without its control tokens, neither as vocabulary entries nor as results of merges."""
    model = stated["model"]
    unknown = model.get("unk_token")
    vocab = {text: i for text, i in model["vocab"].items() if text not in control or text == unknown}
    merges = [merge for merge in model.get("merges", ()) if not control.intersection(_parts(merge))]
    added = [token for token in stated.get("added_tokens") or () if not token.get("special")]
    vocab |= {token["content"]: token["id"] for token in added}  # otherwise the library assigns new ids
    kept = {"merges": merges} if "merges" in model else {}
    return {**stated, "model": {**model, "vocab": vocab, **kept}, "added_tokens": added}


def _without_pieces(stated: Mapping[str, Any], control: set[str]) -> dict[str, Any]:
    """A unigram tokenizer in which the places of control tokens have pieces with spaces, which no text spells."""
    model = stated["model"]
    vocab = [
        [f" {i} " if piece in control or i == model.get("unk_id") else piece, score]
        for i, (piece, score) in enumerate(model["vocab"])
    ]
    added = [token for token in stated.get("added_tokens") or () if not token.get("special")]
    return {**stated, "model": {**model, "vocab": vocab}, "added_tokens": added, "post_processor": None}


def _parts(merge: str | Sequence[str]) -> tuple[str, str, str]:
    """Both parts of a merge and its result. The library has read the merge, so it is a pair."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer adds before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
    return ids[:at], ids[at + len(plain) :]


def _decoder(source: Path, stated: object) -> tuple[Callable[[str], bytes], bool]:
    """The function from an ordinary token to its bytes, and whether the tokenizer adds a space before a text."""
    steps = list(steps_of(stated))
    kinds = {str(step.get("type")) for step in steps}
    if kinds == {"WordPiece"}:
        prefix = str(steps[0].get("prefix", "##"))
        return lambda text: stored(text.removeprefix(prefix) if text.startswith(prefix) else f" {text}"), True
    if kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise UnsupportedModel(f"{source}: decoder {', '.join(sorted(kinds))[:80]} is not known here")
    if "ByteLevel" in kinds:
        return from_byte_level, False
    strips = any(
        (step["type"] == "Strip" and step.get("content") == " " and step.get("start"))
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    spelled = from_metaspace if kinds & {"Replace", "Metaspace"} else stored
    return (lambda text: _byte(text) or spelled(text)) if "ByteFallback" in kinds else spelled, strips


def steps_of(stated: object, within: str = "decoders") -> Iterator[dict[str, Any]]:
    """The steps of a decoder or pre-tokenizer; a sequence has its steps under the key ``within``."""
    if not isinstance(stated, dict):
        return
    if stated.get("type") == "Sequence":
        for step in stated.get(within) or ():
            yield from steps_of(step, within)
    else:
        yield stated


def _byte(text: str) -> bytes:
    """The byte of a byte token such as ``<0x0A>``; b"" for any other token."""
    return bytes([int(text[3:5], 16)]) if _BYTE.fullmatch(text) else b""
