"""The KV cache of the cpu tier: the same pages as NumPy's, with C++ handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slm_core.types import KvType
from slm_native.kernels.cpu.handles import extension
from slm_native.kv import Array, BatchPlan, HostKvLayer, HostPageStore, KvLayer, PageLayout, Planes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slm_native import _native

KV_TYPES = (KvType.F32, KvType.F16, KvType.BF16, KvType.Q8_0, KvType.Q6_0, KvType.Q5_0, KvType.Q4_0)


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan(BatchPlan):
    """A plan with its runs as a C++ batch.

    Attributes:
        native: the runs, without the biases of keys.
        has_biases: whether keys have attention biases, which C++ does not add.
    """

    native: _native.Batch
    has_biases: bool


class CpuKvLayer(HostKvLayer):
    """One layer, written by C++.

    Args:
        layout: layout of a page.
        planes: the layer's part of each plane, [n_pages, K, 64, W].
        kernels: the C++ kernels.
        native: the layer in C++.
    """

    __slots__ = ("_kernels", "native")

    def __init__(
        self, layout: PageLayout, planes: Planes, kernels: _native.Kernels, native: _native.CacheLayer
    ) -> None:
        super().__init__(layout, planes)
        self._kernels = kernels
        self.native = native

    def write(self, pages: Array, slots: Array, k: Array, v: Array) -> None:
        """Encode in place."""
        self._kernels.write(self.native, pages, slots, np.ascontiguousarray(k), np.ascontiguousarray(v))


class CpuPageStore(HostPageStore):
    """Pages that C++ reads and writes.

    Args:
        layout: layout of a page.
        n_pages: number of pages.
        kernels: the C++ kernels.

    Raises:
        InvalidOption: the system refuses to allocate the memory.
    """

    def __init__(self, layout: PageLayout, n_pages: int, kernels: _native.Kernels) -> None:
        self._kernels = kernels
        super().__init__(layout, n_pages)

    def _layer(self, i: int, planes: Planes) -> KvLayer:
        layout = self.layout
        types = str(layout.keys.kv_type), "" if layout.values_in_keys else str(layout.values.kv_type)
        sizes = layout.n_layers, i, layout.n_kv_heads, layout.head_dim
        native = extension().CacheLayer.of(self._pages, *types, *sizes)
        return CpuKvLayer(layout, planes, self._kernels, native)


def placed(plan: BatchPlan) -> CpuPlan:
    """The plan with its runs as a C++ batch."""
    tokens = [_indices(run.rows) for run in plan.runs]
    counts = np.array([len(rows) for rows in tokens], np.int32)
    n_held = np.array([run.n_held for run in plan.runs], np.int32)
    bidirectional = np.array([run.bidirectional for run in plan.runs], np.int32)
    pages = _joined([_indices(run.pages) for run in plan.runs])
    batch = extension().Batch(_joined(tokens), pages, counts, n_held, bidirectional)
    has_biases = any(run.bias is not None for run in plan.runs)
    return CpuPlan(plan.runs, plan.pages, plan.slots, plan.tables, batch, has_biases)


def _indices(which: slice | NDArray[np.intp]) -> NDArray[np.int32]:
    return np.arange(which.start, which.stop, dtype=np.int32) if isinstance(which, slice) else which.astype(np.int32)


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
