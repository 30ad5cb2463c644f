"""The tensors of a file, as a graph is built from them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgufFile
from slm_core.quant import QuantizedTensor, dequantize


def read_tensor(gguf: GgufFile, name: str) -> QuantizedTensor:
    """A tensor of a file, as it lies there."""
    info = gguf.tensors[name]
    return QuantizedTensor(name, info.shape, info.ggml_type, gguf.tensor_data(name))


def read_values(gguf: GgufFile, name: str) -> NDArray[np.float32] | None:
    """A tensor's values, None where the file has none of that name."""
    if name not in gguf.tensors:
        return None
    tensor = read_tensor(gguf, name)
    return dequantize(tensor.data, tensor.ggml_type, tensor.shape)
