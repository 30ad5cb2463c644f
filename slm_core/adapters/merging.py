"""Writes a model with the changes of adapters added to its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters.adapter import AdapterSet, AdapterUse, LowRank, stacked
from slm_core.adapters.base_model import BaseModel
from slm_core.adapters.loaded import check_scale
from slm_core.adapters.reading import read_adapter
from slm_core.atomic_write import check_new_file
from slm_core.errors import InvalidOption, ModelError
from slm_core.gguf import GgmlType, GgufFile, GgufWriter, NewTensor, stored_uint32
from slm_core.gguf.cursor import shown
from slm_core.gguf.file_types import FILE_TYPE, file_type, main_type
from slm_core.quant import dequantize, quantizable_types, quantize, row_bytes
from slm_core.user_paths import expanded

_ROWS = 1024
_ALIGNMENT = "general.alignment"


def merge(
    source: Path,
    adapters: Sequence[tuple[Path, float]],
    target: Path,
    *,
    ggml_type: str | None = None,
    force: bool = False,
    progress: Callable[[float], None] | None = None,
) -> int:
    """Write a copy of a GGUF file with the changes of adapters added to its weights; other weights are copied.

    Args:
        source: a GGUF file, or any shard of one.
        adapters: GGUF files or directories of PEFT, with their scales.
        target: the new file; it appears when it is complete.
        ggml_type: the number format of changed matrices ("F16"); None keeps the format of each. Rounding to few bits
            may lose small changes.
        force: replace an existing file.
        progress: called with the finished share; its exceptions end the work, and no file remains.

    Returns:
        The number of changed tensors.

    Raises:
        InvalidOption: an unknown format, a scale that is not a number from -1e6 to 1e6, a control vector, or the new
            file exists, is one that is read, or has no folder or no room.
        InvalidModelFile, UnsupportedModel: see ``read_adapter``; or changed weights are too large for their format.
    """
    kind = None if ggml_type is None else _type(ggml_type)
    target = expanded(target)
    for path, scale in adapters:
        check_scale(str(path), scale)
    with GgufFile.open(source) as file:
        base = BaseModel.of(file)
        uses: AdapterSet = tuple(AdapterUse(read_adapter(path, base), scale) for path, scale in adapters)
        _check_mergeable(uses)
        changes = stacked(uses)
        kinds = {name: _type(file.tensors[name].ggml_type.name) if kind is None else kind for name in changes}
        tensors = []
        for name, info in file.tensors.items():
            stored = kinds.get(name, info.ggml_type)
            n_bytes = row_bytes(stored, info.shape[-1]) * (info.n_elements // info.shape[-1])
            tensors.append(NewTensor(name, info.shape, stored, n_bytes))
        metadata = {key: file.metadata.stored(key) for key in file.metadata if not key.startswith("split.")}
        metadata |= _new_file_type(file, tensors)
        writer = GgufWriter(metadata, tensors, file.get(_ALIGNMENT, int, 32))
        total, done = sum(tensor.n_bytes for tensor in tensors), 0
        sources = [*file.shard_paths, *(path for path, _ in adapters)]
        check_new_file(target, sources, writer.size_bytes, force=force)
        with writer.open(target) as sink:
            for tensor in tensors:
                if tensor.name in changes:
                    for piece in _merged(file, tensor, changes[tensor.name]):
                        sink.write(piece)
                else:
                    sink.write(file.tensor_data(tensor.name))
                done += tensor.n_bytes
                if progress is not None:
                    progress(done / total)
    return len(changes)


def _new_file_type(file: GgufFile, tensors: Sequence[NewTensor]) -> dict[str, bytes]:
    """The file type, if most weights get another number format."""
    before = main_type((info.ggml_type, info.n_elements) for info in file.tensors.values())
    after = main_type((tensor.ggml_type, math.prod(tensor.shape)) for tensor in tensors)
    return {} if after is before else {FILE_TYPE: stored_uint32(file_type(after))}


def _check_mergeable(uses: AdapterSet) -> None:
    for adapter, _ in uses:
        if adapter.directions:
            raise InvalidOption(
                f"{adapter.info.path}: a control vector changes no weights, so it cannot be merged (use it with"
                " --control-vector, or adapters.load)"
            )


def _type(name: str) -> GgmlType:
    accepted = sorted(kind.name for kind in quantizable_types())
    if name.upper() not in accepted:
        raise InvalidOption(f"weights cannot be written as {name[:40]!r} (accepted: {', '.join(accepted)})")
    return GgmlType[name.upper()]


def _merged(file: GgufFile, tensor: NewTensor, change: LowRank) -> list[NDArray[np.uint8]]:
    """The packed rows of a changed tensor, some at a time."""
    info = file.tensors[tensor.name]
    n_cols = info.shape[-1]
    packed = file.tensor_data(tensor.name).reshape(-1, row_bytes(info.ggml_type, n_cols))
    a = change.a.reshape(-1, *change.a.shape[-2:])  # [X, r, in]
    b = change.b.reshape(-1, *change.b.shape[-2:])  # [X, out, r]
    n_out, pieces = b.shape[1], []
    for i in range(len(a)):
        for start in range(0, n_out, _ROWS):
            rows = packed[i * n_out + start : i * n_out + min(start + _ROWS, n_out)]
            values = dequantize(np.ascontiguousarray(rows).reshape(-1), info.ggml_type, (len(rows), n_cols))
            values = values + b[i, start : start + _ROWS] @ a[i] * np.float32(change.scale)
            try:
                pieces.append(quantize(np.ascontiguousarray(values, np.float32), tensor.ggml_type))
            except ModelError as error:
                raise type(error)(f"{file.path}: tensor {shown(tensor.name)}, merged: {error}") from None
    return pieces
