"""The adapters of each sequence of a context, and batches of sequences with different adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters import AdapterSet, LoadedAdapters
from slm_core.context.batch import TokenBatch
from slm_core.errors import SnapshotMismatch, UnsupportedInput
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED, TopLogits

R = TypeVar("R", NDArray[np.float32], TopLogits)


class SequenceAdapters:
    """The adapters of the sequences, and the adapters that the engine uses now.

    Args:
        loaded: the adapters of the model; None if the context does not declare ``ADAPTERS``.
    """

    def __init__(self, loaded: LoadedAdapters | None) -> None:
        self._loaded = loaded
        self._sets: dict[int, AdapterSet] = {}  # by sequence, without sequences that have none
        self._used: AdapterSet | None = ()  # None: unknown, after a failure

    def of(self, seq_id: int) -> AdapterSet:
        """The adapters of a sequence."""
        return self._sets.get(seq_id, ())

    def put(self, seq_id: int, adapters: AdapterSet) -> None:
        """Give a sequence its adapters."""
        if adapters:
            self._sets[seq_id] = adapters
        else:
            self._sets.pop(seq_id, None)

    def state(self) -> dict[int, AdapterSet]:
        """The adapters of all sequences that have some; a copy."""
        return dict(self._sets)

    def put_back(self, state: Mapping[int, AdapterSet]) -> None:
        """Give all sequences the adapters of ``state``."""
        self._sets = dict(state)

    def named(self, scales: Mapping[str, float]) -> AdapterSet:
        """Loaded adapters by name.

        Raises:
            UnsupportedInput: the context takes no adapters.
            InvalidOption: see ``LoadedAdapters.set_of``.
        """
        if self._loaded is not None:
            return self._loaded.set_of(scales)
        if scales:
            raise UnsupportedInput("this context takes no adapters: it does not declare adapters")
        return ()

    def dumped(self, scales: Mapping[str, float]) -> AdapterSet:
        """Loaded adapters by fingerprint.

        Raises:
            SnapshotMismatch: one is not loaded, or the context takes none.
        """
        if self._loaded is not None:
            return self._loaded.of_dump(scales)
        if scales:
            raise SnapshotMismatch(
                "the dump was made with adapters (restore it in a context where adapters is declared)"
            )
        return ()

    def use(self, seq_id: int, engine_use: Callable[[AdapterSet], None]) -> None:
        """Call ``engine_use`` with the adapters of a sequence, unless the engine already computes with them."""
        if self._loaded is None:
            return
        adapters = self.of(seq_id)
        if self._used is None or _keys(adapters) != _keys(self._used):
            self._used = None
            engine_use(adapters)
            self._used = adapters

    def groups(self, seq_ids: Sequence[int]) -> list[list[int]]:
        """Sequences with equal adapters together."""
        if not self._sets:
            return [list(seq_ids)]
        groups: dict[object, list[int]] = {}
        for seq_id in seq_ids:
            groups.setdefault(tuple(_keys(self.of(seq_id))), []).append(seq_id)
        return list(groups.values())


def scales_of(adapters: AdapterSet) -> dict[str, float]:
    """The scales of adapters, by name."""
    return {use.adapter.info.name: use.scale for use in adapters}


def dumped_scales(adapters: AdapterSet) -> dict[str, float]:
    """The scales of adapters, by fingerprint."""
    scales: dict[str, float] = {}
    for use in adapters:
        fingerprint = use.adapter.info.fingerprint
        scales[fingerprint] = scales.get(fingerprint, 0.0) + use.scale
    return scales


def are_equal(first: AdapterSet, second: AdapterSet) -> bool:
    """Whether two sets compute the same."""
    return _keys(first) == _keys(second)


def part_of(batch: Batch, seq_ids: Sequence[int]) -> TokenBatch:
    """The tokens of some sequences of a batch."""
    in_part = np.isin(batch.seq_ids, seq_ids)
    rows = in_part[batch.tokens == EMBEDDED]
    return TokenBatch.from_arrays(
        tokens=batch.tokens[in_part],
        seq_ids=batch.seq_ids[in_part],
        positions=batch.positions[in_part],
        logits_mask=batch.logits_mask[in_part],
        ahead=batch.ahead[in_part],
        embeddings=batch.embeddings[rows] if len(batch.embeddings) else batch.embeddings,
        offsets=batch.offsets[rows] if len(batch.offsets) else batch.offsets,
        bias=batch.bias[rows] if len(batch.bias) else batch.bias,
    )


def in_batch_order(batch: Batch, groups: Sequence[Sequence[int]], results: Sequence[R]) -> R:
    """Rows of parts of a batch, in the order of the whole batch."""
    seq_ids = batch.seq_ids[batch.logits_mask]
    order = np.argsort(np.concatenate([np.flatnonzero(np.isin(seq_ids, group)) for group in groups]))
    return cast("R", _joined(results, order))


def _joined(results: Sequence[Any], order: NDArray[np.intp]) -> NDArray[np.float32] | TopLogits:
    if isinstance(results[0], TopLogits):
        arrays = [(top.tokens, top.logits, top.log_totals) for top in results]
        tokens, logits, log_totals = (np.concatenate(parts)[order] for parts in zip(*arrays, strict=True))
        return TopLogits(tokens, logits, log_totals)
    return np.concatenate(results)[order]


def _keys(adapters: AdapterSet) -> list[tuple[str, float]]:
    return sorted(use.key for use in adapters)
