"""The torch tier on CUDA: Triton kernels for some operations, torch for the others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slm_core.architectures import Activation, AnyActivation, NormKind, RopeStyle
from slm_core.quant import QuantizedTensor
from slm_core.types import KvType
from slm_native.kernels.parameters import PLAIN, LayerPositions, Linear, Norm, Rotation, Scoring, Weight
from slm_native.kernels.torch.kernels import TorchKernels, TorchWeight
from slm_native.kernels.torch.pages import DecodeGroup, TorchKvLayer, TorchPlan
from slm_native.kernels.torch.splitting import DeviceMap
from slm_native.kernels.torch.triton.decoding import WRITTEN, NewTokens, attend_decoding
from slm_native.kernels.torch.triton.formats import PackedFormat, packed_format, packed_types
from slm_native.kernels.torch.triton.products import (
    FEW_ROWS,
    MANY_ROWS,
    MAX_ROWS,
    FewRows,
    ManyRows,
    dequantized,
    few_rows,
    many_rows,
)
from slm_native.kernels.torch.triton.small_steps import norm_and_rope, norm_rope_and_store, rms_norm, silu_mul
from slm_native.kernels.torch.triton.tuning import Tuner
from slm_native.kv import BatchPlan, KvLayer
from slm_native.profile import Profile

# From this number of rows on, a matrix is dequantized once and multiplied by torch.
_EXPANDED_ROWS = 128
NARROW = 512
"""The widest heads of which attention fits in the shared memory of compute capability 7.5."""


class TritonKernels(TorchKernels):
    """Triton products of up to about a hundred rows with packed weights; decoding attention that reads pages in place.

    See ``TorchKernels`` for the arguments.
    """

    _least_table = 256  # one graph serves up to 16,384 tokens: attention reads only the pages that a sequence has

    def __init__(
        self,
        device: str = "auto",
        dtype: str = "auto",
        expanded_bytes: int = 0,
        profile: Profile | None = None,
        device_map: DeviceMap | None = None,
    ) -> None:
        super().__init__(device, dtype, expanded_bytes, profile, device_map)
        self._tuner = Tuner(self._device) if self._profile.tune else None
        self._widest = NARROW if _is_old(self._device) else sys.maxsize
        self._joints: WeakKeyDictionary[TorchWeight, _Joint] = WeakKeyDictionary()

    def describe(self) -> str:
        """Torch's line, and the types with Triton kernels."""
        names = ", ".join(ggml_type.name for ggml_type in packed_types())
        return f"{super().describe()}; Triton kernels for {names}"

    def matmul(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Few rows are multiplied by packed weights in float32, more rows in ``dtype``, many rows as in torch."""
        form = self._packed_form(x, weight)
        if form is None:
            return super().matmul(x, weight, bias)
        if len(x) <= MAX_ROWS:
            x = x.contiguous()
            y = few_rows(x, _packed(weight), form, way=self._few(x, weight, form))
        else:
            x = x.to(self._dtype_of(weight)).contiguous()
            y = many_rows(x, _packed(weight), form, self._many(x, weight, form))
        return y if bias is None else y + bias

    def project(self, x: Tensor, norm: Norm | None, linears: Sequence[Linear]) -> Sequence[Tensor]:
        """One product for matrices of one type."""
        joined = self._joined(linears)
        if joined is None:
            products: Sequence[Tensor] = super().project(x, norm, linears)
            return products
        parts = self.matmul(self.normed(x, norm), joined).split([linear.weight.n_out for linear in linears], dim=1)
        return [y if (bias := linear.bias) is None else y + bias for y, linear in zip(parts, linears, strict=True)]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """In one kernel, if rows share a weight."""
        if weight.dim() > 1 or not len(x):
            return super().rms_norm(x, weight, eps)
        return rms_norm(x.contiguous(), weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: RopeStyle) -> Tensor:
        """In one kernel."""
        return norm_and_rope(x.contiguous(), None, 0.0, cos, sin, style) if len(x) else x

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """In one kernel."""
        flat = [_with_contiguous_rows(x.reshape(-1, x.shape[-1])) for x in (gate, up)]
        return silu_mul(flat[0], flat[1]).view(gate.shape)

    def gate_up(
        self,
        x: Tensor,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: AnyActivation,
        threshold: float | None = None,
    ) -> Tensor:
        """SwiGLU of few rows is one kernel: the product applies the activation, too."""
        is_swiglu = gate is not None and activation is Activation.SILU and threshold is None and up.bias is None
        if is_swiglu and gate is not None and gate.bias is None and len(x) <= MAX_ROWS:
            joined = self._joined((gate, up))
            form = None if joined is None else self._packed_form(x, joined)
            if joined is not None and form is not None:
                x = self.normed(x, norm).contiguous()
                return few_rows(x, joined.packed, form, way=self._few(x, joined, form), gated=True)
        inner: Tensor = super().gate_up(x, norm, gate, up, activation, threshold)
        return inner

    def gated(self, gate: Tensor, up: Tensor, activation: AnyActivation) -> Tensor:
        """SwiGLU in one kernel, other activations in torch."""
        return self.silu_mul(gate, up) if activation is Activation.SILU else super().gated(gate, up, activation)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """For few rows, the product's kernel adds ``residual``."""
        form = self._packed_form(x, linear.weight)
        is_plain = linear.scale is None and linear.lora is None
        if form is None or not is_plain or len(x) > MAX_ROWS:
            total: Tensor = super().add_product(residual, x, linear)
            return total
        residual = residual if linear.bias is None else residual + linear.bias
        x = x.contiguous()
        way = self._few(x, linear.weight, form)
        return few_rows(x, _packed(linear.weight), form, residual.contiguous(), way)

    def heads(self, flat: Tensor, width: int, norm: Norm | None = None, rotation: Rotation | None = None) -> Tensor:
        """In one kernel, if there is one norm weight for all heads or no norm."""
        if rotation is None or not len(flat) or not _is_of_heads(norm, width):
            heads: Tensor = super().heads(flat, width, norm, rotation)
            return heads
        x = _with_contiguous_rows(flat).unflatten(1, (-1, width))
        return norm_and_rope(x, *_weight_and_eps(norm), rotation.cos, rotation.sin, rotation.style)

    def store(
        self,
        cache: KvLayer,
        plan: BatchPlan,
        k: Tensor,
        v: Tensor,
        width: int,
        norm: Norm | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """One kernel for keys and one for values."""
        assert isinstance(cache, TorchKvLayer), "pages of another kernel set"
        if rotation is None or not _is_of_heads(norm, width) or not _is_written(cache, width):
            super().store(cache, plan, k, v, width, norm, rotation)
            return
        heads = [_with_contiguous_rows(x).unflatten(1, (-1, width)) for x in (k, v)]
        no_angles = rotation.cos[:, :0].contiguous()
        keys, values = (
            {"planes": tuple(planes), "pages": plan.pages, "slots": plan.slots}
            for planes in (cache.key_planes, cache.value_planes)
        )
        weight, eps = _weight_and_eps(norm)
        norm_rope_and_store(heads[0], weight, eps, rotation.cos, rotation.sin, rotation.style, **keys)
        norm_rope_and_store(heads[1], None, 0.0, no_angles, no_angles, rotation.style, **values)

    def store_and_attend(
        self,
        cache: KvLayer,
        plan: BatchPlan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        width: int,
        norms: tuple[Norm | None, Norm | None],
        positions: LayerPositions,
        scale: float,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """One kernel, if every sequence has one token."""
        assert isinstance(cache, TorchKvLayer) and isinstance(plan, TorchPlan), "pages of another kernel set"
        is_plain = positions.temperature is None and all(_is_of_heads(norm, width) for norm in norms)
        are_single = plan.decodes is not None and not plan.prefills and width <= self._widest
        if not is_plain or not are_single or not _is_written(cache, width):
            mixed: Tensor = super().store_and_attend(cache, plan, q, k, v, width, norms, positions, scale, scoring)
            return mixed
        assert plan.decodes is not None, "see above"
        rotation = _no_rotation(q) if positions.rotation is None else positions.rotation
        q_norm, k_norm = (None if norm is None else (norm.weight, norm.eps) for norm in norms)
        new = NewTokens(
            k=_with_contiguous_rows(k),
            v=_with_contiguous_rows(v),
            q_norm=q_norm,
            k_norm=k_norm,
            cos=rotation.cos,
            sin=rotation.sin,
            style=rotation.style,
            pages=plan.pages,
            slots=plan.slots,
        )
        heads = _with_contiguous_rows(q).unflatten(1, (-1, width))
        out = torch.empty(heads.shape, dtype=torch.float32, device=q.device)
        dtype = self._attention_dtype(cache)
        attend_decoding(heads, cache, plan.decodes, scale, scoring, dtype=dtype, out=out, new=new)
        return out

    def embed(self, weight: Weight, token_ids: NDArray[np.int32] | Tensor) -> Tensor:
        """The rows are gathered, then dequantized in one kernel."""
        assert isinstance(weight, TorchWeight), "a weight that another kernel set prepared"
        form = packed_format(weight.tensor.ggml_type, weight.n_in)
        if form is None or not isinstance(token_ids, Tensor) or not len(token_ids):
            return super().embed(weight, token_ids)
        return dequantized(weight.packed[token_ids.long()], form, torch.float32)

    def _joined(self, linears: Sequence[Linear]) -> TorchWeight | None:
        """The rows of all matrices as one matrix; None for a single matrix, or if they differ in type or have scales.

        At their first use, the matrices are copied to one allocation, and become views of it.
        """
        weights = [linear.weight for linear in linears if linear.scale is None and linear.lora is None]
        if len(weights) < max(2, len(linears)):
            return None
        first = weights[0]
        assert isinstance(first, TorchWeight), "a weight that another kernel set prepared"
        with self._lock:
            if (known := self._joints.get(first)) is None:
                known = self._joints[first] = _joint(weights)
        return known.whole

    def _unpacked(self, weight: TorchWeight, rows: slice) -> Tensor:
        form = packed_format(weight.tensor.ggml_type, weight.n_in)
        if form is None or self._profile.compile or weight.tensor.ggml_type.block_size == 1:
            unpacked: Tensor = super()._unpacked(weight, rows)
            return unpacked
        return dequantized(weight.packed[rows], form, self._dtype_of(weight))

    def _few(self, x: Tensor, weight: Weight, form: PackedFormat) -> FewRows:
        if self._tuner is None:
            return FEW_ROWS[0]
        name = f"few_rows {_measurement_key(x, weight)}"
        return self._tuner.way(name, FEW_ROWS, lambda way: few_rows(x, _packed(weight), form, way=way))

    def _many(self, x: Tensor, weight: Weight, form: PackedFormat) -> ManyRows:
        if self._tuner is None:
            return MANY_ROWS[0]
        name = f"many_rows {_measurement_key(x, weight)} {x.dtype}"
        return self._tuner.way(name, MANY_ROWS, lambda way: many_rows(x, _packed(weight), form, way))

    def _packed_form(self, x: Tensor, weight: Weight) -> PackedFormat | None:
        """The format in which kernels read a matrix for a product with ``x``; None if torch is faster."""
        assert isinstance(weight, TorchWeight), "a weight that another kernel set prepared"
        if weight.expanded is not None or not 0 < len(x) < _EXPANDED_ROWS:
            return None
        return packed_format(weight.tensor.ggml_type, weight.n_in)

    def _attend_decoding(
        self, q: Tensor, cache: TorchKvLayer, group: DecodeGroup, scale: float, scoring: Scoring, mixed: Tensor
    ) -> None:
        if q.shape[-1] > self._widest:
            super()._attend_decoding(q, cache, group, scale, scoring, mixed)
            return
        dtype = self._attention_dtype(cache)
        attend_decoding(q.contiguous(), cache, group, scale, scoring, dtype=dtype, out=mixed)


def _is_old(device: torch.device) -> bool:
    """Whether a device has 64 KiB of shared memory, less than every CUDA device of compute capability 8.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


class _Joint(NamedTuple):
    """A matrix that consists of other matrices; None if they cannot be joined."""

    whole: TorchWeight | None


def _joint(weights: Sequence[Weight]) -> _Joint:
    parts = [weight for weight in weights if isinstance(weight, TorchWeight)]
    kinds = {(part.tensor.ggml_type, part.n_in, part.packed.device) for part in parts}
    if len(kinds) > 1 or any(part.expanded is not None for part in parts):
        return _Joint(None)
    first, sizes = parts[0].tensor, [part.n_out for part in parts]
    packed = torch.cat([part.packed for part in parts])
    for part, rows in zip(parts, packed.split(sizes), strict=True):
        part.packed = rows
    name = " and ".join(part.tensor.name for part in parts)
    shape, no_bytes = (sum(sizes), parts[0].n_in), np.empty(0, np.uint8)  # only the device has the bytes
    return _Joint(TorchWeight(QuantizedTensor(name, shape, first.ggml_type, no_bytes), packed))


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """``x`` [T, width], or a copy; rows may be parts of longer ones."""
    return x if x.stride(1) == 1 else x.contiguous()


def _measurement_key(x: Tensor, weight: Weight) -> str:
    """The key of a measurement, with the number of rows rounded up to a power of two."""
    return f"{weight.tensor.ggml_type.name} {weight.n_out} x {weight.n_in}, rows {1 << (len(x) - 1).bit_length()}"


def _packed(weight: Weight) -> Tensor:
    assert isinstance(weight, TorchWeight), "a weight that another kernel set prepared"
    return weight.packed


def _no_rotation(x: Tensor) -> Rotation:
    """A rotation that leaves all values of ``x`` unchanged."""
    no_angles = x.new_empty(len(x), 0)
    return Rotation(no_angles, no_angles, RopeStyle.HALF_SPLIT)


def _is_written(cache: TorchKvLayer, width: int) -> bool:
    """Whether kernels write keys and values of heads of this width."""
    types = {cache.key_type, cache.value_type}
    return types <= WRITTEN and (KvType.Q8_0 not in types or width & (width - 1) == 0)


def _is_of_heads(norm: Norm | None, width: int) -> bool:
    """Whether one weight [D] normalizes every head, or there is no norm."""
    return norm is None or (norm.kind is NormKind.RMS and norm.weight.shape == (width,))


def _weight_and_eps(norm: Norm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)
