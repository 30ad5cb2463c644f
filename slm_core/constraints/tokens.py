"""A vocabulary for llguidance: the bytes of every token, in a trie."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.constraints.freetext import FreeText
from slm_core.protocols import Vocab

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits: TypeAlias = NDArray[np.uint8]
"""A set of tokens as a bit mask, lowest bit of a byte first, uint8 [ceil(V / 8)]."""
_CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_CEILINGS = _CEILINGS.astype(np.float32)  # for the eight tokens of each byte, [256, 8]: a lookup without branches
_CONTROL = b"\xff"
"""llguidance's prefix of control tokens: a byte that never occurs in UTF-8."""
_MARKER = "\x02"
"""A prefix to encode text as the middle of a text: some vocabularies add a space before a text."""
_MAX_PROTOTYPES = 32
_tables: weakref.WeakKeyDictionary[Vocab, TokenTable] = weakref.WeakKeyDictionary()


def token_table(vocab: Vocab) -> TokenTable:
    """The table of a vocabulary; built once, in a third of a second for 150,000 tokens."""
    if vocab not in _tables:
        _tables[vocab] = TokenTable(vocab)
    return _tables[vocab]


class TokenTable:
    """Data that all constraints over one vocabulary share.

    Attributes:
        size: the number of tokens, V.
        eog: the EOG tokens, int64.
        control: the other control tokens, sorted.
        tokenizer: llguidance's tokenizer.
        prototypes: a cache of matchers in the initial state, by grammar, to copy.
    """

    def __init__(self, vocab: Vocab) -> None:
        from llguidance import LLTokenizer

        self.size = vocab.size
        self.eog = np.array(sorted(vocab.eog_ids), np.int64)
        # If the vocabulary has no EOG token, llguidance gets an artificial one.
        eos = self.eog.tolist() or [vocab.size]
        source = _Source(vocab, eos)
        self.control = [i for i in source.special_token_ids if i not in eos]
        self._tokens = _packed(np.arange(self.size), self.size)
        self._without_eog = self._tokens & ~_packed(self.eog, self.size)
        self.tokenizer: LLTokenizer = LLTokenizer(source, eos_token=eos)  # type: ignore[arg-type]  # it is duck-typed
        self.prototypes: OrderedDict[str, Prototype] = OrderedDict()

    def remember(self, grammar: str, prototype: Prototype) -> None:
        """Cache a prototype; the least recently used one is removed."""
        self.prototypes[grammar] = prototype
        if len(self.prototypes) > _MAX_PROTOTYPES:
            self.prototypes.popitem(last=False)

    def allowed(self, matcher: LLMatcher) -> Bits:
        """The tokens that may follow; the matcher may be in an error state afterwards."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: len(self._tokens)]
        return bits & (self._tokens if matcher.is_accepting() else self._without_eog)

    def only(self, token: int) -> Bits:
        """The set with only this token."""
        return _packed(np.array([token]), self.size)

    def unpacked(self, bits: Bits) -> NDArray[np.bool_]:
        """A flag for each token, bool [V]."""
        return np.unpackbits(bits, count=self.size, bitorder="little").view(np.bool_)

    def ceiling(self, bits: Bits) -> NDArray[np.float32]:
        """The upper bound of each logit: inf or -inf, float32 [V]."""
        return _CEILINGS.take(bits, axis=0).reshape(-1)[: self.size]


@dataclass(frozen=True, slots=True)
class Prototype:
    """The initial state of constraints of one grammar.

    Attributes:
        matcher: a matcher in the initial state, to copy.
        free: the state before the free text; None if the answer does not begin with free text.
        masks: a cache of masks by state of this free text.
    """

    matcher: LLMatcher
    free: FreeText | None
    masks: dict[FreeText, Bits] = field(default_factory=dict)


class _Source:
    """The interface by which llguidance reads a vocabulary."""

    is_tokenizer_wrapper = True

    def __init__(self, vocab: Vocab, eos: list[int]) -> None:
        self._vocab = weakref.ref(vocab)  # llguidance keeps this object: else the vocabulary would never be freed
        self.eos_token_id = eos[0]
        self.bos_token_id = vocab.bos
        self.tokens = [_token_bytes(vocab, i) for i in range(vocab.size)]
        if eos[0] == vocab.size:
            self.tokens.append(_CONTROL + b"<end>")
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if data.startswith(_CONTROL)]
        self._by_bytes = {data: i for i, data in enumerate(self.tokens) if data and not data.startswith(_CONTROL)}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell exactly this text, encoded like the middle of a text."""
        vocab = self._vocab()
        assert vocab is not None, "a constraint keeps its vocabulary"
        before = vocab.encode(_MARKER, add_special=False, parse_special=False)
        ids = vocab.encode(_MARKER + text, add_special=False, parse_special=False)
        within = ids[len(before) :]
        data = b"".join(map(vocab.token_bytes, within))
        return within if ids[: len(before)] == before and data == text.encode() else self._longest_first(text.encode())

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            lengths = range(min(self._longest, len(data)), 0, -1)
            n = next((n for n in lengths if data[:n] in self._by_bytes), 0)
            if not n:
                return ids  # llguidance forces only the returned tokens
            ids.append(self._by_bytes[data[:n]])
            data = data[n:]
        return ids


def _packed(tokens: NDArray[np.int64], size: int) -> Bits:
    flags = np.zeros(size, np.bool_)
    flags[tokens] = True
    return np.packbits(flags, bitorder="little")


def _token_bytes(vocab: Vocab, token: int) -> bytes:
    data = b"" if token in vocab.eog_ids else vocab.token_bytes(token)
    if data:
        return b"" if data.startswith(_CONTROL) else data
    name = vocab.token_bytes(token, special=True)
    return _CONTROL + name if name else b""
