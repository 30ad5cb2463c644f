"""Storage of keys and values: pages in one buffer, with typed views."""

from __future__ import annotations

import contextlib
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidOption
from slm_native.kv.codecs import Array, KvCodec, Planes

PAGE_TOKENS = 64
PageIndex: TypeAlias = slice | NDArray[np.intp]
"""Pages of one sequence in order; a slice if they are contiguous."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of a page: an array [L, K, 64, W] for each plane of keys, then of values if they are not the keys.

    Attributes:
        blocks: the blocks of the model whose keys and values it holds [L], in order; all with the same shape of heads.
        n_kv_heads: K.
        head_dim: D.
        keys: codec of the keys.
        values: codec of the values; the same if values are the keys.
        values_in_keys: whether the keys are also the values, and stored once.
    """

    blocks: Sequence[int]
    n_kv_heads: int
    head_dim: int
    keys: KvCodec
    values: KvCodec
    values_in_keys: bool = False

    @property
    def n_layers(self) -> int:
        """L."""
        return len(self.blocks)

    def plane_types(self) -> list[tuple[np.dtype[Any], int]]:
        """The dtype and the width W of each plane, planes of keys first."""
        planes = self.keys.planes if self.values_in_keys else (*self.keys.planes, *self.values.planes)
        return [(dtype, self.head_dim // n_shared) for dtype, n_shared in planes]

    def token_bytes(self, dtype: np.dtype[Any], width: int) -> int:
        """Bytes of one token in a plane."""
        return self.n_layers * self.n_kv_heads * width * dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return PAGE_TOKENS * sum(self.token_bytes(*plane) for plane in self.plane_types())

    def pages(self, n_pages: int) -> NDArray[np.uint8]:
        """Zeroed pages [n_pages, page_bytes]; the system provides their memory when they are first written."""
        return np.zeros((n_pages, self.page_bytes), np.uint8)

    def reserved(self, n_pages: int) -> NDArray[np.uint8]:
        """Like ``pages``, but never written: NumPy clears memory that the process has used before.

        Raises:
            MemoryError: the system refuses to allocate the memory.
        """
        try:
            access = mmap.ACCESS_WRITE if sys.platform == "win32" else mmap.ACCESS_COPY  # Linux: private memory
            memory = mmap.mmap(-1, n_pages * self.page_bytes, access=access)
        except (OSError, OverflowError, ValueError) as error:
            if n_pages * self.page_bytes == 0:
                return self.pages(n_pages)
            raise MemoryError(str(error)) from error
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # the system has no huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
        return np.frombuffer(memory, np.uint8).reshape(n_pages, -1)

    def views(self, pages: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """The planes [n_pages, L, K, 64, W] of pages, as views."""
        planes, start = [], 0
        for dtype, width in self.plane_types():
            end = start + PAGE_TOKENS * self.token_bytes(dtype, width)
            plane = pages[:, start:end].view(dtype)
            planes.append(plane.reshape(len(pages), self.n_layers, self.n_kv_heads, PAGE_TOKENS, width))
            start = end
        return planes


class KvLayer(ABC):
    """Keys and values of one layer of all sequences, in the arrays of the kernel set that reads them."""

    __slots__ = ()

    @abstractmethod
    def write(self, pages: Array, slots: Array, k: Array, v: Array) -> None:
        """Store the keys and values [T, K, D] of tokens in their pages [T] and slots [T]."""

    @abstractmethod
    def keys(self, pages: Array, n_tokens: int) -> Array:
        """The keys of the first tokens on some pages: float32 [n_tokens, K, D]."""

    @abstractmethod
    def values(self, pages: Array, n_tokens: int) -> Array:
        """The values of the first tokens on some pages: float32 [n_tokens, K, D]."""


class PageStore(ABC):
    """All pages of a context, on the kernel set's device.

    Attributes:
        layout: layout of a page.
        layers: the pages as each layer sees them [L].
        keys: codec of the keys, on arrays of this store.
    """

    layout: PageLayout
    layers: Sequence[KvLayer]
    keys: KvCodec

    @abstractmethod
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages."""

    @abstractmethod
    def read(self, pages: Sequence[int], positions: NDArray[np.intp]) -> list[Array]:
        """Copy the tokens at some positions of a sequence with these pages: [n_tokens, L, K, W] for each plane."""

    @abstractmethod
    def read_plane(self, i: int, pages: Sequence[int], positions: NDArray[np.intp]) -> Array:
        """Plane ``i`` of ``read``, [n_tokens, L, K, W]."""

    @abstractmethod
    def write_plane(self, i: int, pages: Sequence[int], positions: NDArray[np.intp], plane: Array) -> None:
        """Write a plane of ``read_plane``."""

    @abstractmethod
    def packed(self, n_pages: int, tokens: Planes) -> Any:
        """Tokens, one array [n_tokens, L, K, W] per plane, in the layout of pages, outside the cache.

        Everything that can run out of memory happens here, not in ``put``.
        """

    @abstractmethod
    def put(self, pages: Sequence[int], packed: Any) -> None:
        """Overwrite pages with the result of ``packed``, all at once."""

    @abstractmethod
    def to_host(self, plane: Array) -> NDArray[Any]:
        """A plane of ``read`` as a NumPy array."""

    @abstractmethod
    def from_host(self, plane: NDArray[Any]) -> Array:
        """A NumPy array as a plane for ``packed``."""


class HostKvLayer(KvLayer):
    """One layer in NumPy.

    Args:
        layout: of the pages.
        planes: the layer's part of each plane, [n_pages, K, 64, W].
    """

    __slots__ = ("_key_planes", "_layout", "_value_planes")

    def __init__(self, layout: PageLayout, planes: Planes) -> None:
        n = len(layout.keys.planes)
        self._layout = layout
        self._key_planes, self._value_planes = planes[:n], planes[n:] or planes

    def write(self, pages: Array, slots: Array, k: Array, v: Array) -> None:
        """Encode, then assign."""
        for plane, part in zip(self._key_planes, self._layout.keys.encode(k), strict=True):
            plane[pages, :, slots] = part
        for plane, part in zip(self._value_planes, self._layout.values.encode(v), strict=True):
            plane[pages, :, slots] = part

    def keys(self, pages: Array, n_tokens: int) -> Array:
        """C-contiguous."""
        return self._layout.keys.decode([_gathered(plane, pages, n_tokens) for plane in self._key_planes])

    def values(self, pages: Array, n_tokens: int) -> Array:
        """C-contiguous."""
        return self._layout.values.decode([_gathered(plane, pages, n_tokens) for plane in self._value_planes])


class HostPageStore(PageStore):
    """Pages in NumPy.

    Args:
        layout: layout of a page.
        n_pages: number of pages.

    Raises:
        InvalidOption: the system refuses to allocate the memory.
    """

    def __init__(self, layout: PageLayout, n_pages: int) -> None:
        self.layout = layout
        self.keys = layout.keys
        try:
            self._pages = layout.reserved(n_pages)
        except MemoryError as error:
            raise InvalidOption(
                f"a KV cache of {n_pages * layout.page_bytes} bytes is more than this machine can reserve: use a"
                " smaller n_ctx or n_seq_max (each sequence has up to three pages of 64 tokens), or KV types that take"
                " less (f16, q8_0)"
            ) from error
        self._views = layout.views(self._pages)
        self.layers = [self._layer(i, [view[:, i] for view in self._views]) for i in range(layout.n_layers)]

    def _layer(self, i: int, planes: Planes) -> KvLayer:
        """Layer ``i``, with its part of each plane."""
        return HostKvLayer(self.layout, planes)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """One fancy assignment."""
        self._pages[targets] = self._pages[sources]

    def read(self, pages: Sequence[int], positions: NDArray[np.intp]) -> list[Array]:
        """One gather for each plane."""
        return [self.read_plane(i, pages, positions) for i in range(len(self._views))]

    def read_plane(self, i: int, pages: Sequence[int], positions: NDArray[np.intp]) -> Array:
        """One gather."""
        return self._views[i][np.array(pages, np.intp)[positions // PAGE_TOKENS], :, :, positions % PAGE_TOKENS]

    def write_plane(self, i: int, pages: Sequence[int], positions: NDArray[np.intp], plane: Array) -> None:
        """One scatter."""
        self._views[i][np.array(pages, np.intp)[positions // PAGE_TOKENS], :, :, positions % PAGE_TOKENS] = plane

    def packed(self, n_pages: int, tokens: Planes) -> Any:
        """Bytes in the cache's layout."""
        packed = self.layout.pages(n_pages)
        positions = np.arange(len(tokens[0]))
        for view, plane in zip(self.layout.views(packed), tokens, strict=True):
            view[positions // PAGE_TOKENS, :, :, positions % PAGE_TOKENS] = plane
        return packed

    def put(self, pages: Sequence[int], packed: Any) -> None:
        """One fancy assignment."""
        self._pages[list(pages)] = packed

    def to_host(self, plane: Array) -> NDArray[Any]:
        """Already on the host."""
        host: NDArray[Any] = plane
        return host

    def from_host(self, plane: NDArray[Any]) -> Array:
        """Already on the host."""
        return plane


def _gathered(plane: NDArray[Any], pages: Array, n_tokens: int) -> NDArray[Any]:
    """[n_pages, K, 64, W] to [n_tokens, K, W]."""
    by_token = plane[pages].transpose(0, 2, 1, 3)  # [P, 64, K, W]
    return by_token.reshape(-1, *by_token.shape[2:])[:n_tokens]
