"""A small GGUF writer that, unlike the gguf package, can write invalid files, and checks of the errors."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from slm_core.errors import ModelError
from slm_core.gguf import GgufFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

U8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10
F32, I8, Q8_0, Q4_K, Q2_0 = 0, 24, 8, 12, 42


def string(text: bytes | str) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, n: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, n) + items


def tensor(name: bytes | str, dims: Sequence[int], kind: int, offset: int, n_dims: int | None = None) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, kind, offset)


def model(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def assert_is_one_line(error: Exception, path: Path) -> None:
    message = str(error)
    assert message.startswith(str(path)), f"the message does not name the file: {message!r}"
    assert message.isprintable(), f"not one line of text: {message!r}"
    assert len(message) - len(str(path)) < 500, f"a message of {len(message)} characters"


def refusal(path: Path, data: bytes | None = None) -> tuple[type[Exception], str]:
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    assert_is_one_line(caught.value, path)
    return caught.type, str(caught.value)
