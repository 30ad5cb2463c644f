"""Stores that share page tables: the layers of a model whose heads are alike have one together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidSnapshot
from slm_native.kv.codecs import Array, Planes
from slm_native.kv.plan import n_pages_of
from slm_native.kv.store import PAGE_TOKENS, KvLayer, PageLayout, PageStore
from slm_native.kv.tables import Pages

NewStore: TypeAlias = Callable[[PageLayout, int], PageStore]
"""Makes pages of a layout, so many, where the kernel set computes."""
Rotate: TypeAlias = Callable[[Array, int, Sequence[int]], Array]
"""Moves float32 keys [n, L, K, D] by a number of positions; which blocks' they are [L] comes last."""
_ROTATED_AT_A_TIME = 256  # tokens; bounds what a cut takes besides the tokens themselves


class StoreGroup:
    """Several stores in which a page has the same number.

    Args:
        layouts: of a page in each.
        n_pages: that there are.
        new_store: makes a store.

    Raises:
        InvalidOption: the system refuses so much memory.
    """

    def __init__(self, layouts: Sequence[PageLayout], n_pages: int, new_store: NewStore) -> None:
        self._n_pages = n_pages
        self._stores = [new_store(layout, n_pages) for layout in layouts]

    @property
    def by_block(self) -> dict[int, KvLayer]:
        """The cache of each layer, by the block of the model that it is."""
        return {
            block: layer
            for store in self._stores
            for block, layer in zip(store.layout.blocks, store.layers, strict=True)
        }

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all stores."""
        return sum(store.layout.page_bytes // PAGE_TOKENS for store in self._stores)

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages of all stores."""
        return self._n_pages * PAGE_TOKENS * self.token_bytes

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages."""
        for store in self._stores if sources else ():
            store.copy(sources, targets)

    def export(self, pages: Pages, positions: NDArray[np.intp]) -> bytes:
        """The tokens at ``positions`` on ``pages``: planes [n, L, K, W], store by store, those of the keys first."""
        planes = [store.to_host(plane).tobytes() for store in self._stores for plane in store.read(pages, positions)]
        return b"".join(planes)

    def read_payload(self, payload: bytes, n_tokens: int) -> list[list[NDArray[Any]]]:
        """What ``export`` gave, taken apart: the planes of each store.

        Raises:
            InvalidSnapshot: the wrong size, or numbers that no model computes.
        """
        n_bytes = n_tokens * self.token_bytes
        if len(payload) != n_bytes:
            raise InvalidSnapshot(f"the KV payload has {len(payload)} bytes, {n_tokens} tokens take {n_bytes}")
        planes, offset = [], 0
        for store in self._stores:
            planes.append(_planes_in(payload, offset, n_tokens, store.layout))
            offset += sum(plane.nbytes for plane in planes[-1])
        return planes

    def fill(self, pages: Sequence[int], planes: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Fill pages, which nobody holds, with what ``read_payload`` gave."""
        for store, tokens in zip(self._stores, planes, strict=True):
            store.put(pages, store.packed(len(pages), [store.from_host(plane) for plane in tokens]))

    def without(self, pages: Pages, positions: NDArray[np.intp], n_kept: int, delta: int, rotate: Rotate) -> list[Any]:
        """For ``put``: the tokens at ``positions`` on ``pages``, those from the ``n_kept``-th on rotated."""
        packed = []
        for store in self._stores:
            tokens = store.read(pages, positions)
            _rotate(store, [plane[n_kept:] for plane in tokens], delta, rotate)
            packed.append(store.packed(n_pages_of(len(positions)), tokens))
        return packed

    def put(self, pages: Sequence[int], packed: Sequence[Any]) -> None:
        """Fill pages with what ``without`` made."""
        for store, tokens in zip(self._stores, packed, strict=True):
            store.put(pages, tokens)


def in_model_order(by_block: Mapping[int, KvLayer]) -> list[KvLayer]:
    """The layers of one or several groups, block by block."""
    return [by_block[block] for block in sorted(by_block)]


def _rotate(store: PageStore, planes: Planes, delta: int, rotate: Rotate) -> None:
    """Rotate the keys among ``planes`` [n_tokens, L, K, W] by ``delta`` positions, in place."""
    codec, blocks = store.keys, store.layout.blocks
    keys = planes[: len(codec.planes)]
    for first in range(0, len(keys[0]), _ROTATED_AT_A_TIME):
        chunk = [plane[first : first + _ROTATED_AT_A_TIME] for plane in keys]
        rotated = rotate(codec.decode(chunk), delta, blocks)
        for plane, part in zip(chunk, codec.encode(rotated), strict=True):
            plane[...] = part


def _planes_in(payload: bytes, offset: int, length: int, layout: PageLayout) -> list[NDArray[Any]]:
    """A store's planes [length, L, K, W] in a payload, from ``offset`` on.

    Raises:
        InvalidSnapshot: numbers that no model computes.
    """
    planes: list[NDArray[Any]] = []
    for dtype, width in layout.plane_types():
        shape = (length, layout.n_layers, layout.n_kv_heads, width)
        planes.append(np.frombuffer(payload, dtype, math.prod(shape), offset).reshape(shape))
        offset += planes[-1].nbytes
    n_keys = len(layout.keys.planes)
    if not (layout.keys.is_bounded(planes[:n_keys]) and layout.values.is_bounded(planes[n_keys:] or planes)):
        raise InvalidSnapshot("the KV payload holds a number that no model computes (accepted: magnitudes up to 1e12)")
    return planes
