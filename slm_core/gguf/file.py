"""GGUF model files, opened without copying them.

The format is described in ggml's docs/gguf.md; this reader follows the description, and llama.cpp for open questions.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from slm_core.closing import Closing
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf.cursor import Cursor, FileData, HeldBytes, MappedFile, shown
from slm_core.gguf.metadata import MIN_PAIR_BYTES, Metadata
from slm_core.gguf.source_file import SourceFile
from slm_core.gguf.tensors import MIN_TENSOR_BYTES, TensorInfo, read_tensors
from slm_core.lfs import LONGEST, refuse_pointer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from slm_core.tensor_source import TensorSource

T = TypeVar("T")
D = TypeVar("D")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_SHARD_NAME = re.compile(r"(?P<model>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_SAMPLES = 8
_SAMPLE_BYTES = 4096


class _Shard(NamedTuple):
    file: FileData
    version: int
    metadata: Metadata
    tensors: list[TensorInfo]
    alignment: int
    header_bytes: int


class GgufFile(Closing):
    """A GGUF file, or its shards, mapped read-only; or a ``TensorSource``, presented as the file that it would be.

    Opening reads and checks only the header: every name, type, length and offset, so that later reads cannot fail.
    Threads can share the file.

    Attributes:
        path: the file; for a sharded model, the first shard.
        shard_paths: all files, in order; one for a model that is not sharded.
        version: the version of the format, 2 or 3.
        metadata: the key-value pairs (of the first shard), read lazily; see ``Metadata``.
        tensors: the location of each tensor of all shards, by name, in file order.
        alignment: the alignment of tensor data, in bytes.
        size_bytes: the size of all files, in bytes.
    """

    def __init__(self, shards: list[_Shard]) -> None:
        first = shards[0]
        self.path = first.file.path
        self.shard_paths = tuple(shard.file.path for shard in shards)
        self.version = first.version
        self.metadata = first.metadata
        self.alignment = first.alignment
        self.size_bytes = sum(shard.file.size for shard in shards)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_by_name(shards))
        self._shards = shards
        self._fingerprint: str | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str] | bytes | TensorSource) -> Self:
        """Open a file, or all shards of a model through any of them, or a source.

        Args:
            path: a ``.gguf`` file; vocabulary-only files have no tensors. Shards have llama.cpp's names,
                ``NAME-00001-of-00003.gguf``, in one folder. Bytes are the content of a file, not its name. A source
                stays the caller's: ``close`` does not close it.

        Raises:
            InvalidModelFile: the file cannot be read, is damaged, or a shard is missing; the message has the location.
                Or the source raised, or returned something that cannot be in a model file.
            UnsupportedModel: the file is valid, but its version, byte order or a type is unknown.
        """
        if isinstance(path, bytes):
            return cls([_read_whole(path)])
        if not isinstance(path, str | os.PathLike):
            return cls([_read_shard(SourceFile(path), 0)])
        with ExitStack() as opened:
            shard = _map_shard(Path(path), 0, opened)
            shards = [shard]
            if (n_shards := _n_shards(shard)) > 1:
                paths = _shard_paths(Path(path), n_shards)
                shards = [_map_shard(sibling, i, opened) for i, sibling in enumerate(paths)]
                _check_shards(shards)
                shard.file.close()
            file = cls(shards)
            opened.pop_all()
        return file

    def require(self, key: str, type_: type[T]) -> T:
        """The metadata value of ``key``, strictly typed; see ``Metadata.require``."""
        return self.metadata.require(key, type_)

    def get(self, key: str, type_: type[T], default: D) -> T | D:
        """The metadata value of ``key``, strictly typed, or ``default`` if there is none; see ``Metadata.typed``."""
        return self.metadata.typed(key, type_, default)

    def tensor_data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's packed blocks as stored, without a copy.

        Returns:
            uint8 ``[n_bytes]``, read-only. It shares the mapping, which stays in memory as long as the array exists,
            even after ``close()``; or the memory that a source returned.

        Raises:
            UnsupportedModel: there is no such tensor.
            InvalidModelFile: a source raised, or returned something else than the tensor's blocks.
            ModelClosed: after ``close()``.
        """
        if name not in self.tensors:
            raise UnsupportedModel(f"{self.path}: tensor {shown(name)} is missing")
        tensor = self.tensors[name]
        return self._shards[tensor.shard].file.view(tensor.offset, tensor.n_bytes)

    def fingerprint(self) -> str:
        """A digest of the content: 64 hexadecimal digits (blake2b-256), independent of path and date.

        It covers the whole header (metadata, and names, shapes, types and offsets of tensors) and eight evenly spread
        pieces of 4 KiB of each tensor, including the first and the last piece, or the whole tensor if it is smaller.
        Training changes every weight, and quantizing again changes every block, so the samples of different models
        differ, while a large file needs only a few thousand page reads. The fingerprint distinguishes models; it does
        not detect damage. A sharded copy has another fingerprint. A source states its own.

        Raises:
            InvalidModelFile: the source raised, or stated something else.
            ModelClosed: after ``close()``, unless the fingerprint is cached.
        """
        if self._fingerprint is None:
            self._fingerprint = self._shards[0].file.stated_fingerprint()
        if self._fingerprint is None:
            digest = blake2b(digest_size=32)
            for shard in self._shards:
                digest.update(shard.file.view(0, shard.header_bytes).data)
                with shard.file.scattered_reads():
                    for tensor in shard.tensors:
                        for start, n_bytes in _sample(tensor.n_bytes):
                            digest.update(shard.file.view(tensor.offset + start, n_bytes).data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def is_mapped(self) -> bool:
        """Whether ``tensor_data`` returns views of mapped files, whose pages are read when they are used."""
        return any(isinstance(shard.file, MappedFile) for shard in self._shards)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The content of the file, for an engine that can only read files; each shard is a file.

        Raises:
            InvalidModelFile: see ``tensor_data``.
        """
        for shard in self._shards:
            yield from shard.file.pieces()

    def close(self) -> None:
        """Release the mapping. A second call does nothing; later reads raise ``ModelClosed``."""
        for shard in self._shards:
            shard.file.close()

    def __repr__(self) -> str:
        return f"<GgufFile {str(self.path)!r}: {len(self.metadata)} metadata keys, {len(self.tensors)} tensors>"


def _read_whole(data: bytes) -> _Shard:
    file = HeldBytes(data)
    shard = _read_shard(file, 0)
    if (n_shards := _n_shards(shard)) > 1:
        raise UnsupportedModel(
            f"{file.path}: one of {n_shards} shards, which are read from files: give the path of one"
        )
    return shard


def _map_shard(path: Path, index: int, opened: ExitStack) -> _Shard:
    file = MappedFile(path)
    opened.callback(file.close)
    return _read_shard(file, index)


def _read_shard(file: FileData, index: int) -> _Shard:
    cursor = Cursor(file)
    version = _read_version(cursor)
    n_tensors = cursor.count("the number of tensors", MIN_TENSOR_BYTES)
    n_pairs = cursor.count("the number of metadata keys", MIN_PAIR_BYTES)
    metadata = Metadata(cursor, n_pairs, file)
    alignment = _alignment(metadata, cursor)
    tensors, header_bytes = read_tensors(cursor, n_tensors, alignment, index)
    return _Shard(file, version, metadata, tensors, alignment, header_bytes)


def _read_version(cursor: Cursor) -> int:
    refuse_pointer(cursor.path, bytes(cursor.data[:LONGEST]))
    magic = cursor.data[:4]
    if magic != _MAGIC[: len(magic)]:
        raise cursor.damaged(f"not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    cursor.skip(4, "the magic number")
    version = cursor.u32("the format version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in _VERSIONS and swapped in (*_VERSIONS, 1):
        raise UnsupportedModel(f"{cursor.path}: a big-endian file (accepted: little-endian); convert the model anew")
    if version not in _VERSIONS:
        raise UnsupportedModel(f"{cursor.path}: GGUF version {version} (accepted: 2, 3)")
    return version


def _alignment(metadata: Metadata, cursor: Cursor) -> int:
    key = _ALIGNMENT_KEY
    if key not in metadata:
        return _DEFAULT_ALIGNMENT
    if metadata.type_name(key) != "uint32":
        raise cursor.damaged(f"metadata {key!r} is {metadata.type_name(key)}, but uint32 is wanted")
    alignment = metadata.require(key, int)
    if alignment < 8 or alignment & (alignment - 1):
        raise cursor.damaged(f"metadata {key!r} is {alignment} (accepted: powers of two from 8)")
    return alignment


def _n_shards(shard: _Shard) -> int:
    n_shards = shard.metadata.typed("split.count", int, 0) or 1
    if n_shards < 1:
        raise InvalidModelFile(f"{shard.file.path}: metadata 'split.count' is {n_shards}")
    return n_shards


def _shard_paths(path: Path, n_shards: int) -> list[Path]:
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != n_shards:
        raise InvalidModelFile(
            f"{path}: one of {n_shards} shards (metadata 'split.count'), but not named"
            f" NAME-00001-of-{n_shards:05}.gguf, so the others cannot be found: give it the name it was made with"
        )
    paths = [path.with_name(f"{match['model']}-{i:05}-of-{n_shards:05}.gguf") for i in range(1, n_shards + 1)]
    absent = [sibling.name for sibling in paths if not sibling.exists()]
    if absent:
        raise InvalidModelFile(
            f"{path}: {len(absent)} of {n_shards} shards are missing in its folder, the first is {absent[0]}"
        )
    return paths


def _check_shards(shards: list[_Shard]) -> None:
    for i, shard in enumerate(shards):
        for key, expected in (("split.count", len(shards)), ("split.no", i)):
            value = shard.metadata.require(key, int)
            if value != expected:
                raise InvalidModelFile(
                    f"{shard.file.path}: metadata {key!r} is {value}, but by its name it is {expected}"
                )
        _check_shard_alignment(shard, shards[0].alignment)
    expected = shards[0].metadata.require("split.tensors.count", int)
    n_tensors = sum(len(shard.tensors) for shard in shards)
    if n_tensors != expected:
        path = shards[0].file.path
        raise InvalidModelFile(
            f"{path}: metadata 'split.tensors.count' is {expected}, but the shards hold {n_tensors} tensors"
        )


def _check_shard_alignment(shard: _Shard, alignment: int) -> None:
    """Refuse a shard whose start of data is ambiguous.

    Only the first shard states an alignment. llama.cpp's splitter uses the default alignment in the other shards, the
    writer of the gguf package uses the stated alignment.
    """
    stated = not shard.tensors or _ALIGNMENT_KEY in shard.metadata
    if not stated and -shard.header_bytes % alignment != -shard.header_bytes % shard.alignment:
        raise UnsupportedModel(
            f"{shard.file.path}: the start of the tensors is not certain: metadata {_ALIGNMENT_KEY!r} is {alignment} in"
            " the first shard and missing in this one: convert the model anew, to one file or without it"
        )


def _by_name(shards: list[_Shard]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in tensors:
                raise InvalidModelFile(f"{shard.file.path}: tensor {shown(tensor.name)} appears twice")
            tensors[tensor.name] = tensor
    return tensors


def _sample(n_bytes: int) -> list[tuple[int, int]]:
    """The samples of a tensor for ``fingerprint``: starts and lengths, in bytes."""
    if n_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, n_bytes)]
    last = n_bytes - _SAMPLE_BYTES
    return [(last * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]
