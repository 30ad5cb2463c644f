"""Reads the tensors of a file for a graph."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgufFile
from slm_core.quant import QuantizedTensor, dequantize


def read_tensor(gguf: GgufFile, name: str) -> QuantizedTensor:
    """A tensor in the file's number format."""
    info = gguf.tensors[name]
    return QuantizedTensor(name, info.shape, info.ggml_type, gguf.tensor_data(name))


def read_values(gguf: GgufFile, name: str) -> NDArray[np.float32] | None:
    """The values of a tensor; None if the file does not have it."""
    if name not in gguf.tensors:
        return None
    tensor = read_tensor(gguf, name)
    return dequantize(tensor.data, tensor.ggml_type, tensor.shape)
