"""The quantizers of ggml and llama.cpp, from the libraries of llama-cpp-python."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from slm_llamacpp import library

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slm_core.gguf import GgmlType

Floats = ctypes.POINTER(ctypes.c_float)


@cache
def ggml() -> ctypes.CDLL:
    """libggml-base; skips the test if llama.cpp is not installed."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="ggml's quantizers are the oracle: pip install llama-cpp-python"
    )
    folder = Path(llama_cpp.__file__).parent / "lib"
    (path,) = [file for file in folder.iterdir() if file.name in ("libggml-base.so", "libggml-base.dylib")]
    library = ctypes.CDLL(str(path))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, Floats, ctypes.c_void_p, *[ctypes.c_int64] * 3, Floats]
    library.dequantize_row_q1_0.argtypes = [ctypes.c_void_p, Floats, ctypes.c_int64]
    return library


def ggml_quantize(
    weights: NDArray[np.float32], ggml_type: GgmlType, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """A matrix quantized by ggml: uint8 [n_bytes]."""
    packed = np.empty(weights.size // ggml_type.block_size * ggml_type.block_bytes, np.uint8)
    counts = None if importance is None else importance.ctypes.data_as(Floats)
    rows, cols = weights.shape
    source = np.ascontiguousarray(weights).ctypes.data_as(Floats)
    written = ggml().ggml_quantize_chunk(int(ggml_type), source, packed.ctypes.data, 0, rows, cols, counts)
    assert written == packed.size
    return packed


def llama_quantize(
    source: Path,
    target: Path,
    file_type: int,
    *,
    imatrix: dict[str, NDArray[np.float32]] | None = None,
    overrides: dict[str, GgmlType] | None = None,
    pure: bool = False,
) -> Path:
    """Quantize a model file with llama.cpp; returns ``target``."""
    ggml()
    from llama_cpp import llama_cpp

    library.load()  # redirects the log of llama.cpp from stderr to logging
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure, params.allow_requantize = file_type, 1, pure, True
    if imatrix is not None:
        entries = (llama_cpp.llama_model_imatrix_data * (len(imatrix) + 1))()
        for entry, (name, values) in zip(entries, imatrix.items(), strict=False):
            entry.name, entry.data, entry.size = name.encode(), values.ctypes.data_as(Floats), values.size
        params.imatrix = entries
    if overrides is not None:
        patterns = (llama_cpp.llama_model_tensor_override * (len(overrides) + 1))()
        for entry, (pattern, ggml_type) in zip(patterns, overrides.items(), strict=False):
            entry.pattern, entry.type = pattern.encode(), int(ggml_type)
        params.tt_overrides = patterns
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    assert not failed, f"llama.cpp cannot quantize {source}"
    return target
