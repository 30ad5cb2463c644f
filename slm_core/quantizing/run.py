"""Writes a planned file, on several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.atomic_write import check_new_file
from slm_core.cpu import usable_cores
from slm_core.errors import InvalidOption, ModelError
from slm_core.exporting import open_gguf
from slm_core.gguf.cursor import shown
from slm_core.quant import dequantize, quantize
from slm_core.quantizing.plan import Plan, PlannedTensor, plan_quantization
from slm_core.user_paths import expanded

Piece: TypeAlias = NDArray[np.uint8]
Progress: TypeAlias = Callable[[float], None]

_WEIGHTS_IN_PIECE = 1 << 18
_PIECES_AHEAD = 4
"""The largest number of pieces per thread that wait for writing."""


def quantize_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    type_name: str,
    *,
    overrides: Mapping[str, str] | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    pure: bool = False,
    force: bool = False,
    n_threads: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Write a copy of a model file with other number formats.

    Args:
        source: a GGUF file, any shard of one, or a directory of a Hugging Face model.
        target: the new file; it appears when it is complete.
        type_name: a recipe, such as ``Q4_K_M``; see ``RECIPES``.
        overrides: types by regular expressions, searched for in names of matrices; the first match counts.
        imatrix: an importance matrix.
        pure: give every matrix the recipe's main type.
        force: replace an existing file.
        n_threads: computing threads; by default one per usable core.
        progress: called with the finished share, 0 to 1; its exceptions end the work, and no file remains.

    Returns:
        The plan, with the type of each tensor; its file is closed.

    Raises:
        InvalidOption: an option is invalid; nothing was written.
        ModelError: the model or the importance matrix is damaged, or cannot be quantized.
        OSError: the new file cannot be written.
    """
    with open_gguf(source) as file:
        plan = plan_quantization(file, type_name, overrides=overrides, imatrix=imatrix, pure=pure)
        write_plan(plan, target, force=force, n_threads=n_threads, progress=progress)
    return plan


def write_plan(
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    n_threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a planned file; see ``quantize_model``."""
    if n_threads is not None and n_threads < 1:
        raise InvalidOption(f"n_threads is {n_threads} (accepted: 1 or more)")
    path, writer, workers = expanded(target), plan.writer(), n_threads or usable_cores()
    check_new_file(path, plan.file.shard_paths, writer.size_bytes, force=force)
    total = sum(tensor.source.n_elements for tensor in plan.tensors)
    done = 0
    pool = ThreadPoolExecutor(workers, thread_name_prefix="quantize")
    try:
        with writer.open(path) as sink:
            for n_weights, piece in _in_order(pool, _jobs(plan), workers * _PIECES_AHEAD):
                sink.write(piece)
                done += n_weights
                if progress is not None:
                    progress(done / total)
    finally:
        pool.shutdown(cancel_futures=True)


def _jobs(plan: Plan) -> Iterator[tuple[int, Callable[[], Piece]]]:
    """The pieces in file order: number of weights, and the function that computes their bytes."""
    for tensor in plan.tensors:
        data, ggml_type = plan.file.tensor_data(tensor.source.name), tensor.source.ggml_type
        n_cols = tensor.source.shape[-1]
        n_rows = tensor.source.n_elements // n_cols
        for start, shape in _pieces(n_rows, n_cols, n_rows if tensor.importance is None else tensor.source.shape[-2]):
            n_weights = shape[0] * shape[1]
            first, last = (at // ggml_type.block_size * ggml_type.block_bytes for at in (start, start + n_weights))
            yield (
                n_weights,
                partial(_convert, plan, tensor, data[first:last], shape, _importance(tensor, start, shape[1])),
            )


def _pieces(n_rows: int, n_cols: int, n_in_matrix: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """First weight and shape of each piece: rows of one matrix, or whole blocks of a long row."""
    row_step, col_step = max(1, _WEIGHTS_IN_PIECE // n_cols), min(n_cols, _WEIGHTS_IN_PIECE)
    for matrix in range(0, n_rows, n_in_matrix):
        for row in range(matrix, matrix + n_in_matrix, row_step):
            for col in range(0, n_cols, col_step):
                rows = min(row_step, matrix + n_in_matrix - row)
                yield row * n_cols + col, (rows, min(col_step, n_cols - col))


def _importance(tensor: PlannedTensor, start: int, n_cols: int) -> NDArray[np.float32] | None:
    """The importance of the ``n_cols`` columns from weight ``start``; each matrix has its own importance."""
    if tensor.importance is None:
        return None
    n_rows, width = tensor.source.shape[-2:]
    first = start // (n_rows * width) * width + start % width
    return tensor.importance[first : first + n_cols]


def _convert(
    plan: Plan, tensor: PlannedTensor, blocks: Piece, shape: tuple[int, int], importance: NDArray[np.float32] | None
) -> Piece:
    if tensor.is_kept:
        return blocks
    source = tensor.source
    try:
        return quantize(dequantize(blocks, source.ggml_type, shape), tensor.ggml_type, importance)
    except ModelError as error:
        raise type(error)(f"{plan.file.path}: tensor {shown(source.name)}: {error}") from None


def _in_order(
    pool: ThreadPoolExecutor, jobs: Iterator[tuple[int, Callable[[], Piece]]], n_ahead: int
) -> Iterator[tuple[int, Piece]]:
    """Results in the order of the jobs; ``n_ahead`` jobs run ahead."""
    running: deque[tuple[int, Future[Piece]]] = deque()
    for n_weights, job in jobs:
        running.append((n_weights, pool.submit(job)))
        if len(running) >= n_ahead:
            first, future = running.popleft()
            yield first, future.result()
    for n_weights, future in running:
        yield n_weights, future.result()
