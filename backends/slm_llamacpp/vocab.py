"""llama.cpp's vocabulary of a model, behind the contract's Vocab protocol."""

from __future__ import annotations

import ctypes
import functools
import threading
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from slm_core.argument_checks import IDS, check_text, checked_id, checked_list
from slm_core.errors import InvalidModelFile, VocabError
from slm_core.gguf import GgufFile
from slm_core.tokenization import composes
from slm_core.types import InfillTokens
from slm_llamacpp.handle import Handle

T = TypeVar("T")

_SPM, _BPE, _WORDPIECE, _RWKV = 1, 2, 3, 5  # llama_vocab_type
_CONTROL = 3  # of tokenizer.ggml.token_type
_FALCON_ID = 11
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
_MAX_TEXT_BYTES = 2**30

# Some pre-tokenizers use std::regex, which recurses for every character of a long word: about 400 bytes of stack each.
_SHORT_TEXT = 1024
_STACK_PER_BYTE = 640
_LEAST_STACK = 2**20
_stack_size_lock = threading.Lock()


class LlamaCppVocab:
    """Text to token ids and back, by llama.cpp. Immutable; threads may share it until its model is closed.

    A pair of surrogates counts as the character that it encodes; an unpaired surrogate becomes U+FFFD.

    Args:
        api: the low-level functions.
        model: the model of the vocabulary.
        gguf: the model's file, for metadata that llama.cpp does not provide; not needed afterwards.

    Raises:
        InvalidModelFile: the file asks for a token before or after texts, but does not define it.

    Attributes:
        size: number of tokens V.
        bos: begins a sequence; None if the file has none.
        eos: ends a sequence; None if the file has none.
    """

    def __init__(self, api: Any, model: Handle, gguf: GgufFile) -> None:
        self._api = api
        self._model = model
        with model.use() as pointer:
            self._vocab: int = api.llama_model_get_vocab(pointer)
        kind = api.llama_vocab_type(self._vocab)
        self.size: int = api.llama_vocab_n_tokens(self._vocab)
        # llama.cpp's default for BPE is Falcon's token 11, which may be any token here.
        unnamed = {name for name in ("bos", "eos") if f"tokenizer.ggml.{name}_token_id" not in gguf.metadata}
        self._assumed = unnamed if kind == _BPE else set()
        self.bos = self._named("bos", api.llama_vocab_bos(self._vocab))
        self.eos = self._named("eos", api.llama_vocab_eos(self._vocab))
        self._check_added(kind, str(gguf.path))
        adds_space = gguf.get("tokenizer.ggml.add_space_prefix", bool, kind == _SPM)
        self._strips_space = kind != _BPE and (adds_space or kind == _WORDPIECE)
        self._is_wordpiece = kind == _WORDPIECE
        self._composes = composes(gguf)  # llama.cpp does not apply Unicode normalization
        self._spelling = _Spelling(gguf) if kind == _SPM else None
        self._never_content = _control_texts(gguf) if kind == _RWKV else []

    @functools.cached_property
    def eog_ids(self) -> frozenset[int]:
        """All tokens that end an answer."""
        with self._model.use():
            ids = {i for i in range(self.size) if self._api.llama_vocab_is_eog(self._vocab, i)}
            if "eos" in self._assumed and not self._api.llama_vocab_is_control(self._vocab, _FALCON_ID):
                ids.discard(_FALCON_ID)
        return frozenset(ids)

    @functools.cached_property
    def infill(self) -> InfillTokens | None:
        """The tokens for text with a gap."""
        api = self._api
        with self._model.use():
            functions = ("fim_pre", "fim_suf", "fim_mid", "fim_sep", "fim_rep")
            tokens = [getattr(api, f"llama_vocab_{name}")(self._vocab) for name in functions]
        prefix, suffix, middle, file, repository = (None if token < 0 else token for token in tokens)
        if prefix is None or suffix is None or middle is None:
            return None
        return InfillTokens(prefix, suffix, middle, file, repository)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text; see ``protocols.Vocab.encode``.

        Raises:
            InvalidOption: not a text.
            VocabError: a text of more than 1 GiB, a character without tokens in this vocabulary, or content that
                llama.cpp would parse as a control token (RWKV's vocabulary).
        """
        check_text("text", text)
        text = _well_formed(text)
        if not parse_special and (spelled := next((token for token in self._never_content if token in text), None)):
            raise VocabError(f"llama.cpp takes {spelled!r} for a control token wherever it stands in this vocabulary")
        data = (unicodedata.normalize("NFC", text) if self._composes else text).encode()
        if self._spelling is not None:
            self._spelling.check(data.decode())
        if len(data) <= _SHORT_TEXT:
            return self._tokenize(data, add_special, parse_special)
        return _with_deep_stack(lambda: self._tokenize(data, add_special, parse_special), len(data))

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        """The bytes of one token; b"" for a control token, or its text if ``special``.

        Raises:
            InvalidToken: the id is not an integer, or is outside the vocabulary.
        """
        if type(id) is not int or not 0 <= id < self.size:
            id = checked_id(id, self.size)  # noqa: A001
        with self._model.use():
            size = 64
            while True:
                buffer = ctypes.create_string_buffer(size)
                n = self._api.llama_token_to_piece(self._vocab, id, buffer, size, 0, special)
                if n >= 0:
                    return buffer.raw[:n]
                size = -n

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD.

        If the vocabulary puts a space in front of texts, one leading space is removed.

        Raises:
            InvalidOption: not a list.
            InvalidToken: an id is not an integer, or is outside the vocabulary.
        """
        pieces = [self.token_bytes(i, special=special) for i in checked_list("ids", ids, IDS)]
        if self._is_wordpiece:
            pieces = [piece.lstrip(b" ") if piece in (b" .", b" ?", b" !", b" ,") else piece for piece in pieces]
        data = b"".join(pieces)
        if self._strips_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def _named(self, name: str, token: int) -> int | None:
        return None if token < 0 or name in self._assumed else token

    def _check_added(self, kind: int, source: str) -> None:
        """Raise if a special token is to be added that does not exist: llama.cpp would end the process."""
        api = self._api
        added = {
            "bos": (api.llama_vocab_get_add_bos(self._vocab), self.bos),
            "eos": (api.llama_vocab_get_add_eos(self._vocab), self.eos),
            "seperator": (kind == _WORDPIECE, self._named("sep", api.llama_vocab_sep(self._vocab))),
        }
        for name, (is_added, token) in added.items():
            if is_added and token is None:
                raise InvalidModelFile(
                    f"{source}: tokenizer.ggml.{name}_token_id is missing, but the vocabulary adds that token to texts"
                )

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        with self._model.use():
            capacity = len(data) + 16 if len(data) < 2**16 else len(data) // 2
            while True:
                ids = np.empty(capacity, np.int32)
                target = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
                n = self._api.llama_tokenize(self._vocab, data, len(data), target, capacity, add_special, parse_special)
                if n >= 0:
                    tokens: list[int] = ids[:n].tolist()
                    return tokens
                capacity = -n


def _control_texts(gguf: GgufFile) -> list[str]:
    tokens, kinds = gguf.require("tokenizer.ggml.tokens", list[str]), gguf.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return []
    stored = gguf.require("tokenizer.ggml.token_type", np.ndarray)
    return [tokens[i] for i in np.flatnonzero(stored[: len(tokens)] == _CONTROL) if tokens[i]]


class _Spelling:
    """Finds text that llama.cpp cannot encode: it ends the process if a byte token is missing."""

    def __init__(self, gguf: GgufFile) -> None:
        known = set(gguf.require("tokenizer.ggml.tokens", list[str]))
        self._missing = {b for b in range(256) if f"<0x{b:02X}>" not in known and (b >= 128 or chr(b) not in known)}
        self._characters = {text for text in known if len(text) == 1} if self._missing else set()

    def check(self, text: str) -> None:
        if not self._missing:
            return
        for character in sorted({*text.replace(" ", _SPACE), _SPACE} - self._characters):
            if not self._missing.isdisjoint(character.encode()):
                raise VocabError(
                    f"the vocabulary has no token for {character!r} and not all byte tokens to spell it with"
                )


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _with_deep_stack(work: Callable[[], T], n_bytes: int) -> T:
    """Run ``work``, which may recurse for each of ``n_bytes``, in a thread with a large enough stack."""
    if n_bytes > _MAX_TEXT_BYTES:
        raise VocabError(f"a text of {n_bytes} bytes is too long (accepted: {_MAX_TEXT_BYTES})")
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again when the result is read
            outcome.set_exception(error)

    stack = _LEAST_STACK + -(-n_bytes * _STACK_PER_BYTE // 4096) * 4096
    with _stack_size_lock:
        before = threading.stack_size(stack)
        try:
            threading.Thread(target=run, name="slm-llamacpp-encode", daemon=True).start()
        except RuntimeError as error:
            raise VocabError(
                f"a text of {n_bytes} bytes needs more memory than there is: encode it in parts"
            ) from error
        finally:
            threading.stack_size(before)
    return outcome.result()
