"""The reference tier: NumPy, float32, obvious. What every other tier is tested against."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile, ModelError
from slm_native.kernels.kernelset import FloatArray, KernelSet, RopeStyle, Weight
from slm_native.quant import check_tensor, dequantize, dequantize_rows
from slm_native.tensor import QuantizedTensor

DEFAULT_EXPANDED_BYTES = 2 << 30
_PANEL_WEIGHTS = 1 << 22  # 16 MiB of float32: enough for BLAS to be busy, little enough not to matter


@dataclass(slots=True, eq=False)
class ReferenceWeight(Weight):
    """A matrix and, where it is kept, its float32 form [out, in]."""

    expanded: FloatArray | None = None


class ReferenceKernels(KernelSet):
    """NumPy kernels.

    Weights are expanded to float32 when first multiplied. The first to come are kept, up to ``expanded_bytes`` in
    all; the others are expanded again, a panel of rows at a time, in every product. Nothing is evicted: layers are used
    in a circle, where a cache that drops the oldest would never hit.

    Args:
        expanded_bytes: how much memory expanded weights may take.
    """

    name = "reference"
    device = "cpu"

    def __init__(self, expanded_bytes: int = DEFAULT_EXPANDED_BYTES) -> None:
        self._expanded_bytes = expanded_bytes
        self._free_bytes = expanded_bytes
        self._lock = threading.Lock()

    def describe(self) -> str:
        """NumPy's version and the bound on memory."""
        return f"NumPy {np.__version__} in float32, at most {self._expanded_bytes >> 20} MiB of expanded weights"

    def prepare(self, tensor: QuantizedTensor) -> ReferenceWeight:
        """Check the matrix; it is expanded when first multiplied."""
        if len(tensor.shape) != 2:
            raise InvalidModelFile(f"tensor {tensor.name!r} has the shape {tensor.shape}, a matrix (out, in) is needed")
        _check(tensor)
        return ReferenceWeight(tensor)

    def vector(self, tensor: QuantizedTensor) -> FloatArray:
        """Expand the tensor."""
        _check(tensor)
        return dequantize(tensor.data, tensor.ggml_type, tensor.shape)

    def embed(self, weight: Weight, token_ids: NDArray[np.int32]) -> FloatArray:
        """Expand the rows asked for, each time anew."""
        return dequantize_rows(weight.tensor.data, weight.tensor.ggml_type, weight.n_in, token_ids)

    def matmul(self, x: FloatArray, weight: Weight, bias: FloatArray | None = None) -> FloatArray:
        """A BLAS product with the expanded weights."""
        assert isinstance(weight, ReferenceWeight), "a weight that another kernel set prepared"
        y = np.empty((len(x), weight.n_out), np.float32)
        expanded = self._expanded(weight)
        if expanded is None:
            _matmul_by_panels(x, weight, y)
        else:
            np.matmul(x, expanded.T, out=y)
        if bias is not None:
            y += bias
        return y

    def rms_norm(self, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        """Root mean square normalization (Zhang and Sennrich, arXiv:1910.07467)."""
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: FloatArray = x / np.sqrt(mean_square + np.float32(eps)) * weight
        return normed

    def rope(self, x: FloatArray, cos: FloatArray, sin: FloatArray, style: RopeStyle) -> FloatArray:
        """Rotary position embedding (Su et al., arXiv:2104.09864)."""
        half = cos.shape[-1]
        rotated = x.copy()
        first, second = rotated[..., :half], rotated[..., half : 2 * half]
        if style is RopeStyle.INTERLEAVED:
            first, second = rotated[..., 0 : 2 * half : 2], rotated[..., 1 : 2 * half : 2]
        cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, R/2]
        first[...], second[...] = first * cos - second * sin, second * cos + first * sin
        return rotated

    def silu_mul(self, gate: FloatArray, up: FloatArray) -> FloatArray:
        """SwiGLU (Shazeer, arXiv:2002.05202)."""
        with np.errstate(over="ignore"):  # exp overflows to inf where the quotient is rightly zero
            activated: FloatArray = gate / (1 + np.exp(-gate)) * up
        return activated

    def attention(self, q: FloatArray, k: FloatArray, v: FloatArray, scale: float) -> FloatArray:
        """All scores at once, [K, H/K, T, S], then a softmax with the row maximum taken off."""
        n_tokens, n_heads, width = q.shape
        n_held, n_kv_heads, _ = k.shape
        groups = q.reshape(n_tokens, n_kv_heads, -1, width).transpose(1, 2, 0, 3)  # [K, H/K, T, D]
        scores = groups @ k.transpose(1, 2, 0)[:, None] * np.float32(scale)  # [K, H/K, T, S]
        seen_by = np.arange(n_held - n_tokens, n_held)[:, None]  # position of each query
        scores[..., np.arange(n_held) > seen_by] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights @ v.transpose(1, 0, 2)[:, None]  # [K, H/K, T, D]
        return np.ascontiguousarray(mixed.transpose(2, 0, 1, 3)).reshape(n_tokens, n_heads, width)

    def _expanded(self, weight: ReferenceWeight) -> FloatArray | None:
        n_bytes = 4 * weight.n_out * weight.n_in
        with self._lock:
            if weight.expanded is None and n_bytes <= self._free_bytes:
                weight.expanded = dequantize(weight.tensor.data, weight.tensor.ggml_type, weight.tensor.shape)
                self._free_bytes -= n_bytes
        return weight.expanded


def _matmul_by_panels(x: FloatArray, weight: Weight, y: FloatArray) -> None:
    tensor = weight.tensor
    rows = tensor.data.reshape(weight.n_out, -1)
    step = max(1, _PANEL_WEIGHTS // weight.n_in)
    for start in range(0, weight.n_out, step):
        panel = rows[start : start + step]
        expanded = dequantize(panel.reshape(-1), tensor.ggml_type, (len(panel), weight.n_in))
        y[:, start : start + step] = x @ expanded.T


def _check(tensor: QuantizedTensor) -> None:
    try:
        check_tensor(tensor.data, tensor.ggml_type, tensor.shape)
    except ModelError as error:
        raise type(error)(f"tensor {tensor.name!r}: {error}") from None
