"""Dumps: their layout byte by byte, and damaged and forged dumps."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slm_core.container import pack, unpack
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import InvalidSnapshot, SnapshotError, SnapshotMismatch


def container(header: bytes, *sections: bytes, version: int = 1, magic: bytes = b"SLMSNAP\0") -> bytes:
    """A container built by hand from the documented layout."""
    body = magic + struct.pack("<II", version, len(header)) + header + b"".join(sections)
    return body + hashlib.blake2b(body, digest_size=32).digest()


def snapshot(**changes) -> SequenceSnapshot:
    whole = SequenceSnapshot(
        backend="one",
        payload_format="rows-1",
        fingerprint="f" * 64,
        tokens=np.array([5, 6, 2**31 - 1], np.int32),
        edits=(Edit(1, (7, 8), 4), Edit(0, (9,), 3)),
        payload=b"\0\1\2",
    )
    return dataclasses.replace(whole, **changes)


def forged(meta: object, tokens: bytes = b"", removed: bytes = b"", payload: bytes = b"") -> bytes:
    lengths = [len(tokens), len(removed), len(payload)]
    return container(
        json.dumps({"kind": "sequence", "meta": meta, "sections": lengths}).encode(), tokens, removed, payload
    )


def meta(**changes) -> dict[str, object]:
    return {"backend": "a", "payload_format": "b", "fingerprint": "c", "edits": []} | changes


def test_the_layout_is_the_documented_one():
    header = json.dumps({"kind": "k", "meta": {"a": 1}, "sections": [2, 0, 3]}).encode()
    assert pack("k", {"a": 1}, (b"xy", b"", b"abc")) == container(header, b"xy", b"", b"abc")
    assert unpack("k", container(header, b"xy", b"", b"abc")) == ({"a": 1}, [b"xy", b"", b"abc"])


@pytest.mark.parametrize(("scale", "fits"), [(1e6, True), (-1e6, True), (1.0001e6, False)])
def test_scales_of_adapters_are_bounded(scale, fits):
    data = snapshot(adapters={"a" * 64: scale}).to_bytes()
    if fits:
        assert SequenceSnapshot.from_bytes(data).adapters == {"a" * 64: scale}
    else:
        with pytest.raises(InvalidSnapshot):
            SequenceSnapshot.from_bytes(data)


def test_a_container_may_be_any_buffer():
    data = pack("k", {}, (b"xy",))
    for buffer in (bytearray(data), memoryview(data)):
        assert unpack("k", buffer) == ({}, [b"xy"])


@given(st.lists(st.binary(max_size=40), max_size=5), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3))
def test_packed_sections_are_unpacked_unchanged(sections, values):
    assert unpack("some kind", pack("some kind", values, sections)) == (values, sections)


def test_a_sequence_is_unchanged_after_a_dump():
    restored = SequenceSnapshot.from_bytes(snapshot().to_bytes())
    np.testing.assert_array_equal(restored.tokens, snapshot().tokens)
    assert restored.tokens.dtype == np.int32
    nothing = {"tokens": None, "rows": None, "ahead": None, "offsets": None, "bias": None}
    assert dataclasses.replace(restored, **nothing) == snapshot(**nothing)


def test_every_truncation_is_refused():
    data = snapshot().to_bytes()
    for n in range(len(data)):
        with pytest.raises(InvalidSnapshot):
            SequenceSnapshot.from_bytes(data[:n])


def test_every_change_of_a_byte_is_refused():
    data = snapshot().to_bytes()
    for i in range(len(data)):
        for mask in (1, 0x80, 0xFF):
            changed = bytearray(data)
            changed[i] ^= mask
            with pytest.raises(InvalidSnapshot):
                SequenceSnapshot.from_bytes(bytes(changed))


def test_bytes_after_the_end_are_refused():
    with pytest.raises(InvalidSnapshot):
        SequenceSnapshot.from_bytes(snapshot().to_bytes() + b"\0")


@given(st.binary(max_size=300))
def test_random_bytes_do_not_crash(data):
    with pytest.raises(InvalidSnapshot):
        SequenceSnapshot.from_bytes(data)
    with pytest.raises(SnapshotError):
        SequenceSnapshot.from_bytes(container(data))


def test_another_kind_or_version_is_a_mismatch():
    with pytest.raises(SnapshotMismatch, match="'session', not of a 'sequence'"):
        SequenceSnapshot.from_bytes(pack("session", {}, ()))
    with pytest.raises(SnapshotMismatch, match="version 2"):
        unpack("k", container(b"{}", version=2))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"kind": "k", "meta": {}}',
        b'{"kind": "k", "meta": {}, "sections": [], "more": 1}',
        b'{"kind": "k", "meta": [], "sections": []}',
        b'{"kind": "k", "meta": {}, "sections": {}}',
        b'{"kind": "k", "meta": {}, "sections": [-1]}',
        b'{"kind": "k", "meta": {}, "sections": [true]}',
        b'{"kind": "k", "meta": {}, "sections": [1.0]}',
        b'{"kind": "k", "meta": {}, "sections": [9223372036854775807]}',
        b'{"kind": "k", "meta": {}, "sections": [' + b"1" + b"0" * 4000 + b"]}",
    ],
    ids=lambda header: header[:60].decode("latin-1"),
)
def test_wrong_headers_with_a_right_checksum_are_refused(header):
    with pytest.raises(InvalidSnapshot):
        unpack("k", container(header))


def test_sections_shorter_than_the_file_are_refused():
    with pytest.raises(InvalidSnapshot, match="do not add up"):
        unpack("k", container(b'{"kind": "k", "meta": {}, "sections": [1, 1]}', b"abc"))


def test_a_header_longer_than_the_file_is_refused():
    body = b"SLMSNAP\0" + struct.pack("<II", 1, 2**32 - 1) + b"{}"
    with pytest.raises(InvalidSnapshot):
        unpack("k", body + hashlib.blake2b(body, digest_size=32).digest())


TOKENS = struct.pack("<3i", 1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "removed"),
    [
        ({"backend": 1}, ()),
        ({"payload_format": None}, ()),
        ({"fingerprint": ["f"]}, ()),
        ({"extra": 1}, ()),
        ({"edits": {}}, ()),
        ({"edits": [1]}, ()),
        ({"edits": [[0, 1]]}, (9,)),
        ({"edits": [[0, 1, 2, 3]]}, (9,)),
        ({"edits": [[0, 1, "4"]]}, (9,)),
        ({"edits": [[0, True, 4]]}, (9,)),
        ({"edits": [[-1, 1, 4]]}, (9,)),
        ({"edits": [[0, 0, 3]]}, ()),  # removes nothing
        ({"edits": [[4, 1, 4]]}, (9,)),  # past the end
        ({"edits": [[0, 1, 4]]}, ()),  # the removed token is missing
        ({"edits": [[0, 1, 4]]}, (9, 9)),  # one removed token too many
        ({"edits": [[0, 1, 5]]}, (9,)),  # leaves more tokens than there are
        ({"edits": [[0, 1, 3], [0, 1, 1]]}, (9, 9)),  # a sequence does not shrink between two cuts
        ({"edits": [[0, 1, 10**30]]}, (9,)),
    ],
    ids=str,
)
def test_impossible_histories_are_refused(changes, removed):
    with pytest.raises(InvalidSnapshot):
        SequenceSnapshot.from_bytes(forged(meta(**changes), TOKENS, struct.pack(f"<{len(removed)}i", *removed)))


def test_a_possible_history_is_accepted():
    restored = SequenceSnapshot.from_bytes(
        forged(meta(edits=[[0, 1, 4], [1, 2, 5]]), TOKENS, struct.pack("<3i", 7, 8, 9))
    )
    assert restored.edits == (Edit(0, (7,), 4), Edit(1, (8, 9), 5))


def test_incomplete_tokens_are_refused():
    with pytest.raises(InvalidSnapshot):
        SequenceSnapshot.from_bytes(forged(meta(), TOKENS[:-1]))
    with pytest.raises(InvalidSnapshot):
        SequenceSnapshot.from_bytes(forged(meta(edits=[[0, 1, 4]]), TOKENS, b"\0\0\0"))
