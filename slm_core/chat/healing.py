"""Token healing: the last tokens of a prompt are replaced if they split a likely longer token."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from slm_core.argument_checks import check_methods
from slm_core.chat.answers import SAMPLER_METHODS, SAMPLERS
from slm_core.chat.session import Session
from slm_core.protocols import Sampler, Vocab

_spellings: weakref.WeakKeyDictionary[Vocab, Spellings] = weakref.WeakKeyDictionary()


def heal(session: Session, sampler: Sampler | None = None) -> str:
    """Let the model spell the end of a prompt, and perhaps more.

    A prompt that ends inside a longer token ("http:" before "//") is unlike any training text. If the bytes of the last
    tokens are a prefix of a longer token, these tokens are removed, and tokens are chosen that begin with these bytes.
    A constraint of the answer begins after the returned text. Marks within the removed tokens become stale. Control
    tokens and the first token stay. The idea is from ``guidance`` (Lundberg, "The art of prompt design: prompt
    boundaries and token healing", 2023).

    Args:
        session: its last tokens are healed; if this raises, the session is unchanged.
        sampler: chooses the tokens; None for greedy choices.

    Returns:
        The generated text beyond the prompt; often "".

    Raises:
        InvalidOption: ``sampler`` is not a sampler.
        SamplingError: the sampler can choose no token.
    """
    if sampler is not None:
        check_methods("sampler", sampler, SAMPLER_METHODS, SAMPLERS)
    if session.vocab not in _spellings:
        _spellings[session.vocab] = Spellings(session.vocab)
    spellings = _spellings[session.vocab]
    n_kept, prefix = spellings.edge(session.tokens)
    if not prefix:
        return ""
    chosen: list[int] = []
    with session.scratch_branch() as twin:
        twin.truncate(n_kept)
        while prefix:
            row = twin.next_logits()
            assert row is not None  # it is never cancelled
            allowed = np.full_like(row, -np.inf)
            fitting = spellings.fitting(prefix)
            allowed[fitting] = row[fitting]
            token = int(allowed.argmax()) if sampler is None else sampler.sample(allowed)
            chosen.append(token)
            twin.append_tokens([token])
            data = session.vocab.token_bytes(token)
            beyond, prefix = data[len(prefix) :], prefix[len(data) :]
    session.truncate(n_kept)
    session.append_tokens(chosen)
    return beyond.decode()


class Spellings:
    """The tokens of a vocabulary by their bytes, without control tokens."""

    def __init__(self, vocab: Vocab) -> None:
        pieces = ((vocab.token_bytes(i), i) for i in range(vocab.size) if i not in vocab.eog_ids)
        ordered = sorted((data, i) for data, i in pieces if data)
        self._data = [data for data, _ in ordered]
        self._ids = [i for _, i in ordered]
        self._by_id = {i: data for data, i in ordered}
        self._longest = max(map(len, self._data), default=0)

    def edge(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        """The number of tokens to keep, and the bytes of the others, which are a prefix of a longer token."""
        data, edge = b"", (len(tokens), b"")
        for n_kept in range(len(tokens) - 1, 0, -1):
            piece = self._by_id.get(tokens[n_kept], b"")
            data = piece + data
            if not piece or len(data) >= self._longest:
                break
            if self._is_begun(data):
                edge = (n_kept, data)
        return edge

    def fitting(self, wanted: bytes) -> list[int]:
        """Tokens that begin with ``wanted`` and end with a whole character, and tokens that spell its beginning."""
        tokens = [self._ids[i] for i in self._beginning_with(wanted) if _is_text(self._data[i][len(wanted) :])]
        for n in range(1, len(wanted)):
            if self._can_say(wanted[n:]):
                tokens += [self._ids[i] for i in self._equal_to(wanted[:n])]
        return tokens

    def _is_begun(self, data: bytes) -> bool:
        at = bisect_right(self._data, data)
        return at < len(self._data) and self._data[at].startswith(data)

    def _beginning_with(self, data: bytes) -> range:
        first = bisect_left(self._data, data)
        last = bisect_left(self._data, True, lo=first, key=lambda other: not other.startswith(data))
        return range(first, last)

    def _equal_to(self, data: bytes) -> range:
        return range(bisect_left(self._data, data), bisect_right(self._data, data))

    def _can_say(self, data: bytes) -> bool:
        """Whether some sequence of tokens spells exactly these bytes."""
        reached = {0}
        for end in range(1, len(data) + 1):
            if any(start in reached and self._equal_to(data[start:end]) for start in range(end)):
                reached.add(end)
        return len(data) in reached


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
