"""Page stores that share page tables: one store for all layers with the same shape of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.context.payload import PIECE_BYTES, Section
from slm_core.errors import InvalidSnapshot
from slm_native.kv.codecs import Array, Planes
from slm_native.kv.plan import n_pages_of
from slm_native.kv.store import PAGE_TOKENS, KvLayer, PageLayout, PageStore
from slm_native.kv.tables import Pages

NewStore: TypeAlias = Callable[[PageLayout, int], PageStore]
"""Allocates a number of pages of a layout on the kernel set's device."""
Rotate: TypeAlias = Callable[[Array, int, Sequence[int]], Array]
"""Rotates float32 keys [n, L, K, D] by a number of positions; the last argument is the block numbers [L]."""
_ROTATED_AT_A_TIME = 256  # tokens; bounds the temporary memory of a cut


class StoreGroup:
    """Several stores in which a page has the same number.

    Args:
        layouts: the page layout of each store.
        n_pages: pages of each store.
        new_store: allocates a store.

    Raises:
        InvalidOption: the system refuses to allocate the memory.
    """

    def __init__(self, layouts: Sequence[PageLayout], n_pages: int, new_store: NewStore) -> None:
        self._n_pages = n_pages
        self._stores = [new_store(layout, n_pages) for layout in layouts]

    @property
    def by_block(self) -> dict[int, KvLayer]:
        """The cache of each layer, by block number."""
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

    def export(self, pages: Pages, positions: NDArray[np.intp]) -> Iterator[bytes]:
        """Planes [n, L, K, W] of the tokens at ``positions`` on ``pages``: store by store, keys before values.

        A piece belongs to one plane. The pages must not change until the last piece is read.
        """
        for plane in self._planes():
            n_at_once = max(1, PIECE_BYTES // max(1, plane.unit_bytes))
            for first in range(0, len(positions), n_at_once):
                yield plane.read(pages, positions[first : first + n_at_once])

    def sections(self, pages: Pages | None, positions: NDArray[np.intp]) -> list[Section]:
        """The sections of a payload of ``export``.

        Args:
            pages: where it is written; None to check only.
            positions: positions of the tokens on these pages.
        """
        return [
            Section(len(positions), plane.unit_bytes, partial(plane.write, pages, positions))
            for plane in self._planes()
        ]

    def _planes(self) -> list[_Plane]:
        return [_Plane(store, i) for store in self._stores for i in range(len(store.layout.plane_types()))]

    def without(self, pages: Pages, positions: NDArray[np.intp], n_kept: int, delta: int, rotate: Rotate) -> list[Any]:
        """The tokens at ``positions`` on ``pages``, packed for ``put``; keys from token ``n_kept`` on are rotated."""
        packed = []
        for store in self._stores:
            tokens = store.read(pages, positions)
            _rotate(store, [plane[n_kept:] for plane in tokens], delta, rotate)
            packed.append(store.packed(n_pages_of(len(positions)), tokens))
        return packed

    def put(self, pages: Sequence[int], packed: Sequence[Any]) -> None:
        """Overwrite pages with the result of ``without``."""
        for store, tokens in zip(self._stores, packed, strict=True):
            store.put(pages, tokens)


def in_model_order(by_block: Mapping[int, KvLayer]) -> list[KvLayer]:
    """The layers of one or several groups, sorted by block."""
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


class _Plane:
    """Reads and writes one plane of a store for payloads.

    Args:
        store: the store.
        i: index of the plane.
    """

    def __init__(self, store: PageStore, i: int) -> None:
        layout, self._store, self._i = store.layout, store, i
        self._dtype, width = layout.plane_types()[i]
        self._shape = layout.n_layers, layout.n_kv_heads, width
        self._codec = layout.keys if i < len(layout.keys.planes) else layout.values
        self.unit_bytes = layout.token_bytes(self._dtype, width)

    def read(self, pages: Pages, positions: NDArray[np.intp]) -> bytes:
        """Tokens of the plane, [n, L, K, W]."""
        return self._store.to_host(self._store.read_plane(self._i, pages, positions)).tobytes()

    def write(self, pages: Pages | None, positions: NDArray[np.intp], first: int, data: bytes) -> None:
        """Check tokens, and write them to ``pages``, if given, at ``positions`` from ``first`` on.

        Raises:
            InvalidSnapshot: numbers that no model computes.
        """
        plane = np.frombuffer(data, self._dtype).reshape(-1, *self._shape)
        if not self._codec.is_bounded([plane]):
            raise InvalidSnapshot(
                "the KV payload holds a number that no model computes (accepted: magnitudes up to 1e12)"
            )
        if pages is not None:
            where = positions[first : first + len(plane)]
            self._store.write_plane(self._i, pages, where, self._store.from_host(plane))
