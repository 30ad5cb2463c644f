"""The seam between the transformer and the code that computes it.

A kernel set is chosen once, when a model is loaded (``select_kernels``). The transformer prepares each weight once and
from then on calls only the steps below, so that a tier may keep weights packed or fuse what lies inside a step. A step
that a tier can only compute fast together with its neighbours is added here as the composition of those neighbours,
and that tier overrides it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_native.tensor import QuantizedTensor

if TYPE_CHECKING:
    from slm_native.kv import KvLayer, PageIndex

FloatArray: TypeAlias = NDArray[np.float32]

_SCORES_AT_A_TIME = 1 << 22  # 16 MiB of float32, however long the prompt


class RopeStyle(Enum):
    """Which two of a head's D values one angle rotates."""

    INTERLEAVED = "interleaved"
    """Values 2i and 2i+1: llama, whose GGUF rows are permuted for it (ggml's "norm")."""
    HALF_SPLIT = "half_split"
    """Values i and i + D/2: qwen, gemma, phi, ... (ggml's "neox")."""


@dataclass(slots=True, eq=False)
class Weight:
    """A matrix that a kernel set has prepared; only that kernel set may use it, and tiers add fields of their own.

    Dropping the last reference to it frees whatever the tier holds for it, and its view on the mapped file.

    Attributes:
        tensor: the matrix as it lies in the file, (out, in).
    """

    tensor: QuantizedTensor

    @property
    def n_out(self) -> int:
        """Rows: the width of what the product gives."""
        return self.tensor.shape[0]

    @property
    def n_in(self) -> int:
        """Columns: the width of what the product takes."""
        return self.tensor.shape[1]


class KernelSet(ABC):
    """The arithmetic of a transformer. Holds no state that a step changes visibly, so threads may share it.

    Shapes: T tokens in the batch, S positions held, H query heads, K key/value heads, D head width. All floating
    point arrays are float32; no step changes its arguments, and every result is a new array. Sums may be made in
    another order when T changes (a BLAS takes other paths for a vector and for a matrix), so a token alone and the
    same token in a batch agree within float32 rounding, not bit for bit.
    """

    name: str
    """The tier: "reference", "cpu"."""
    device: str
    """Where it computes: "cpu"."""

    @abstractmethod
    def describe(self) -> str:
        """What was chosen, in one line for ``slm info``."""

    @abstractmethod
    def prepare(self, tensor: QuantizedTensor) -> Weight:
        """Make a matrix ready for ``embed`` and ``matmul``; copies nothing, reads no weights.

        Args:
            tensor: shape (out, in).

        Raises:
            UnsupportedModel: no kernel for its type.
            InvalidModelFile: not a matrix, rows that are no whole number of blocks, or data of the wrong size.
        """

    @abstractmethod
    def vector(self, tensor: QuantizedTensor) -> FloatArray:
        """A norm weight, bias or table of factors as float32, in the tensor's shape.

        Raises:
            UnsupportedModel: no kernel for its type.
            InvalidModelFile: data of the wrong size.
        """

    @abstractmethod
    def embed(self, weight: Weight, token_ids: NDArray[np.int32]) -> FloatArray:
        """Rows ``token_ids`` [T] of an embedding matrix: [T, in].

        Raises:
            IndexError: an id outside 0 .. n_out - 1.
        """

    @abstractmethod
    def matmul(self, x: FloatArray, weight: Weight, bias: FloatArray | None = None) -> FloatArray:
        """``x @ weight.T + bias``: [T, in] to [T, out]; ``bias`` is [out]."""

    @abstractmethod
    def rms_norm(self, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, which ``weight`` [width] matches."""

    @abstractmethod
    def rope(self, x: FloatArray, cos: FloatArray, sin: FloatArray, style: RopeStyle) -> FloatArray:
        """Rotate the first R of each head's D values; those beyond R pass through.

        Args:
            x: [T, H, D].
            cos: [T, R/2] cosines of each token's angles.
            sin: [T, R/2] sines of the same.
            style: which values make a pair.
        """

    @abstractmethod
    def silu_mul(self, gate: FloatArray, up: FloatArray) -> FloatArray:
        """``gate * sigmoid(gate) * up``, element by element: the activation of a gated feed-forward layer."""

    @abstractmethod
    def attention(self, q: FloatArray, k: FloatArray, v: FloatArray, scale: float) -> FloatArray:
        """Causal attention of the last T of the S positions of one sequence, heads grouped (GQA).

        Args:
            q: [T, H, D]; query t stands at position S - T + t and sees positions up to its own.
            k: [S, K, D], H a multiple of K; query head h reads key head h // (H / K).
            v: [S, K, D].
            scale: factor on ``q · k``.

        Returns:
            [T, H, D].
        """

    def attention_over_pages(
        self, q: FloatArray, cache: KvLayer, pages: PageIndex, n_held: int, scale: float
    ) -> FloatArray:
        """``attention`` with keys and values that lie in the KV cache, so many queries at a time.

        Args:
            q: [T, H, D], the last T of the positions held.
            cache: one layer of the cache; it holds the keys and values of these tokens, too.
            pages: where the sequence's tokens lie.
            n_held: positions held, S.
            scale: factor on ``q · k``.

        Returns:
            [T, H, D].
        """
        n_tokens, n_heads, _ = q.shape
        k, v = cache.keys(pages, n_held), cache.values(pages, n_held)
        mixed = np.empty_like(q)
        step = max(1, _SCORES_AT_A_TIME // (n_heads * n_held))
        for start in range(0, n_tokens, step):
            stop = min(start + step, n_tokens)
            seen = n_held - n_tokens + stop
            mixed[start:stop] = self.attention(q[start:stop], k[:seen], v[:seen], scale)
        return mixed
