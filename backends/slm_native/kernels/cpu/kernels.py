"""The cpu tier: C++ kernels that read the file's blocks in place, and NumPy for all other operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, RopeStyle
from slm_core.cpu import chosen_threads
from slm_core.errors import InvalidOption
from slm_core.quant import QuantizedTensor
from slm_core.types import KvType
from slm_native import _extension
from slm_native.kernels.cpu.fusion import Fusion
from slm_native.kernels.cpu.handles import (
    CpuLora,
    CpuWeight,
    native_activation,
    native_linear,
    native_norm,
    optional_norm,
    plain_handles,
)
from slm_native.kernels.cpu.pages import KV_TYPES, CpuKvLayer, CpuPageStore, CpuPlan, placed
from slm_native.kernels.cpu.prepared import CpuMoe, CpuPerHead, native_moe
from slm_native.kernels.cpu.recurrent import CpuRecurrentKernels
from slm_native.kernels.moe import MoeLayer
from slm_native.kernels.parameters import (
    PLAIN,
    Experts,
    Linear,
    Lora,
    Norm,
    PerHead,
    Rotation,
    Scoring,
    Weight,
    float_tensor,
)
from slm_native.kv import Array, BatchPlan, KvLayer, PageLayout, PageStore
from slm_native.steps import Step

if TYPE_CHECKING:
    from slm_native import _native

_LORA_COLUMNS = 256  # as in products.h
_LARGEST_HALF = float(np.finfo(np.float16).max)
_UNMEASURED = ("amx_plain", "scalar", "neon", "neon_i8mm")
"""Instruction sets for which docs/performance.md has no comparison with other engines.

For AMX the page compares only single tokens, which use the kernels of AVX-512.
"""


def tuned_types(isa: str | None) -> frozenset[int]:
    """Weight types (ggml's numbers) whose products were measured to be at least as fast as other engines'.

    Args:
        isa: instruction set; None for the best of this machine.

    Raises:
        InvalidOption: an instruction set that is unknown, or that this machine or this build lacks.
        BackendUnavailable: the extension is missing or broken.
    """
    isa = _available_isa(isa)
    return frozenset() if isa in _UNMEASURED else frozenset(_extension.load().Kernels(isa, n_threads=1).types)


def _available_isa(isa: str | None) -> str:
    available: list[str] = _extension.load().available_isas()
    if isa is not None and isa not in available:
        raise InvalidOption(
            f"unknown or missing instruction set {isa!r} (this build on this machine has: {', '.join(available)})"
        )
    return available[-1] if isa is None else isa


def _exponent(values: NDArray[np.float32]) -> int:
    """The exponent of the largest number; 0 if all are 0."""
    return int(np.frexp(np.abs(values).max())[1])


def _balance(a: NDArray[np.float32], b: NDArray[np.float32]) -> np.float32:
    """A power of two: the largest numbers of ``a / balance`` and of ``b * balance`` have about the same size."""
    return np.float32(2.0 ** ((_exponent(a) - _exponent(b)) // 2))


def _columns(b: NDArray[np.float16]) -> NDArray[np.uint16]:
    """``b.T`` in blocks of columns, one after the other, as bits."""
    blocks = [b[i : i + _LORA_COLUMNS].T.reshape(-1) for i in range(0, len(b), _LORA_COLUMNS)]
    return np.concatenate(blocks).view(np.uint16)


class CpuKernels(CpuRecurrentKernels):
    """The reference kernels, with products, attention and recurrent layers in C++.

    Products with quantized weights are integer products: activations are rounded to int8 with a scale per 32 values,
    which adds about 0.5 % of noise to a product. Products with F32, F16 and BF16 weights are in float32. Exception: for
    BF16 weights and more than six rows, activations are rounded to bf16 if the processor has AVX512-BF16. Types without
    a kernel (IQ1, IQ2, IQ3) are dequantized, as in the reference tier.

    Attention reads keys and values as they are stored. For a few queries and keys in blocks of 32, the queries
    are rounded to int8 in the same way.

    Args:
        isa: instruction set; None for the best of this machine.
        n_threads: number of threads; None for one per physical core available to this process.
        expanded_bytes: see ``ReferenceKernels``.

    Raises:
        InvalidOption: an instruction set that is unknown, or that this machine or this build lacks; no thread, or more
            than 512 or than the system allows.
        BackendUnavailable: the extension is missing or broken.
    """

    name = "cpu"
    kv_type = KvType.F16
    kv_types = KV_TYPES

    def __init__(self, isa: str | None, n_threads: int | None, expanded_bytes: int) -> None:
        native = _extension.load()
        self.isa = _available_isa(isa)
        self.n_threads = chosen_threads(n_threads)
        try:
            self._native: _native.Kernels = native.Kernels(self.isa, self.n_threads)
            super().__init__(self.isa, self.n_threads, expanded_bytes)
        except RuntimeError as error:
            raise InvalidOption(f"n_threads is {n_threads}, and the system gives no more threads: {error}") from error
        self._types = frozenset(self._native.types)

    def describe(self) -> str:
        """The instruction set and the threads."""
        threads = "1 thread" if self.n_threads == 1 else f"{self.n_threads} threads"
        return f"C++ kernels ({self.isa}, {threads})"

    def prepare(self, tensor: QuantizedTensor) -> CpuWeight:
        """Check the matrix, and pass it to C++ if its type has kernels."""
        super().prepare(tensor)
        if tensor.ggml_type not in self._types:
            return CpuWeight(tensor)
        return CpuWeight(tensor, packed=self._native.matrix(tensor.data, int(tensor.ggml_type), *tensor.shape))

    def embed(self, weight: Weight, token_ids: NDArray[np.int32] | Array) -> Array:
        """In C++ if there are kernels, otherwise as in the reference tier."""
        assert isinstance(weight, CpuWeight), "a weight that another kernel set prepared"
        if weight.packed is None:
            return super().embed(weight, token_ids)
        rows: Array = self._native.embed(weight.packed, token_ids)
        return rows

    def matmul(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """In C++ if there are kernels, otherwise as in the reference tier."""
        assert isinstance(weight, CpuWeight), "a weight that another kernel set prepared"
        if weight.packed is None:
            return super().matmul(x, weight, bias)
        y: Array = self._native.matmul(np.ascontiguousarray(x), weight.packed)
        if bias is not None:
            y += bias
        return y

    def normed(self, x: Array, norm: Norm | None) -> Array:
        """In one call."""
        if norm is None:
            return x
        rows: Array = self._native.normalize(np.ascontiguousarray(x).reshape(-1, norm.weight.size), native_norm(norm))
        return rows.reshape(x.shape)

    def project(self, x: Array, norm: Norm | None, linears: Sequence[Linear]) -> Sequence[Array]:
        """In one call: activations are normalized and quantized once for all matrices."""
        natives = [handle for linear in linears if (handle := native_linear(linear)) is not None]
        if len(natives) < len(linears):
            return super().project(x, norm, linears)
        products: Sequence[Array] = self._native.project(np.ascontiguousarray(x), optional_norm(norm), natives)
        return products

    def add_product(self, residual: Array, x: Array, linear: Linear) -> Array:
        """In one call."""
        native = native_linear(linear)
        if native is None:
            return super().add_product(residual, x, linear)
        y: Array = self._native.add_product(np.ascontiguousarray(residual), np.ascontiguousarray(x), native)
        return y

    def gate_up(
        self,
        x: Array,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: AnyActivation,
        threshold: float | None = None,
    ) -> Array:
        """In one call."""
        gates = None if gate is None else native_linear(gate)
        ups = native_linear(up)
        if ups is None or (gate is not None and gates is None):
            return super().gate_up(x, norm, gate, up, activation, threshold)
        x, native = np.ascontiguousarray(x), native_activation(activation)
        inner: Array = self._native.gate_up(x, optional_norm(norm), gates, ups, native, threshold)
        return inner

    def lora(self, weight: Weight, a: NDArray[np.float32], b: NDArray[np.float32]) -> Lora:
        """In float16, which halves the bytes that a token reads; for float matrices, ``b`` is a sum of two float16.

        If the numbers are too large for float16, the change is in float32, and its steps are not fused.
        """
        is_float, name = weight.tensor.ggml_type.block_size == 1, weight.tensor.name
        balance = np.float32(2.0 ** (8 - _exponent(b))) if is_float else _balance(a, b)
        a, b = a / balance, b * balance
        largest = float(np.abs(b).max()) if is_float else max(float(np.abs(matrix).max()) for matrix in (a, b))
        if not largest <= _LARGEST_HALF:
            return super().lora(weight, a, b)
        high = b.astype(np.float16)
        if not is_float:
            rows = self.prepare(float_tensor(f"{name}.lora_a", a.astype(np.float16)))
            return CpuLora(rows, self.prepare(float_tensor(f"{name}.lora_b", high)), rows, _columns(high), [])
        low = (b - high).astype(np.float16)
        rows = self.prepare(float_tensor(f"{name}.lora_a2", np.concatenate([a, a])))
        exact = super().lora(weight, a, b)
        return CpuLora(exact.a, exact.b, rows, _columns(np.concatenate([high, low], axis=1)), [])

    def moe(self, experts: Experts) -> MoeLayer:
        """In one call, if all matrices have kernels."""
        native = native_moe(experts)
        return super().moe(experts) if native is None else CpuMoe(self._native, native)

    def activate(self, x: Array, activation: AnyActivation) -> Array:
        """In one call."""
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        return self._native.activate(rows, None, native_activation(activation)).reshape(x.shape)

    def gated(self, gate: Array, up: Array, activation: AnyActivation) -> Array:
        """In one call."""
        rows, others = (np.ascontiguousarray(values).reshape(-1, gate.shape[-1]) for values in (gate, up))
        return self._native.activate(rows, others, native_activation(activation)).reshape(gate.shape)

    def split_layer_embeddings(
        self, projected: Array, looked_up: Array, norm: Norm, projected_share: float, looked_up_share: float
    ) -> Sequence[Array]:
        """In one call."""
        projected, looked_up = np.ascontiguousarray(projected), np.ascontiguousarray(looked_up)
        parts = self._native.split_layer_embeddings(
            projected, looked_up, native_norm(norm), projected_share, looked_up_share
        )
        return list(parts)

    def add_shares(self, arrays: Sequence[Array], shares: Array) -> Sequence[Array]:
        """In one call."""
        return self._native.add_shares([np.ascontiguousarray(array) for array in arrays], np.ascontiguousarray(shares))

    def per_head(self, linears: Sequence[Linear]) -> PerHead:
        """In one call, if all matrices have kernels and no scale or bias."""
        handles = plain_handles(*linears)
        return super().per_head(linears) if handles is None else CpuPerHead(self._native, handles)

    def heads(self, flat: Array, width: int, norm: Norm | None = None, rotation: Rotation | None = None) -> Array:
        """In one call."""
        if norm is None and rotation is None:
            return super().heads(flat, width)
        cos, sin, style = (None, None, None) if rotation is None else (rotation.cos, rotation.sin, rotation.style)
        interleaved = style is RopeStyle.INTERLEAVED
        rotated: Array = self._native.rotate_heads(flat, width, optional_norm(norm), cos, sin, interleaved)
        return rotated

    def fuse(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Fuse layers if all their matrices have kernels."""
        return Fusion(self._native, self._states).fuse(steps)

    def place(self, plan: BatchPlan) -> CpuPlan:
        """The runs as a C++ batch."""
        return placed(plan)

    def new_pages(self, layout: PageLayout, n_pages: int) -> PageStore:
        """Pages that C++ writes and reads."""
        return CpuPageStore(layout, n_pages, self._native)

    def attention_over_runs(
        self, q: Array, cache: KvLayer, plan: BatchPlan, scale: float, scoring: Scoring = PLAIN
    ) -> Array:
        """All sequences in one call, without gathering their pages; sequences with biases in NumPy."""
        assert isinstance(cache, CpuKvLayer), "pages that another kernel set made"
        assert isinstance(plan, CpuPlan), "a plan that another kernel set placed"
        mixed: Array = self._native.attend(
            np.ascontiguousarray(q),
            cache.native,
            plan.native,
            scale,
            scoring.softcap or 0.0,
            scoring.window or 0,
            scoring.slopes,
            scoring.sinks,
        )
        if plan.has_biases:
            for run in plan.runs:
                if run.bias is not None:
                    mixed[run.rows] = self.attention_of_run(q[run.rows], cache, run, scale, scoring)
        return mixed
