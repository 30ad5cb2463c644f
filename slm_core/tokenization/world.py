r"""RWKV World's vocabulary in directories: a text file with one token per line: its id, its bytes, their number.

``261 '\n\n' 2``: the bytes are a Python literal, which is parsed here, never evaluated. Token 0 ends a text and has no
line.

Other directories store the vocabulary as a ``tokenizer.json``: WordPiece over byte-level characters, without a prefix
and without words. Its greedy search for the longest piece is equivalent. Only the vocabulary is read from this file:
the library's search takes cubic time in a text's length, and it finds token 0 in texts that spell it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slm_core.errors import InvalidModelFile
from slm_core.gguf.cursor import shown
from slm_core.tokenization.kinds import TokenKind
from slm_core.tokenization.pieces import byte_level_bytes
from slm_core.tokenization.rwkv import LongestBytes
from slm_core.tokenization.spec import stated_spec
from slm_core.tokenization.special import SpecialTokens, token_text
from slm_core.tokenization.vocab import GgufVocab

_MAX_BYTES = 64 << 20
_MAX_SIZE = 1 << 20
_UNBOUNDED = 2**31 - 1  # characters of a word: no text is longer
_LINE = re.compile(r"""([0-9]{1,8})[ ](b?)(?:'((?:[^'\\]|\\.){0,4096})'|"((?:[^"\\]|\\.){0,4096})")[ ]([0-9]{1,5})""")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_END_OF_TEXT, _END_OF_TURN = "<s>", b"\n\n"  # default text of token 0, as in GGUF files


def world_vocab(
    path: Path,
    pieces: Mapping[int, bytes],
    settings: Mapping[str, Any],
    size: int | None,
    ends: Sequence[int],
    *,
    unnamed: int | None = 0,
) -> GgufVocab:
    """An RWKV World vocabulary. Token 0 and an empty line end an answer, as in GGUF files.

    Args:
        path: the file, for messages.
        pieces: the file's bytes by token id.
        settings: the content of ``tokenizer_config.json``: the text of token 0, and tokens that the file lacks.
        size: number of the model's logits; ids without a token are unused. None for the number of tokens.
        ends: additional ids that end an answer.
        unnamed: BOS and EOS if the settings have none: token 0 in GGUF files, None for the library's choice.

    Raises:
        InvalidModelFile: the file has more tokens than the model, or none for a byte.
    """
    ids = {piece: i for i, piece in pieces.items()}
    added = _read_added(path, settings, ids)
    n_tokens = max(pieces.keys() | added.keys()) + 1
    if n_tokens > (size or n_tokens):
        raise InvalidModelFile(f"{path}: {n_tokens} tokens, but the model has {size}")
    tokens = [f"[PAD{i}]" for i in range(size or n_tokens)]
    kinds = bytearray([TokenKind.UNUSED]) * len(tokens)
    for i, piece in pieces.items():
        tokens[i], kinds[i] = repr(piece)[2:-1], TokenKind.NORMAL
    for i, (text, kind) in added.items():
        tokens[i], kinds[i] = text, kind
    named = {text: i for i, (text, _) in added.items()}
    roles = {role: named.get(token_text(settings.get(f"{role}_token")), unnamed) for role in ("bos", "eos")}
    special = {role: token for role, token in roles.items() if token is not None}
    special |= {"eot": ids[_END_OF_TURN]} if _END_OF_TURN in ids else {}
    spec = stated_spec(str(path), "rwkv", tokens, bytes(kinds), special, add_bos=settings.get("add_bos_token") is True)
    vocab = GgufVocab(spec, LongestBytes(spec), SpecialTokens(spec, (frozenset(), frozenset())))
    vocab.eog_ids |= {0, *ends}
    return vocab


def is_world(stated: Mapping[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` is an RWKV World vocabulary without other processing of texts."""
    parts = [stated.get(part) or {} for part in ("model", "pre_tokenizer", "decoder")]
    if not all(isinstance(part, dict) for part in parts) or stated.get("normalizer") or stated.get("post_processor"):
        return False
    model, before, after = parts
    vocab, longest = model.get("vocab"), model.get("max_input_chars_per_word")
    return (
        (model.get("type"), model.get("continuing_subword_prefix")) == ("WordPiece", "")
        and (isinstance(longest, int) and longest >= _UNBOUNDED)
        and (isinstance(vocab, dict) and vocab.get(str(model.get("unk_token"))) == 0)
        and (before.get("type"), before.get("use_regex"), before.get("add_prefix_space")) == ("ByteLevel", False, False)
        and after.get("type") == "ByteLevel"
    )


def world_of_json(path: Path, stated: Mapping[str, Any]) -> tuple[dict[int, bytes], dict[str, Any]]:
    """Read an RWKV World ``tokenizer.json``: bytes by id, and added tokens.

    Raises:
        InvalidModelFile: the ids or the added tokens are damaged.
    """
    vocab, added = stated["model"]["vocab"], stated.get("added_tokens") or []
    if not all(type(i) is int and 0 <= i < _MAX_SIZE for i in vocab.values()) or len({*vocab.values()}) != len(vocab):
        raise InvalidModelFile(
            f"{path}: the ids of the tokenizer's model are not integers from 0, or not one per token"
        )
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise InvalidModelFile(f"{path}: 'added_tokens' is not a list of tokens")
    pieces = {i: piece for text, i in vocab.items() if (piece := byte_level_bytes(text))}
    return pieces, {str(token.get("id")): token for token in added}


def read_world(path: Path) -> dict[int, bytes]:
    """The tokens of the text file: bytes by id.

    Raises:
        InvalidModelFile: it is missing, too large or damaged.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidModelFile(f"{path}: larger than {_MAX_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModelFile(f"{path}: cannot be read: {str(error)[:200]}") from None
    pieces: dict[int, bytes] = {}
    pieces_seen: set[bytes] = set()
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        i, piece = _read_line(f"{path}, line {number}", line)
        if i in pieces or piece in pieces_seen:
            raise InvalidModelFile(f"{path}, line {number}: {shown(line)} has the id or the bytes of another")
        pieces[i] = piece
        pieces_seen.add(piece)
    if not pieces:
        raise InvalidModelFile(f"{path}: there are no tokens")
    return pieces


def _read_line(where: str, line: str) -> tuple[int, bytes]:
    match = _LINE.fullmatch(line)
    piece = b"" if match is None else _piece(match[3] or match[4] or "", is_text=not match[2])
    if match is None or not piece or len(piece) != int(match[5]) or not 0 < int(match[1]) < _MAX_SIZE:
        raise InvalidModelFile(
            f"{where}: {shown(line)} is not a token (accepted: an id, a literal of text or"
            f" bytes, the number of its bytes)"
        )
    return int(match[1]), piece


def _piece(literal: str, *, is_text: bool) -> bytes:
    """The bytes of a literal; b"" if it is not one."""

    def unescaped(escape: re.Match[str]) -> str:
        code = escape[1] or (escape[2] or escape[3] if is_text else None)
        return chr(int(code, 16)) if code else _NAMED[escape[4]]

    if not is_text and not literal.isascii():
        return b""
    try:
        return _ESCAPE.sub(unescaped, literal).encode("utf-8" if is_text else "latin-1")
    except (KeyError, OverflowError, ValueError):  # an unknown escape, or no character
        return b""


def _read_added(path: Path, settings: Mapping[str, Any], ids: Mapping[bytes, int]) -> dict[int, tuple[str, TokenKind]]:
    """Tokens that the settings add, including token 0: text and kind, by id.

    Settings may assign a second id to a text of the file (published ones do so for an empty line). The model was not
    trained with that id, so the text keeps the file's id.
    """
    decoder, used_ids = settings.get("added_tokens_decoder") or {}, set(ids.values())
    if not isinstance(decoder, dict):
        raise InvalidModelFile(f"{path.parent}: 'added_tokens_decoder' of its settings is not an object")
    bos = token_text(settings.get("bos_token"))
    is_another = not bos or _bytes(bos) in ids or bos in map(token_text, decoder.values())
    added = {0: (_END_OF_TEXT if is_another else bos, TokenKind.CONTROL)}
    for key, token in decoder.items():
        text = token_text(token)
        if not text or not isinstance(token, dict) or not re.fullmatch("[0-9]{1,6}", key):
            raise InvalidModelFile(f"{path.parent}: added token {shown(key)} of its settings is not a token")
        i, file_id = int(key), ids.get(_bytes(text))
        if file_id is None and i in used_ids:
            raise InvalidModelFile(f"{path.parent}: added token {key} of its settings has other bytes in {path.name}")
        if file_id in (None, i):
            added[i] = text, TokenKind.CONTROL if token.get("special") else TokenKind.USER_DEFINED
    return added


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
