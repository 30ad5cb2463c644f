"""The pages of the KV cache in a device's memory, with the same bytes as in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slm_core.errors import InvalidOption
from slm_core.types import KvType
from slm_native.kernels.torch.codecs import device_codec, plane_type
from slm_native.kernels.torch.devices import memory
from slm_native.kv import PAGE_TOKENS, BatchPlan, KvCodec, KvLayer, PageLayout, PageStore, Planes

_N_ARRIVALS = 4096  # one for each key head of each sequence of a step


class TorchKvLayer(KvLayer):
    """One layer of the pages.

    Args:
        key_codec: codec of the keys.
        value_codec: codec of the values.
        planes: the layer's part of each plane, [n_pages, K, 64, W], keys before values; keys may be the values.
        arrivals: int32 [n], zeros: counters for kernels, which leave them at 0. All layers of a cache share them.
    """

    __slots__ = (
        "__weakref__",
        "_key_codec",
        "_value_codec",
        "arrivals",
        "key_planes",
        "key_type",
        "value_planes",
        "value_type",
    )

    def __init__(self, key_codec: KvCodec, value_codec: KvCodec, planes: Sequence[Tensor], arrivals: Tensor) -> None:
        n = len(key_codec.planes)
        self._key_codec, self._value_codec = key_codec, value_codec
        self.key_type, self.value_type = key_codec.kv_type, value_codec.kv_type
        self.key_planes, self.value_planes = planes[:n], planes[n:] or planes
        self.arrivals = arrivals

    @property
    def n_pages(self) -> int:
        """The number of pages."""
        return len(self.key_planes[0])

    @property
    def is_float32(self) -> bool:
        """Whether keys and values are stored in float32."""
        return self.key_type is self.value_type is KvType.F32

    def write(self, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Encode, then scatter."""
        for plane, part in zip(self.key_planes, self._key_codec.encode(k), strict=True):
            plane[pages, :, slots] = part
        for plane, part in zip(self.value_planes, self._value_codec.encode(v), strict=True):
            plane[pages, :, slots] = part

    def keys(self, pages: Tensor, n_tokens: int) -> Tensor:
        """The first keys on ``pages``, int64 [..., P]: float32 [..., n_tokens, K, D]."""
        decoded: Tensor = self._key_codec.decode([_gathered(plane, pages, n_tokens) for plane in self.key_planes])
        return decoded

    def values(self, pages: Tensor, n_tokens: int) -> Tensor:
        """The first values on ``pages``, int64 [..., P]: float32 [..., n_tokens, K, D]."""
        decoded: Tensor = self._value_codec.decode([_gathered(plane, pages, n_tokens) for plane in self.value_planes])
        return decoded


class TorchPageStore(PageStore):
    """Pages on a device.

    Args:
        layout: layout of a page.
        n_pages: number of pages.
        device: the device.

    Raises:
        InvalidOption: the device has too little free memory.
    """

    def __init__(self, layout: PageLayout, n_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.keys, values = device_codec(layout.keys), device_codec(layout.values)
        self.device = device
        self._pages = _reserve(layout, n_pages, device)
        self._views = self._planes_of(self._pages)
        arrivals = torch.zeros(_N_ARRIVALS, dtype=torch.int32, device=device)
        self.layers = [
            TorchKvLayer(self.keys, values, [view[:, i] for view in self._views], arrivals)
            for i in range(layout.n_layers)
        ]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """One scatter."""
        self._pages[self._index(targets)] = self._pages[self._index(sources)]

    def read(self, pages: Sequence[int], positions: NDArray[np.intp]) -> list[Tensor]:
        """One gather for each plane."""
        page_of, slots = self._places(pages, positions)
        return [view[page_of, :, :, slots] for view in self._views]

    def read_plane(self, i: int, pages: Sequence[int], positions: NDArray[np.intp]) -> Tensor:
        """One gather."""
        page_of, slots = self._places(pages, positions)
        return self._views[i][page_of, :, :, slots]

    def write_plane(self, i: int, pages: Sequence[int], positions: NDArray[np.intp], plane: Tensor) -> None:
        """One scatter."""
        page_of, slots = self._places(pages, positions)
        self._views[i][page_of, :, :, slots] = plane

    def packed(self, n_pages: int, tokens: Planes) -> Tensor:
        """Bytes in the cache's layout, on the device."""
        packed = torch.zeros((n_pages, self.layout.page_bytes), dtype=torch.uint8, device=self.device)
        positions = np.arange(len(tokens[0]))
        page_of, slots = self._index(positions // PAGE_TOKENS), self._index(positions % PAGE_TOKENS)
        for view, plane in zip(self._planes_of(packed), tokens, strict=True):
            view[page_of, :, :, slots] = plane
        return packed

    def put(self, pages: Sequence[int], packed: Tensor) -> None:
        """One scatter."""
        self._pages[self._index(pages)] = packed

    def to_host(self, plane: Tensor) -> NDArray[Any]:
        """Copy from the device; unsigned integers become signed ones with the same bits."""
        host: NDArray[Any] = plane.contiguous().cpu().numpy()
        return host

    def from_host(self, plane: NDArray[Any]) -> Tensor:
        """Copy to the device."""
        return torch.from_numpy(plane.copy()).view(plane_type(plane.dtype)).to(self.device)

    def _planes_of(self, pages: Tensor) -> list[Tensor]:
        """The planes [n_pages, L, K, 64, W] of pages, as views."""
        layout, start = self.layout, 0
        planes = []
        for dtype, width in layout.plane_types():
            end = start + PAGE_TOKENS * layout.token_bytes(dtype, width)
            plane = pages[:, start:end].view(plane_type(dtype))
            planes.append(plane.view(len(pages), layout.n_layers, layout.n_kv_heads, PAGE_TOKENS, width))
            start = end
        return planes

    def _places(self, pages: Sequence[int], positions: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        """The page and the slot of each position."""
        return self._index(np.array(pages, np.intp)[positions // PAGE_TOKENS]), self._index(positions % PAGE_TOKENS)

    def _index(self, ids: Sequence[int] | NDArray[np.intp]) -> Tensor:
        return torch.as_tensor(np.asarray(ids, np.int64)).to(self.device)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """The sequences of a batch with one token each.

    Attributes:
        rows: int64 [B], their tokens' indices in the batch.
        tables: int64 [B, P], the pages of each, padded with page 0.
        n_held: int64 [B], number of tokens of each.
        longest: the largest ``n_held``, or more.
    """

    rows: Tensor
    tables: Tensor
    n_held: Tensor
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """A sequence with several tokens in the batch.

    Attributes:
        rows: int64 [T], the tokens' indices in the batch.
        pages: int64 [P], the sequence's pages.
        n_held: number of tokens, including the batch's; with ``positions``, the capacity of the pages.
        positions: int64 [T], the tokens' positions, for captured steps, which depend only on shapes.
        bidirectional: whether the tokens are a bidirectional block.
    """

    rows: Tensor
    pages: Tensor
    n_held: int
    positions: Tensor | None = None
    bidirectional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TorchPlan(BatchPlan):
    """A plan with tensors as indices.

    Attributes:
        decodes: the sequences with one token; None if there are none.
        prefills: the other sequences.
    """

    decodes: DecodeGroup | None
    prefills: Sequence[Prefill]


def place(plan: BatchPlan, least_table: int = 0) -> TorchPlan:
    """A plan's indices as host tensors; they are copied together with the other inputs of a step.

    Args:
        plan: the plan of the cache.
        least_table: if not 0, tables of sequences with one token are padded to a power of two of pages, and at least to
            this one.
    """

    def index(ids: Any) -> Tensor:
        return torch.from_numpy(np.asarray(ids, np.int64))

    n_tokens = len(plan.pages)
    singles, prefills = [], []
    for run in plan.runs:
        rows = np.arange(n_tokens)[run.rows]
        pages = np.arange(run.pages.start, run.pages.stop) if isinstance(run.pages, slice) else run.pages
        if len(rows) == 1:
            singles.append((int(rows[0]), pages, run.n_held))
        else:
            prefills.append(Prefill(index(rows), index(pages), run.n_held, None, run.bidirectional))
    return TorchPlan(
        plan.runs, index(plan.pages), index(plan.slots), plan.tables, _group(singles, index, least_table), prefills
    )


def _group(singles: list[tuple[int, NDArray[np.intp], int]], index: Any, least_table: int) -> DecodeGroup | None:
    if not singles:
        return None
    width = max(len(pages) for _, pages, _ in singles)
    if least_table:
        width = max(least_table, 1 << (width - 1).bit_length())
    tables = np.zeros((len(singles), width), np.int64)
    for i, (_, pages, _) in enumerate(singles):
        tables[i, : len(pages)] = pages
    lengths = [n_held for _, _, n_held in singles]
    longest = width * PAGE_TOKENS if least_table else max(lengths)
    return DecodeGroup(index([row for row, _, _ in singles]), index(tables), index(lengths), longest)


def _reserve(layout: PageLayout, n_pages: int, device: torch.device) -> Tensor:
    n_bytes = n_pages * layout.page_bytes
    free, _ = memory(device)
    if free is not None and n_bytes > free:
        raise InvalidOption(
            f"a KV cache of {n_bytes >> 20} MiB is more than the {free >> 20} MiB that are free on {device}: use a"
            " smaller n_ctx, or KV types that take less (f16, q8_0)"
        )
    if device.type != "cpu":
        return torch.zeros((n_pages, layout.page_bytes), dtype=torch.uint8, device=device)
    try:
        return torch.from_numpy(layout.reserved(n_pages))  # the system allocates memory on the first write
    except MemoryError as error:
        raise InvalidOption(
            f"a KV cache of {n_bytes} bytes is more than this machine can reserve: use a smaller n_ctx, or KV types"
            " that take less (f16, q8_0)"
        ) from error


def _gathered(plane: Tensor, pages: Tensor, n_tokens: int) -> Tensor:
    """[n_pages, K, 64, W] to [..., n_tokens, K, W]."""
    by_token = plane[pages].transpose(-3, -2)  # [..., P, 64, K, W]
    return by_token.reshape(*pages.shape[:-1], -1, *by_token.shape[-2:])[..., :n_tokens, :, :]
