"""The torch tier: plain torch operations on any device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from numpy.typing import NDArray
from torch import Tensor

from slm_core.architectures import AnyActivation, RopeStyle
from slm_core.errors import InvalidModelFile, InvalidOption, ModelError, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor, check_tensor, dequantize
from slm_core.types import KvType, TopLogits
from slm_native.kernels.device import FixedShape, FloatArray
from slm_native.kernels.kernelset import KernelSet
from slm_native.kernels.parameters import PLAIN, BlockRange, Scoring, Weight, WeightBytes
from slm_native.kernels.torch.activations import activate, gated
from slm_native.kernels.torch.attention import attend, attend_at, attend_bidirectionally, attend_one_token_each
from slm_native.kernels.torch.choosing import DEVICES as RANKING_DEVICES
from slm_native.kernels.torch.choosing import top_logits
from slm_native.kernels.torch.compiling import check_compiles, unpack_compiled
from slm_native.kernels.torch.devices import choose_dtype, memory, spelled
from slm_native.kernels.torch.graphs import (
    Capture,
    CudaCapture,
    StepGraphs,
    chunks_alone,
    filled,
    filled_alone,
    filled_prefill,
)
from slm_native.kernels.torch.pages import DecodeGroup, TorchKvLayer, TorchPageStore, TorchPlan, place
from slm_native.kernels.torch.scan import delta_scan, selective_scan
from slm_native.kernels.torch.splitting import (
    DeviceMap,
    Placement,
    SplitPageStore,
    devices_of,
    moved,
    placement_of,
    to_device,
)
from slm_native.kernels.torch.staging import StepUploader
from slm_native.kernels.torch.unpack import unpack
from slm_native.kernels.torch.upload import Uploader
from slm_native.kv import PAGE_TOKENS, BatchPlan, KvLayer, PageLayout, PageStore
from slm_native.profile import CAPTURED, Profile

T = TypeVar("T")
_N_UNCAPTURED = 3  # steps of a shape, by default: a capture takes as long as several steps
_FLOATS = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}
_CPU_PANEL_WEIGHTS = 1 << 20  # 4 MiB of float32: dequantized weights stay in the CPU cache
_DEVICE_PANEL_WEIGHTS = 1 << 26  # 256 MiB of float32: enough to keep a GPU busy


@dataclass(slots=True, eq=False, weakref_slot=True)
class TorchWeight(Weight):
    """A matrix, with its bytes on the device.

    Attributes:
        packed: uint8 [out, bytes of a row].
        expanded: [out, in], dequantized to the number format of products; None if it is not kept.
    """

    packed: Tensor
    expanded: Tensor | None = None


class TorchKernels(KernelSet):
    """Kernels that work on every torch device.

    Weights stay packed and are dequantized in every product, a panel of rows at a time. The first ones are kept
    dequantized, up to ``expanded_bytes`` in all. Activations are float32 between products. Products with F32 weights
    and attention over keys and values in f32 are float32, too.

    Args:
        device: torch's name of it, or "auto".
        dtype: number format of products, or "auto" for the device's best.
        expanded_bytes: device memory for dequantized weights, in bytes.
        profile: padding and capture of steps; None to capture on CUDA if the model allows it.
        device_map: number of layers on each device, in order; "auto" to split by memory over all devices of the kind of
            ``device``.

    Raises:
        BackendUnavailable: no such device.
        InvalidOption: an unknown number format, capture on a device without CUDA graphs or on several devices, or a map
            that begins with another device.
    """

    name = "torch"
    failures = (torch.OutOfMemoryError,)
    _least_table = 1  # smallest width of page tables in steps of fixed shapes: torch's attention reads whole tables

    def __init__(
        self,
        device: str = "auto",
        dtype: str = "auto",
        expanded_bytes: int = 0,
        profile: Profile | None = None,
        device_map: DeviceMap | None = None,
    ) -> None:
        self._devices = devices_of(device, device_map)
        self._device = self._devices[0]
        self.device = ", ".join(str(device) for device in self._devices)
        self._device_map = device_map
        self.splits = device_map is not None
        self.picks_top = self._device.type in RANKING_DEVICES
        self._placement: Placement | None = None
        self._may_forgo_capture = profile is None
        self._uncaptured = ""
        if profile is None:
            profile = CAPTURED if self._device.type == "cuda" and not self.splits else Profile()
        self._profile = profile
        self.captures = self._profile.capture or self._profile.capture_prefill
        self.chunk = self._profile.chunk or None
        self._new_capture: Callable[[], Capture] | None = None
        if self.captures:
            if self._device.type != "cuda" or self.splits:
                raise InvalidOption(f"capture is for CUDA graphs, and {self.device} has none (accepted: false)")
            self._new_capture = CudaCapture
        self._graphs: WeakKeyDictionary[TorchKvLayer, StepGraphs] = WeakKeyDictionary()
        self.dtype = choose_dtype(dtype, self._device)
        self._expanded_bytes = self._free_bytes = expanded_bytes
        self.kv_type = KvType.F32 if self._device.type == "cpu" else KvType.F16
        self._lock = threading.Lock()
        self._uploaders = {device: Uploader(device) for device in self._devices}
        self._steps = StepUploader(self._device)
        self._compiled: set[tuple[GgmlType, torch.device]] = set()
        self.reads_file = self._device.type == "cpu"
        self._panel_weights = _CPU_PANEL_WEIGHTS if self._device.type == "cpu" else _DEVICE_PANEL_WEIGHTS

    def describe(self) -> str:
        """Torch's version, the device, and the number format of products."""
        details = ", steps captured" if self._profile.capture else ""
        details += f", steps not captured as {self._uncaptured}" if self._uncaptured else ""
        details += ", expanded by torch.compile" if self._profile.compile else ""
        details += f", at most {self._expanded_bytes >> 20} MiB expanded" if self._expanded_bytes else ""
        return f"torch {torch.__version__} on {self.device}, products in {spelled(self.dtype)}, weights packed{details}"

    def forgo_capture(self, reason: str) -> None:
        """Nothing is padded or captured from now on, and ``describe`` has the reason; raises if a profile captures."""
        if not self._may_forgo_capture:
            super().forgo_capture(reason)
        self._profile, self.captures, self._new_capture, self._uncaptured = Profile(), False, None, reason

    def reserve(self, sizes: WeightBytes) -> None:
        """Check that the weights fit in the memory of the device, and place layers if there are several devices."""
        if self._device_map is not None:
            self._placement = placement_of(self._devices, self._device_map, sizes)
            return
        free, total = memory(self._device)
        if free is not None and total is not None and sizes.total > free:
            raise UnsupportedModel(
                f"the weights take {sizes.total >> 20} MiB, and {free >> 20} of the {total >> 20} MiB of {self.device}"
                " are free: use a smaller quantization, another device, resident_bytes, which streams layers, or"
                " device_map, which shares them out"
            )

    def ready(self) -> None:
        """Free the buffers of the upload."""
        for uploader in self._uploaders.values():
            uploader.close()

    def settle(self) -> None:
        """Synchronize the devices."""
        for device in self._devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    def on_device_of(self, x: Tensor, values: NDArray[Any]) -> Tensor:
        """Copy to the device of ``x``."""
        return torch.from_numpy(np.array(values)).to(x.device)

    def entering(self, x: Tensor, layer: int) -> Tensor:
        """Copy if the previous layer is on another device."""
        if self._placement is None:
            return x
        return to_device(x, [*self._placement.layers, self._placement.head][layer])

    def spread(self, items: Sequence[T]) -> Sequence[T]:
        """One copy per device."""
        if self._placement is None:
            return items
        done: dict[tuple[int, torch.device], Any] = {}
        return [moved(item, device, done) for item, device in zip(items, self._placement.layers, strict=True)]

    def _device_of(self, tensor: QuantizedTensor) -> torch.device:
        return self._device if self._placement is None else self._placement.of(tensor.name)

    def from_host(self, values: NDArray[Any]) -> Tensor:
        """Copy to the device."""
        return torch.from_numpy(np.array(values)).to(self._device)

    def to_host(self, x: Tensor) -> FloatArray:
        """Copy from the device, after synchronization."""
        host: FloatArray = x.float().cpu().numpy()
        return host

    def top_logits(self, logits: Tensor, k: int) -> TopLogits:
        """Rank on the device."""
        return top_logits(logits.float(), k) if self.picks_top else super().top_logits(logits, k)

    def rows(self, x: Tensor, which: slice | NDArray[Any]) -> Tensor:
        """A view for a slice, a gather for ids."""
        if isinstance(which, slice):
            return x[which]
        ids = np.flatnonzero(which) if which.dtype == np.bool_ else which
        if len(ids) == 0:
            return x[:0]
        return x[torch.from_numpy(np.array(ids, np.int64)).to(x.device)]

    def fixed(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape | None:
        """Pad to the next bucket."""
        n_rows = self._profile.bucket(len(plan.pages))
        if n_rows is None or len(plan.runs) != len(plan.pages):
            return None
        cache = layers[0]
        assert isinstance(cache, TorchKvLayer), "pages of another kernel set"
        placed = filled(plan, n_rows, cache.n_pages - 1, self._least_table)
        return FixedShape(placed, n_rows, self._runner(cache, captured=self._profile.capture))

    def fixed_prefill(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape | None:
        """A whole chunk of one sequence, if the profile captures chunks."""
        if not self._profile.capture_prefill or len(plan.runs) > 1 or len(plan.pages) != self.chunk:
            return None
        return self._prefill(plan, layers)

    def _prefill(self, plan: BatchPlan, layers: Sequence[KvLayer]) -> FixedShape:
        cache, n_tokens = layers[0], len(plan.pages)
        assert isinstance(cache, TorchKvLayer), "pages of another kernel set"
        no_outputs = np.zeros(n_tokens, np.bool_)
        return FixedShape(filled_prefill(plan), n_tokens, self._runner(cache, captured=True), no_outputs)

    def warm_shapes(self, layers: Sequence[KvLayer]) -> Iterator[FixedShape]:
        """Each bucket at the length that the profile warms; whole chunks at every length up to it."""
        cache = layers[0]
        assert isinstance(cache, TorchKvLayer), "pages of another kernel set"
        n_pages = -(-self._profile.warm // PAGE_TOKENS)
        for n_rows in self._profile.buckets if n_pages else ():
            padded = filled_alone(n_rows, n_pages, cache.n_pages - 1, self._least_table)
            yield FixedShape(padded, n_rows, self._runner(cache, captured=self._profile.capture))
        if n_pages and self._profile.capture_prefill:
            for plan in chunks_alone(self._profile.chunk, n_pages, cache.n_pages - 1):
                yield self._prefill(plan, layers)

    def _runner(self, cache: TorchKvLayer, *, captured: bool) -> Callable[[Callable[[Any], Tensor], Any], Tensor]:
        """Runs steps of fixed shapes. Graphs belong to a context and are freed with its pages."""
        if self._new_capture is None or not captured:
            return lambda step, inputs: step(self._steps.upload(inputs).tree)
        with self._lock:
            if (graphs := self._graphs.get(cache)) is None:
                n_uncaptured = _N_UNCAPTURED if self._may_forgo_capture else 0
                graphs = StepGraphs(self._new_capture(), self._profile.graphs, self._steps, n_uncaptured)
                self._graphs[cache] = graphs
        return graphs.run

    def place(self, plan: BatchPlan) -> BatchPlan:
        """Indices as tensors, shared by all layers."""
        return place(plan)

    def stage(self, values: NDArray[Any]) -> Tensor:
        """A host tensor."""
        return torch.from_numpy(np.array(values))

    def arrived(self, staged: T) -> T:
        """Copy to the device, with one copy."""
        return self._steps.upload(staged).tree

    def new_pages(self, layout: PageLayout, n_pages: int) -> PageStore:
        """Pages on the device; one more for padding."""
        n_pages += bool(self._profile.buckets) or self._profile.capture_prefill
        if self._placement is not None:
            return SplitPageStore(layout, n_pages, self._placement)
        return TorchPageStore(layout, n_pages, self._device)

    def prepare(self, tensor: QuantizedTensor) -> TorchWeight:
        """Upload the packed matrix."""
        if len(tensor.shape) != 2:
            raise InvalidModelFile(f"tensor {tensor.name!r} has the shape {tensor.shape}, a matrix (out, in) is needed")
        _check(tensor)
        uploader = self._uploaders[self._device_of(tensor)]
        weight = TorchWeight(tensor, uploader.upload(tensor.data).view(tensor.shape[0], -1))
        kind = tensor.ggml_type, weight.packed.device
        if self._profile.compile and kind not in self._compiled:
            self.settle()
            check_compiles(weight.packed, tensor.ggml_type, self._dtype_of(weight))
            self._compiled.add(kind)
        return weight

    def vector(self, tensor: QuantizedTensor) -> Tensor:
        """Dequantize the tensor and copy it; the copy is complete, because loading computes with vectors."""
        _check(tensor)
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.ggml_type, tensor.shape))
        return torch.from_numpy(values).to(self._device_of(tensor))

    def embed(self, weight: Weight, token_ids: NDArray[np.int32] | Tensor) -> Tensor:
        """Dequantize the requested rows on the device."""
        assert isinstance(weight, TorchWeight), "a weight that another kernel set prepared"
        if isinstance(token_ids, Tensor):
            return unpack(weight.packed[token_ids.long()], weight.tensor.ggml_type)
        if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < weight.n_out:
            raise IndexError(f"row ids span {token_ids.min()} to {token_ids.max()}, there are {weight.n_out} rows")
        return unpack(self.rows(weight.packed, token_ids), weight.tensor.ggml_type)

    def matmul(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """A product with dequantized weights, in ``dtype``."""
        assert isinstance(weight, TorchWeight), "a weight that another kernel set prepared"
        x = x.to(self._dtype_of(weight))
        step = max(1, self._panel_weights // weight.n_in)
        if (expanded := self._expanded(weight)) is not None:
            y = x @ expanded.T
        elif step >= weight.n_out:
            y = x @ self._unpacked(weight, slice(None)).T
        else:
            panels = [slice(start, start + step) for start in range(0, weight.n_out, step)]
            y = torch.cat([x @ self._unpacked(weight, panel).T for panel in panels], dim=1)
        y = y.float()
        return y if bias is None else y + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square normalization (Zhang and Sennrich, arXiv:1910.07467)."""
        return F.rms_norm(x, x.shape[-1:], eps=eps) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Layer normalization (Ba et al., arXiv:1607.06450)."""
        normed = F.layer_norm(x, x.shape[-1:], eps=eps) * weight
        return normed if bias is None else normed + bias

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: RopeStyle) -> Tensor:
        """Rotary position embedding (Su et al., arXiv:2104.09864)."""
        half = cos.shape[-1]
        cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, R/2]
        if style is RopeStyle.INTERLEAVED:
            first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
            rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        else:
            first, second = x[..., :half], x[..., half : 2 * half]
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return rotated if 2 * half == x.shape[-1] else torch.cat([rotated, x[..., 2 * half :]], dim=-1)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU (Shazeer, arXiv:2002.05202)."""
        return F.silu(gate) * up

    def activate(self, x: Tensor, activation: AnyActivation) -> Tensor:
        """The torch function."""
        return activate(x, activation)

    def gated(self, gate: Tensor, up: Tensor, activation: AnyActivation) -> Tensor:
        """An elementwise product; gpt-oss clamps both factors."""
        return gated(gate, up, activation)

    def sigmoid(self, x: Tensor) -> Tensor:
        """The torch function."""
        return x.sigmoid()

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """The formula as it stands."""
        return (x / cap).tanh() * cap

    def above_threshold(self, x: Tensor, n_deviations: float) -> Tensor:
        """The formula as it stands."""
        deviation, mean = torch.std_mean(x, dim=1, keepdim=True, correction=0)
        return (x - mean - deviation * n_deviations).relu()

    def as_large(self, x: Tensor, like: Tensor) -> Tensor:
        """The formula as it stands."""
        magnitude = like.square().mean(1, keepdim=True).sqrt()
        return x * magnitude / x.square().mean(1, keepdim=True).clamp(min=1e-5).sqrt()

    def clip(self, x: Tensor, limit: float) -> Tensor:
        """The torch function."""
        return x.clamp(-limit, limit)

    def concatenated(self, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
        """The torch function."""
        return torch.cat(list(parts), axis)

    def selective_scan(
        self, x: Tensor, steps: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A loop over tokens, all channels at once."""
        return selective_scan(x, steps, a, b, c, state)

    def delta_scan(
        self, r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A loop over tokens, all heads at once."""
        return delta_scan(r, log_decay, k, v, a, b, state)

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """The torch function."""
        return (x * y).sum(-1, keepdim=True)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, scoring: Scoring = PLAIN, block: BlockRange | None = None
    ) -> Tensor:
        """scaled_dot_product_attention, or explicit scores if they are changed."""
        return attend(q.to(self.dtype), k, v, scale, scoring, block).float()

    def bidirectional_attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, scoring: Scoring = PLAIN
    ) -> Tensor:
        """Like ``attention``."""
        return attend_bidirectionally(q.to(self.dtype), k, v, scale, scoring).float()

    def attention_over_runs(
        self, q: Tensor, cache: KvLayer, plan: BatchPlan, scale: float, scoring: Scoring = PLAIN
    ) -> Tensor:
        """One call for all sequences with one token, one call for each other sequence."""
        assert isinstance(cache, TorchKvLayer) and isinstance(plan, TorchPlan), "pages of another kernel set"
        mixed = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        if plan.decodes is not None:
            self._attend_decoding(q, cache, plan.decodes, scale, scoring, mixed)
        for run in plan.prefills:
            k, v = cache.keys(run.pages, run.n_held), cache.values(run.pages, run.n_held)
            queries = q[run.rows].to(self._attention_dtype(cache))
            if run.positions is None:
                block = BlockRange.whole(len(run.rows), run.n_held) if run.bidirectional else None
                rows = attend(queries, k, v, scale, scoring, block)
            else:
                rows = attend_at(run.positions, queries, k, v, scale, scoring)
            mixed[run.rows] = rows.float()
        return mixed

    def _attend_decoding(
        self, q: Tensor, cache: TorchKvLayer, group: DecodeGroup, scale: float, scoring: Scoring, mixed: Tensor
    ) -> None:
        """Write the rows of ``mixed``, float32 [T, H, D], of the sequences with one token."""
        queries = q[group.rows].to(self._attention_dtype(cache))
        mixed[group.rows] = attend_one_token_each(queries, cache, group, scale, scoring).float()

    def _attention_dtype(self, cache: TorchKvLayer) -> torch.dtype:
        return torch.float32 if cache.is_float32 else self.dtype

    def _expanded(self, weight: TorchWeight) -> Tensor | None:
        n_bytes = self._dtype_of(weight).itemsize * weight.n_out * weight.n_in
        with self._lock:
            if weight.expanded is None and n_bytes <= self._free_bytes:
                weight.expanded = self._unpacked(weight, slice(None))
                self._free_bytes -= n_bytes
        return weight.expanded

    def _unpacked(self, weight: TorchWeight, rows: slice) -> Tensor:
        packed, dtype, ggml_type = weight.packed[rows], self._dtype_of(weight), weight.tensor.ggml_type
        if (stored := _FLOATS.get(ggml_type)) is not None:
            return packed.view(stored).to(dtype)
        if self._profile.compile:
            return unpack_compiled(packed, ggml_type, dtype)
        return unpack(packed, ggml_type).to(dtype)

    def _dtype_of(self, weight: Weight) -> torch.dtype:
        """The number format of products with a matrix; F32 weights are not rounded."""
        return torch.float32 if weight.tensor.ggml_type is GgmlType.F32 else self.dtype


def _check(tensor: QuantizedTensor) -> None:
    try:
        check_tensor(tensor.data, tensor.ggml_type, tensor.shape)
    except ModelError as error:
        raise type(error)(f"tensor {tensor.name!r}: {error}") from None
