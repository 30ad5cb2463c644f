"""Dumps with a valid container and an invalid KV payload: a one-line error, never a crash."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import DecodeFailed, InvalidSnapshot
from slm_core.protocols import Context
from slm_core.types import KvType, Pos
from slm_llamacpp.payload import GGML_TYPES, check_payload
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.feeding import error, feed, new_context, some_tokens

N_TOKENS = 9
HEADER, CELL = 16, 12
DATA = HEADER + N_TOKENS * CELL + 8 + 12  # header, cells, layer count, type and row size of the first layer's keys


@pytest.fixture
def context(load: LoadModel, llama_file: Path) -> Context:
    context = new_context(load(llama_file))
    feed(context, some_tokens(N_TOKENS))
    return context


def forge(data: bytes, change: Callable[[bytearray], bytes]) -> bytes:
    """A dump with a changed payload and a matching checksum."""
    snapshot = SequenceSnapshot.from_bytes(data)
    fields = {name: getattr(snapshot, name) for name in ("backend", "payload_format", "fingerprint", "tokens", "edits")}
    return SequenceSnapshot(**fields, payload=bytes(change(bytearray(snapshot.payload)))).to_bytes()


def set_at(layout: str, offset: int, *values: float) -> Callable[[bytearray], bytearray]:
    def change(payload: bytearray) -> bytearray:
        struct.pack_into(layout, payload, offset, *values)
        return payload

    return change


def swap_position(payload: bytearray) -> bytearray:
    struct.pack_into("<i", payload, HEADER, 1)  # twice position 1, never 0
    return payload


HOSTILE = {
    "next to nothing": lambda payload: b"\0",
    "cut in the header": lambda payload: payload[:10],
    "cut in the cells": lambda payload: payload[: HEADER + CELL],
    "cut in the keys": lambda payload: payload[: DATA + 5],
    "cut by one byte": lambda payload: payload[:-1],
    "too long": lambda payload: payload + b"\0",
    "another magic number": set_at("<I", 0, 0),
    "two streams": set_at("<I", 8, 2),
    "no cells": set_at("<I", 12, 0),
    "one cell too many": set_at("<I", 12, N_TOKENS + 1),
    "four billion cells": set_at("<I", 12, 2**32 - 1),
    "a negative position": set_at("<i", HEADER, -1),
    "a far position": set_at("<i", HEADER, 2**31 - 1),
    "a position twice": swap_position,
    "no sequence": set_at("<I", HEADER + 4, 0),
    "four billion sequences": set_at("<I", HEADER + 4, 2**32 - 1),
    "transposed as no bool": set_at("<I", HEADER + N_TOKENS * CELL, 7),
    "values the other way": set_at("<I", HEADER + N_TOKENS * CELL, 0),
    "no layers": set_at("<I", HEADER + N_TOKENS * CELL + 4, 0),
    "a layer too many": set_at("<I", HEADER + N_TOKENS * CELL + 4, 4),
    "four billion layers": set_at("<I", HEADER + N_TOKENS * CELL + 4, 2**32 - 1),
    "another type": set_at("<i", DATA - 12, 1),
    "empty rows": set_at("<Q", DATA - 8, 0),
    "longer rows": set_at("<Q", DATA - 8, 512),
    "endless rows": set_at("<Q", DATA - 8, 2**64 - 1),
    "a key that is no number": set_at("<f", DATA, float("nan")),
    "an infinite key": set_at("<f", DATA + 4, float("inf")),
    "a key that overflows products": set_at("<f", DATA + 8, 3e38),
    "a value that is no number": set_at("<f", -4, float("nan")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_payload_is_refused(context: Context, name: str) -> None:
    data = forge(context.dump(0), HOSTILE[name])
    with pytest.raises(InvalidSnapshot) as caught:
        context.restore(1, data)
    assert "\n" not in str(caught.value)
    assert context.length(1) == 0
    with pytest.raises(InvalidSnapshot):
        context.restore(0, data)
    assert context.tokens(0) == tuple(some_tokens(N_TOKENS))
    again = new_context(context._model)
    feed(again, some_tokens(N_TOKENS))
    assert error(feed(context, [5]), feed(again, [5])) <= 1e-6
    assert feed(context, [5], 1).shape[0] == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_payload_does_not_reach_llamacpp(context: Context, name: str) -> None:
    payload = SequenceSnapshot.from_bytes(context.dump(0)).payload
    check_payload(payload, N_TOKENS, KvType.F32, KvType.F32)
    with pytest.raises(InvalidSnapshot):
        check_payload(bytes(HOSTILE[name](bytearray(payload))), N_TOKENS, KvType.F32, KvType.F32)


def test_each_cell_must_be_of_one_sequence(context: Context) -> None:
    payload = SequenceSnapshot.from_bytes(context.dump(0)).payload
    for cell in range(N_TOKENS):
        changed = bytes(set_at("<I", HEADER + cell * CELL + 4, 2)(bytearray(payload)))
        with pytest.raises(InvalidSnapshot, match="positions"):
            check_payload(changed, N_TOKENS, KvType.F32, KvType.F32)


def test_a_payload_that_ends_early_is_refused_wherever_it_ends(context: Context) -> None:
    payload = SequenceSnapshot.from_bytes(context.dump(0)).payload
    for end in (*range(DATA + 9), *range(DATA + 9, len(payload), 97), len(payload) - 1):
        with pytest.raises(InvalidSnapshot, match="ends early"):
            check_payload(payload[:end], N_TOKENS, KvType.F32, KvType.F32)


@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.F16])
def test_unchecked_nan_would_spread_to_another_sequence(
    load: LoadModel, llama_file: Path, kv_type: KvType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why payloads are checked: without the check, a NaN in one sequence makes the logits of another NaN."""
    context = new_context(load(llama_file), kv_type=kv_type)
    feed(context, some_tokens(N_TOKENS))
    feed(context, some_tokens(4, seed=1), 1)
    nan = np.full(2, np.nan, np.float32 if kv_type is KvType.F32 else np.float16).tobytes()
    payload = bytearray(SequenceSnapshot.from_bytes(context.dump(0)).payload)
    payload[DATA : DATA + len(nan)] = nan
    with pytest.raises(InvalidSnapshot, match="no model computes"):
        check_payload(bytes(payload), N_TOKENS, kv_type, kv_type)
    context._memory.remove(0, 0)
    assert context._memory.load(0, bytes(payload)), "llama.cpp loads the payload"
    monkeypatch.setattr(context, "_renew", lambda: None)  # it would decode all sequences again
    with pytest.raises(DecodeFailed, match="NaN"):
        feed(context, [7], 1)


@pytest.mark.parametrize("kv_type", GGML_TYPES)
def test_dumps_of_every_kv_type_can_be_restored(load: LoadModel, llama_file: Path, kv_type: KvType) -> None:
    context = new_context(load(llama_file), kv_type=kv_type)
    feed(context, some_tokens(N_TOKENS))
    context.restore(1, context.dump(0))
    # Other cells change the order of sums; with f16 values, their terms are rounded to f16.
    assert error(feed(context, [5], 1), feed(context, [5])) <= (1e-6 if kv_type is KvType.F32 else 2**-10)
    n_free = context.n_free
    context.truncate(Pos(1, 4))
    assert context.n_free == n_free + N_TOKENS + 1 - 4, "a restored sequence shares no cells"


def test_a_dump_has_pieces_of_a_limited_size(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = context.dump(0)
    payload = SequenceSnapshot.from_bytes(whole).payload
    monkeypatch.setattr("slm_llamacpp.context.PIECE_BYTES", 1000)
    pieces = list(context._engine_export(0).pieces)  # type: ignore[attr-defined]
    assert [len(piece) for piece in pieces[:-1]] == [1000] * (len(payload) // 1000)
    assert b"".join(pieces) == payload
    assert context.dump(0) == whole


def test_a_dump_of_another_kv_type_is_replayed(load: LoadModel, llama_file: Path) -> None:
    model = load(llama_file)
    exact, halved = (new_context(model, kv_type=kv_type) for kv_type in (KvType.F32, KvType.F16))
    feed(exact, some_tokens(N_TOKENS))
    halved.restore(0, exact.dump(0))
    assert error(feed(halved, [5]), feed(exact, [5])) <= 1e-2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, DATA + 200), value=st.integers(0, 255))
def test_any_changed_byte_leaves_a_working_context(context: Context, offset: int, value: int) -> None:
    data = forge(context.dump(0), set_at("<B", offset, value))
    try:
        context.restore(1, data)
    except InvalidSnapshot:
        assert context.length(1) == 0
    else:
        assert np.isfinite(feed(context, [5], 1)).all()
    context.drop(1)
    assert np.isfinite(feed(context, [5], 1)).all()
    context.drop(1)
