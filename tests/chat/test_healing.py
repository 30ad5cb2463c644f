"""Token healing: the text stays, and the model chooses the tokens of its end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted import ScriptedContext
from slm_core.chat import Session
from slm_core.chat.healing import Spellings, heal
from slm_core.errors import DecodeFailed
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import EditLevel

PIECES = (b"a", b"b", b"c", b"ab", b"abc", b"bca", b"ca", b"cab", b"://", b":", b"/", b"\xc3", b"\xa9", b"c\xc3")


class PieceVocab:
    """Tokens of one and of several bytes, some of them incomplete characters; 20 is a control token, 21 is EOG."""

    size, bos, eos, eog_ids = 260, 20, 21, frozenset({21})

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [PIECES.index(letter.encode()) for letter in text]

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        if id in (20, 21):
            return b"<x>" if special else b""
        return PIECES[id] if id < len(PIECES) else b""

    def decode(self, ids: Any, *, special: bool = False) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


VOCAB = PieceVocab()


def session_of(tokens: list[int], **options: Any) -> Session:
    session = Session(ScriptedContext(**options), VOCAB)
    session.append_tokens(tokens)
    return session


def bytes_of(tokens: Any) -> bytes:
    return b"".join(map(VOCAB.token_bytes, tokens))


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.sampled_from([*range(11), 20]), min_size=1, max_size=8), seed=st.integers(0, 3))
def test_healing_keeps_the_text_and_removes_few_tokens(tokens, seed) -> None:
    session = session_of(tokens)
    beyond = heal(session, SamplerChain(Sampling(seed=seed, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0)))
    assert bytes_of(session.tokens) == bytes_of(tokens) + beyond.encode()
    assert [t for t in session.tokens if t == 20] == [t for t in tokens if t == 20]
    assert session.tokens[0] == tokens[0]
    longest = max(map(len, PIECES))
    n_same = next((i for i, (a, b) in enumerate(zip(tokens, session.tokens, strict=False)) if a != b), len(tokens))
    assert len(bytes_of(tokens[n_same:])) < longest


def test_each_token_is_the_likeliest_matching_token() -> None:
    prompt = [20, 0, 1]  # "a" "b": removed, as "abc" begins with both
    session, other = session_of(prompt), session_of([20])
    heal(session)
    remaining, tokens = b"ab", []
    while remaining:
        row = other.next_logits()
        fitting = [
            i
            for i in range(14)
            if VOCAB.token_bytes(i).startswith(remaining) or remaining.startswith(VOCAB.token_bytes(i))
        ]
        tokens.append(max(fitting, key=lambda i: row[i]))
        remaining = remaining[len(VOCAB.token_bytes(tokens[-1])) :]
        other.append_tokens(tokens[-1:])
    assert session.tokens == (20, *tokens)
    np.testing.assert_array_equal(session.next_logits(), other.next_logits())


@pytest.mark.parametrize(
    ("tokens", "stay"),
    [
        ([20, 2, 9], 2),  # "c" ":": only "://" begins with ":"
        ([20, 10], 2),  # nothing but "/" begins with "/"
        ([0], 1),  # the first token stays
        ([20, 1, 20], 3),  # a control token at the end
        ([20, 4], 2),  # "abc" begins no other token
        ([20, 2, 0], 1),  # "cab" begins with both
    ],
)
def test_healing_keeps_unambiguous_tokens(tokens, stay) -> None:
    session = session_of(tokens)
    truncated = []
    twin_truncate = Session.truncate

    def truncate(self: Session, length: int) -> None:
        truncated.append(length)
        twin_truncate(self, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "truncate", truncate)
        heal(session)
    assert min(truncated, default=len(tokens)) == min(stay, len(tokens))


def test_an_incomplete_character_is_not_generated() -> None:
    session = session_of([20, 2])  # b"c\xc3" begins with "c", but ends with an incomplete character
    for seed in range(20):
        assert heal(session_of([20, 2]), SamplerChain(Sampling(seed=seed, temperature=9.0, top_k=0))).isascii()
    assert session.tokens == (20, 2)


@pytest.mark.parametrize("level", list(EditLevel))
@pytest.mark.parametrize("shared", [True, False])
def test_a_failure_leaves_the_session_unchanged(level, shared) -> None:
    options = {} if shared else {"capabilities": frozenset()}
    session, whole = (session_of([20, 9, 0, 1], level=level, **options) for _ in range(2))
    before = session.next_logits().copy()
    mark, n = session.mark(), 0

    def fail() -> None:
        nonlocal n
        n += 1
        if n == 1:
            raise DecodeFailed("as the test wants it")

    session.context.on_decode = fail
    with pytest.raises(DecodeFailed):
        heal(session)
    assert session.tokens == (20, 9, 0, 1)
    np.testing.assert_array_equal(session.next_logits(), before)
    session.rollback(mark)
    assert heal(session) == heal(whole)
    assert session.tokens == whole.tokens


class _AnyVocab:
    """A vocabulary of any tokens, the first of them EOG."""

    eog_ids = frozenset({0})

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces, self.size = pieces, len(pieces)

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002  (the contract's name)
        return self._pieces[id]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=3).map(lambda data: bytes(97 + b % 2 for b in data)), max_size=7),
    wanted=st.lists(st.sampled_from(b"ab"), min_size=1, max_size=5).map(bytes),
)
def test_fitting_tokens_are_those_after_which_the_rest_can_be_spelled(pieces, wanted) -> None:
    def can_be_spelled(data: bytes) -> bool:
        return not data or any(data.startswith(p) and can_be_spelled(data[len(p) :]) for p in pieces[1:])

    def fits(piece: bytes) -> bool:
        return piece.startswith(wanted) or (wanted.startswith(piece) and can_be_spelled(wanted[len(piece) :]))

    fitting = Spellings(_AnyVocab(pieces)).fitting(wanted)  # type: ignore[arg-type]
    assert sorted(fitting) == [i for i, piece in enumerate(pieces) if i and fits(piece)]
