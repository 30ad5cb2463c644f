"""The parent's side of the vocabulary of an isolated model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from slm_core.argument_checks import IDS, check_text, checked_id, checked_list
from slm_core.isolation.control import Control
from slm_core.isolation.values import Garbled
from slm_core.types import InfillTokens

T = TypeVar("T")

_BLOCK = 1024
"""Tokens whose bytes are requested together."""


def vocab_of(value: dict[str, Any], control: Control) -> IsolatedVocab:
    """The vocabulary of the child, checked.

    Raises:
        Garbled: a value is invalid.
    """
    size, bos, eos, eog_ids, infill = (value[name] for name in ("size", "bos", "eos", "eog_ids", "infill"))
    if type(size) is not int or not 1 <= size < 2**31:
        raise Garbled("vocab.size")
    if not all(token is None or type(token) is int for token in (bos, eos)):
        raise Garbled("vocab.bos")
    return IsolatedVocab(control, size, bos, eos, frozenset(_ids(eog_ids, size)), _infill(infill, size))


class IsolatedVocab:
    """Text to token ids and back, in the process of the model. Threads may share it.

    Attributes:
        size: number of tokens V.
        bos: the token that begins a sequence, or None.
        eos: the token that ends a sequence, or None.
        eog_ids: every token that ends an answer.
        infill: the tokens for text with a gap, or None.
    """

    def __init__(
        self,
        control: Control,
        size: int,
        bos: int | None,
        eos: int | None,
        eog_ids: frozenset[int],
        infill: InfillTokens | None,
    ) -> None:
        self._control = control
        self.size, self.bos, self.eos, self.eog_ids, self.infill = size, bos, eos, eog_ids, infill
        self._blocks: dict[tuple[int, bool], list[bytes]] = {}

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text; see ``protocols.Vocab.encode``."""
        check_text("text", text)
        ids = self._control.ask("encode", text, bool(add_special), bool(parse_special))
        return self._checked(_ids, "encode", ids, self.size)

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        """The bytes of a token; see ``protocols.Vocab.token_bytes``."""
        block, i = divmod(checked_id(id, self.size), _BLOCK)
        key = block, bool(special)
        if key not in self._blocks:
            first = block * _BLOCK
            n = min(_BLOCK, self.size - first)
            value = self._control.ask("token_block", first, n, bool(special))
            self._blocks[key] = self._checked(_pieces, "token_bytes", value, n)
        return self._blocks[key][i]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; see ``protocols.Vocab.decode``."""
        checked = [checked_id(i, self.size) for i in checked_list("ids", ids, IDS)]
        return self._checked(_text, "decode", self._control.ask("decode_text", checked, bool(special)))

    def _checked(self, check: Callable[..., T], call: str, *values: Any) -> T:
        try:
            return check(*values)
        except Exception:
            raise self._control.garbled(call) from None


def _ids(value: Any, size: int) -> list[int]:
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != np.int32:
        raise Garbled("token ids")
    if len(value) and not (value.min() >= 0 and value.max() < size):
        raise Garbled("token ids")
    ids: list[int] = value.tolist()
    return ids


def _infill(value: Any, size: int) -> InfillTokens | None:
    if value is None:
        return None
    prefix, suffix, middle, *others = value
    tokens = (prefix, suffix, middle, *(token for token in others if token is not None))
    if len(others) != 2 or not all(type(token) is int and 0 <= token < size for token in tokens):
        raise Garbled("vocab.infill")
    return InfillTokens(prefix, suffix, middle, *others)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Garbled("a text")
    return value


def _pieces(value: Any, n: int) -> list[bytes]:
    lengths, data = value
    if lengths.shape != (n,) or lengths.dtype != np.int32 or lengths.min() < 0 or lengths.sum() != len(data):
        raise Garbled("pieces")
    ends = np.cumsum(lengths).tolist()
    return [bytes(data[end - length : end]) for length, end in zip(lengths.tolist(), ends, strict=True)]
