"""The reference tier: NumPy, float32, written to be obviously correct. The other tiers are tested against it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import Activation, AnyActivation, RopeStyle, Xielu
from slm_core.errors import InvalidModelFile, ModelError
from slm_core.quant import QuantizedTensor, check_tensor, dequantize, dequantize_rows
from slm_native.kernels.device import FloatArray
from slm_native.kernels.kernelset import KernelSet
from slm_native.kernels.parameters import PLAIN, BlockRange, Scoring, Weight, WeightBytes

DEFAULT_EXPANDED_BYTES = 2 << 30
_SCORES_AT_A_TIME = 1 << 22  # 16 MiB of float32, however long the text
_PANEL_WEIGHTS = 1 << 22  # 16 MiB of float32: large enough for an efficient BLAS product


@dataclass(slots=True, eq=False)
class ReferenceWeight(Weight):
    """A matrix, and its float32 copy [out, in] if it is kept."""

    expanded: FloatArray | None = None


class ReferenceKernels(KernelSet):
    """NumPy kernels.

    Weights are dequantized to float32 when first multiplied. The first ones are kept, up to ``expanded_bytes`` in all;
    the others are dequantized again in every product, a panel of rows at a time. Nothing is evicted: layers are used
    cyclically, so an LRU cache would never hit.

    Args:
        expanded_bytes: memory for dequantized weights, in bytes.
    """

    name = "reference"
    device = "cpu"
    reads_file = True
    takes_bias = True

    def __init__(self, expanded_bytes: int = DEFAULT_EXPANDED_BYTES) -> None:
        self._expanded_bytes = expanded_bytes
        self._free_bytes = expanded_bytes
        self._lock = threading.Lock()

    def describe(self) -> str:
        """NumPy's version and the memory limit."""
        return f"NumPy {np.__version__} in float32, at most {self._expanded_bytes >> 20} MiB of expanded weights"

    def from_host(self, values: NDArray[Any]) -> NDArray[Any]:
        """Already on the host."""
        return values

    def to_host(self, x: FloatArray) -> FloatArray:
        """Already on the host."""
        return x

    def rows(self, x: FloatArray, which: slice | NDArray[Any]) -> FloatArray:
        """NumPy's indexing."""
        return x[which]

    def reserve(self, sizes: WeightBytes) -> None:
        """Nothing to reserve: weights stay in the mapped file."""

    def ready(self) -> None:
        """Loading leaves nothing to free."""

    def settle(self) -> None:
        """Nothing to wait for: steps are synchronous."""

    def prepare(self, tensor: QuantizedTensor) -> ReferenceWeight:
        """Check the matrix; it is dequantized when first multiplied."""
        if len(tensor.shape) != 2:
            raise InvalidModelFile(f"tensor {tensor.name!r} has the shape {tensor.shape}, a matrix (out, in) is needed")
        _check(tensor)
        return ReferenceWeight(tensor)

    def vector(self, tensor: QuantizedTensor) -> FloatArray:
        """Dequantize the tensor."""
        _check(tensor)
        return dequantize(tensor.data, tensor.ggml_type, tensor.shape)

    def embed(self, weight: Weight, token_ids: NDArray[np.int32]) -> FloatArray:
        """Dequantize the requested rows, every time."""
        return dequantize_rows(weight.tensor.data, weight.tensor.ggml_type, weight.n_in, token_ids)

    def matmul(self, x: FloatArray, weight: Weight, bias: FloatArray | None = None) -> FloatArray:
        """A BLAS product with the dequantized weights."""
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

    def layer_norm(self, x: FloatArray, weight: FloatArray, bias: FloatArray | None, eps: float) -> FloatArray:
        """Layer normalization (Ba et al., arXiv:1607.06450)."""
        centred = x - np.mean(x, axis=-1, keepdims=True)
        variance = np.mean(np.square(centred), axis=-1, keepdims=True)
        normed: FloatArray = centred / np.sqrt(variance + np.float32(eps)) * weight
        return normed if bias is None else normed + bias

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
        return self.activate(gate, Activation.SILU) * up

    def activate(self, x: FloatArray, activation: AnyActivation) -> FloatArray:
        """The activations by their formulas."""
        if isinstance(activation, Xielu):
            return _xielu(x, activation)
        return _ACTIVATIONS[activation](x)

    def gated(self, gate: FloatArray, up: FloatArray, activation: AnyActivation) -> FloatArray:
        """An elementwise product; gpt-oss clamps both factors."""
        if activation is Activation.SWIGLU_CLAMPED:
            gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7)) + 1
            return gate * self.sigmoid(np.float32(1.702) * gate) * up
        if activation is Activation.SILU:
            return self.silu_mul(gate, up)
        return self.activate(gate, activation) * up

    def sigmoid(self, x: FloatArray) -> FloatArray:
        """The formula as it stands."""
        return _sigmoid(x)

    def softcap(self, x: FloatArray, cap: float) -> FloatArray:
        """The formula as it stands."""
        capped: FloatArray = np.tanh(x / np.float32(cap)) * np.float32(cap)
        return capped

    def above_threshold(self, x: FloatArray, n_deviations: float) -> FloatArray:
        """The formula as it stands."""
        cutoff = x.mean(axis=1, keepdims=True) + x.std(axis=1, keepdims=True) * np.float32(n_deviations)
        above: FloatArray = np.maximum(x - cutoff, np.float32(0))
        return above

    def as_large(self, x: FloatArray, like: FloatArray) -> FloatArray:
        """The formula as it stands."""
        magnitude = np.sqrt(np.square(like).mean(axis=1, keepdims=True))
        scaled: FloatArray = (
            x * magnitude / np.sqrt(np.maximum(np.square(x).mean(axis=1, keepdims=True), np.float32(1e-5)))
        )
        return scaled

    def clip(self, x: FloatArray, limit: float) -> FloatArray:
        """NumPy's."""
        return np.clip(x, np.float32(-limit), np.float32(limit))

    def concatenated(self, parts: Sequence[FloatArray], axis: int = 0) -> FloatArray:
        """NumPy's."""
        return np.concatenate(parts, axis)

    def attention(
        self,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        scale: float,
        scoring: Scoring = PLAIN,
        block: BlockRange | None = None,
    ) -> FloatArray:
        """All scores at once, [K, H/K, T, S], then a softmax that subtracts the row maximum."""
        position = len(k) - len(q) if block is None else block.position
        distance = np.arange(position, position + len(q))[:, None] - np.arange(len(k))  # from each query to each key
        is_masked = distance < 0 if scoring.window is None else (distance < 0) | (distance >= scoring.window)
        if block is not None:
            is_masked[:, block.first :] = False
        return self._attend(q, k, v, scale, scoring, distance, is_masked)

    def bidirectional_attention(
        self, q: FloatArray, k: FloatArray, v: FloatArray, scale: float, scoring: Scoring = PLAIN
    ) -> FloatArray:
        """Like ``attention``, for a bounded number of queries at a time."""
        n_tokens, n_heads, _ = q.shape
        step, mixed = max(1, _SCORES_AT_A_TIME // (n_heads * n_tokens)), np.empty_like(q)
        for start in range(0, n_tokens, step):
            part = slice(start, min(start + step, n_tokens))
            distance = np.arange(n_tokens)[part, None] - np.arange(n_tokens)
            far = np.zeros_like(distance, bool) if scoring.window is None else abs(distance) > scoring.window // 2
            mixed[part] = self._attend(q[part], k, v, scale, scoring, distance, far)
        return mixed

    def _attend(
        self,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        scale: float,
        scoring: Scoring,
        distance: NDArray[np.intp],
        is_masked: NDArray[np.bool_],
    ) -> FloatArray:
        n_tokens, n_heads, width = q.shape
        n_kv_heads = k.shape[1]
        groups = q.reshape(n_tokens, n_kv_heads, -1, width).transpose(1, 2, 0, 3)  # [K, H/K, T, D]
        scores = groups @ k.transpose(1, 2, 0)[:, None] * np.float32(scale)  # [K, H/K, T, S]
        if scoring.softcap is not None:
            scores = self.softcap(scores, scoring.softcap)
        if scoring.slopes is not None:
            scores -= scoring.slopes.reshape(n_kv_heads, -1, 1, 1) * distance.astype(np.float32)
        if scoring.bias is not None:
            biased = slice(len(scoring.bias))
            scores[..., biased] += np.where(distance[:, biased] == 0, np.float32(0), scoring.bias)
        scores[..., is_masked] = -np.inf
        outputs = _softmax(scores, scoring.sinks) @ v.transpose(1, 0, 2)[:, None]  # [K, H/K, T, D]
        return np.ascontiguousarray(outputs.transpose(2, 0, 1, 3)).reshape(n_tokens, n_heads, width)

    def selective_scan(
        self, x: FloatArray, steps: FloatArray, a: FloatArray, b: FloatArray, c: FloatArray, state: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """A loop over tokens, all channels at once."""
        n_seqs, n_tokens, n_heads, width = x.shape
        n_groups, n_state = b.shape[2:]
        grouped = (n_groups, n_heads // n_groups)
        steps = np.logaddexp(np.float32(0), steps).reshape(n_seqs, n_tokens, *grouped, 1, 1)
        driven = steps * x.reshape(n_seqs, n_tokens, *grouped, width, 1)
        decay, states = a.reshape(*grouped, 1, -1), state.reshape(n_seqs, *grouped, width, n_state)
        y = np.empty((n_seqs, n_tokens, *grouped, width), np.float32)
        b, c = b[:, :, :, None, None], c[:, :, :, None, None]  # [B, T, G, 1, 1, N]
        for t in range(n_tokens):
            states = np.exp(steps[:, t] * decay) * states + driven[:, t] * b[:, t]
            np.sum(states * c[:, t], axis=-1, out=y[:, t])
        return y.reshape(x.shape), states.reshape(state.shape)

    def delta_scan(
        self,
        r: FloatArray,
        log_decay: FloatArray,
        k: FloatArray,
        v: FloatArray,
        a: FloatArray,
        b: FloatArray,
        state: FloatArray,
    ) -> tuple[FloatArray, FloatArray]:
        """A loop over tokens, all heads at once."""
        decay, y = np.exp(log_decay), np.empty_like(v)
        r, decay, k, a, b = (rows[..., None, :] for rows in (r, decay, k, a, b))  # [B, T, H, 1, P]
        for t in range(v.shape[1]):
            removed = np.sum(state * a[:, t], axis=-1, keepdims=True)
            state = state * decay[:, t] + removed * b[:, t] + v[:, t, :, :, None] * k[:, t]
            np.sum(state * r[:, t], axis=-1, out=y[:, t])
        return y, state

    def inner(self, x: FloatArray, y: FloatArray) -> FloatArray:
        """NumPy's."""
        total: FloatArray = np.sum(x * y, axis=-1, keepdims=True)
        return total

    def _expanded(self, weight: ReferenceWeight) -> FloatArray | None:
        n_bytes = 4 * weight.n_out * weight.n_in
        with self._lock:
            if weight.expanded is None and n_bytes <= self._free_bytes:
                weight.expanded = dequantize(weight.tensor.data, weight.tensor.ggml_type, weight.tensor.shape)
                self._free_bytes -= n_bytes
        return weight.expanded


def _softmax(scores: FloatArray, sinks: FloatArray | None) -> FloatArray:
    """The softmax over the last axis of [K, H/K, T, S]; sinks [H] add one score per head."""
    largest = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.reshape(*scores.shape[:2], 1, 1)
    if sink is not None:
        largest = np.maximum(largest, sink)
    shares: FloatArray = np.exp(scores - largest)
    total = shares.sum(axis=-1, keepdims=True)
    shares /= total if sink is None else total + np.exp(sink - largest)
    return shares


def _sigmoid(x: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):  # if exp overflows to inf, the quotient is zero, as it should be
        y: FloatArray = np.reciprocal(1 + np.exp(-x))
    return y


def _silu(x: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):
        y: FloatArray = x / (1 + np.exp(-x))
    return y


def _gelu(x: FloatArray) -> FloatArray:
    y: FloatArray = np.float32(0.5) * x * (1 + _erf(x / np.float32(math.sqrt(2))))
    return y


def _erf(x: FloatArray) -> FloatArray:
    """Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; absolute error at most 1.5e-7."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y: FloatArray = np.copysign(1 - series * np.exp(-x * x), x)
    return y


def _gelu_tanh(x: FloatArray) -> FloatArray:
    inner = np.float32(math.sqrt(2 / math.pi)) * x * (1 + np.float32(0.044715) * x * x)
    y: FloatArray = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y


def _relu(x: FloatArray) -> FloatArray:
    return np.maximum(x, np.float32(0))


def _xielu(x: FloatArray, by: Xielu) -> FloatArray:
    alpha_n, alpha_p, beta, eps = (np.float32(number) for number in (by.alpha_n, by.alpha_p, by.beta, by.eps))
    below = alpha_n * (np.expm1(np.minimum(x, eps)) - x)
    y: FloatArray = np.where(x > 0, alpha_p * x * x, below) + beta * x
    return y


_ACTIVATIONS: dict[Activation, Callable[[FloatArray], FloatArray]] = {
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: _relu,
    Activation.RELU_SQUARED: lambda x: np.square(_relu(x)),
}


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
