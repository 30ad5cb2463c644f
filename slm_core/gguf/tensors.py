"""The directory of tensors: names, shapes, types and offsets, all checked against the file."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slm_core.errors import UnsupportedModel
from slm_core.gguf.cursor import shown
from slm_core.gguf.ggml_types import REMOVED_TYPES, GgmlType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slm_core.gguf.cursor import Cursor

MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # of a directory entry: no name, one dimension
_MAX_NAME_BYTES = 65535
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_ELEMENTS = 2**63 - 1
_FOREIGN_42 = (128, 34)  # block size and bytes of the layouts that forks of llama.cpp store under id 42


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The location and format of a tensor.

    Attributes:
        name: its name, such as ``blk.0.attn_q.weight``.
        shape: in NumPy order, rows first: a linear layer's weight is ``(n_out, n_in)``.
        ggml_type: the number format.
        n_bytes: the size of the packed blocks, without padding.
        offset: the offset of the first block in its file, in bytes.
        shard: the number of its file in a sharded model, from 0.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GgmlType
    n_bytes: int
    offset: int
    shard: int

    @property
    def n_elements(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)


class _Entry(NamedTuple):
    """An entry of the directory; the offset is relative to the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def read_tensors(cursor: Cursor, n_tensors: int, alignment: int, shard: int) -> tuple[list[TensorInfo], int]:
    """Read the directory and check the location of every tensor.

    Args:
        cursor: a cursor at the first entry.
        n_tensors: the number of entries in the header.
        alignment: the alignment of the data and of every tensor, in bytes.
        shard: stored in each ``TensorInfo``.

    Returns:
        The tensors in directory order, and the end of the directory.

    Raises:
        InvalidModelFile: the directory is damaged, or a tensor is misaligned, overlaps another or exceeds the file.
        UnsupportedModel: a type is unknown.
    """
    # Tensors start at different multiples of the alignment, so each but the last takes at least one unit.
    min_bytes = n_tensors * (MIN_TENSOR_BYTES + alignment) - alignment
    if min_bytes > cursor.left:
        raise cursor.damaged(
            f"truncated: {n_tensors} tensors take {min_bytes} bytes at least, the file has {cursor.left} left"
        )
    entries = [_read_entry(cursor) for _ in range(n_tensors)]
    header_end = cursor.offset
    data_start = -(-header_end // alignment) * alignment
    tensors = []
    for entry in entries:
        if entry.offset % alignment:
            raise cursor.damaged(f"tensor {shown(entry.name)} is at {entry.offset}, not a multiple of {alignment}")
        ggml_type = _ggml_type(cursor, entry)
        n_bytes = _packed_bytes(cursor, entry, ggml_type.block_size, ggml_type.block_bytes)
        offset = data_start + entry.offset
        tensors.append(TensorInfo(entry.name, entry.shape, ggml_type, n_bytes, offset, shard))
    by_offset = sorted(tensors, key=lambda tensor: tensor.offset)
    _check_id_42(cursor, by_offset, alignment)
    _check_overlaps(cursor, by_offset)
    return tensors, header_end


def _read_entry(cursor: Cursor) -> _Entry:
    start = cursor.offset
    name = cursor.name("tensor name", _MAX_NAME_BYTES)
    what = f"tensor {shown(name)}"
    n_dims = cursor.u32(f"number of dimensions of {what}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.damaged(f"byte {start}: {what} has {n_dims} dimensions (accepted: 1 to {_MAX_DIMS})")
    dims = [cursor.u64(f"dimension {i} of {what}") for i in range(n_dims)]
    if not 0 < math.prod(dims) <= _MAX_ELEMENTS:
        raise cursor.damaged(f"byte {start}: {what} has the impossible dimensions {dims}")
    type_id = cursor.u32(f"type of {what}")
    return _Entry(name, tuple(reversed(dims)), type_id, cursor.u64(f"offset of {what}"))


def _ggml_type(cursor: Cursor, entry: _Entry) -> GgmlType:
    try:
        return GgmlType(entry.type_id)
    except ValueError:
        removed = REMOVED_TYPES.get(entry.type_id)
        hint = f"{removed}, which ggml has withdrawn: quantize the model anew" if removed else "unknown here"
        raise UnsupportedModel(
            f"{cursor.path}: tensor {shown(entry.name)} has the type id {entry.type_id} ({hint})"
        ) from None


def _packed_bytes(cursor: Cursor, entry: _Entry, block_size: int, block_bytes: int) -> int:
    if entry.shape[-1] % block_size:
        raise cursor.damaged(
            f"tensor {shown(entry.name)} has rows of {entry.shape[-1]}, not a whole number of blocks of {block_size}"
            f" ({GgmlType(entry.type_id).name})"
        )
    return math.prod(entry.shape) // block_size * block_bytes


def _check_overlaps(cursor: Cursor, by_offset: Sequence[TensorInfo]) -> None:
    for before, after in itertools.pairwise(by_offset):
        if before.offset + before.n_bytes > after.offset:
            raise cursor.damaged(
                f"tensors {shown(before.name)} (bytes {before.offset} to {before.offset + before.n_bytes}) and"
                f" {shown(after.name)} (from byte {after.offset}) overlap"
            )
    if by_offset and by_offset[-1].offset + by_offset[-1].n_bytes > cursor.size:
        last = by_offset[-1]
        raise cursor.damaged(
            f"truncated: tensor {shown(last.name)} is at bytes {last.offset} to {last.offset + last.n_bytes},"
            f" the file has {cursor.size}"
        )


def _check_id_42(cursor: Cursor, by_offset: Sequence[TensorInfo], alignment: int) -> None:
    """Refuse files whose id 42 is, or could be, a fork's layout, by the distance between tensors."""
    ends = [*(tensor.offset for tensor in by_offset), cursor.size][1:]
    placed = zip(by_offset, ends, strict=True)
    spaces = [(tensor, end - tensor.offset) for tensor, end in placed if tensor.ggml_type is GgmlType.Q2_0]
    block_size, block_bytes = _FOREIGN_42
    foreign = all(
        tensor.shape[-1] % block_size == 0 and 0 <= size - tensor.n_elements // block_size * block_bytes < alignment
        for tensor, size in spaces
    )
    if spaces and (foreign or any(size - tensor.n_bytes >= alignment for tensor, size in spaces)):
        tensor, size = max(spaces, key=lambda pair: pair[1])
        raise UnsupportedModel(
            f"{cursor.path}: tensor {shown(tensor.name)} has the type id 42 and {size} bytes for {tensor.n_elements}"
            f" weights, which is not certainly llama.cpp's Q2_0 ({tensor.n_bytes} bytes); forks store other layouts"
            " under this id: quantize the model anew"
        )
