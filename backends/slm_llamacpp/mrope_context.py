"""Contexts of models with M-RoPE positions (time, height, width)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slm_core.context.finite import Check
from slm_core.context.inputs import Held, batch_inputs, offsets_of
from slm_core.context.mrope import MropePositions, mrope_positions_of
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import SnapshotMismatch, UnsupportedInput
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions
from slm_llamacpp.batchbuffers import Part
from slm_llamacpp.context import LlamaCppContext, Rows
from slm_llamacpp.memory import CacheKind
from slm_llamacpp.options import Settings
from slm_llamacpp.temporal_patches import patch_begin, why_out_of_order

if TYPE_CHECKING:
    from slm_llamacpp.model import LlamaCppModel

_UNKNOWN = -1  # number of cells of a sequence while it changes


class MropeContext(LlamaCppContext):
    """Token histories whose position in llama.cpp is the time axis of the M-RoPE position.

    llama.cpp removes and shares a temporal patch as a whole. If a part of a patch remains, it is decoded again. Keys
    cannot be moved, so there is no cut. Positions do not give the number of tokens of a sequence, so it is counted
    here.

    Args: see ``LlamaCppContext``.
    """

    def __init__(
        self, model: LlamaCppModel, api: Any, model_pointer: int, options: ContextOptions, settings: Settings
    ) -> None:
        self._counted: dict[int, int] = {}
        super().__init__(model, api, model_pointer, options, settings)
        self._mrope_positions = MropePositions(self._ledger.inputs)

    def _inputs(self, model_pointer: int, blocks: set[Capability]) -> frozenset[Capability]:
        capabilities = super()._inputs(model_pointer, blocks)
        takes_offsets = capabilities and self._memory.kind is CacheKind.ATTENTION
        return capabilities | {Capability.MROPE_POSITIONS} if takes_offsets else capabilities

    # Checks of inputs.

    def _check_batch(self, batch: Batch) -> list[int]:
        seq_ids = super()._check_batch(batch)
        if len(batch.offsets):
            inputs = batch_inputs(batch)
            for seq_id in seq_ids:
                added = [inputs[i] for i in np.flatnonzero(batch.seq_ids == seq_id).tolist()]
                if (why := why_out_of_order([*self._ledger.inputs(seq_id), *added])) is not None:
                    raise UnsupportedInput(why)
        return seq_ids

    def _check_dumped_inputs(self, snapshot: SequenceSnapshot) -> None:
        super()._check_dumped_inputs(snapshot)
        every = snapshot.every_input()
        if len(offsets_of(every)) and (why := why_out_of_order(every)) is not None:
            raise SnapshotMismatch(f"in the dump, {why}")

    # Edits.

    def _n_copied_by_fork(self, src: int, end: int) -> int:
        tokens = self._ledger.inputs(src)
        return 0 if end == len(tokens) else end - patch_begin(mrope_positions_of(tokens), end)

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self._sync(src)
        self._sync(dst)
        self._check_fork(src, end)
        tokens, first = self._ledger.inputs(src)[:end], end - self._n_copied_by_fork(src, end)
        mrope_positions = mrope_positions_of(tokens)
        if first:
            self._counted[dst] = _UNKNOWN
            self._memory.share(src, dst, int(mrope_positions[first - 1, 0]) + 1)
        self._decode_again(dst, first, tokens, mrope_positions)

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        self._sync(seq_id)
        tokens = self._ledger.inputs(seq_id)
        mrope_positions = mrope_positions_of(tokens)
        first = patch_begin(mrope_positions, length)
        self._counted[seq_id] = _UNKNOWN
        self._memory.remove(seq_id, int(mrope_positions[first, 0]))
        self._decode_again(seq_id, first, tokens[:length], mrope_positions[:length])

    def _decode_again(self, seq_id: int, first: int, tokens: Sequence[Held], positions: NDArray[np.int64]) -> None:
        """Decode the tokens from ``first`` on: the remaining part of a temporal patch."""
        try:
            self._replay(seq_id, first, tokens[first:], positions[first:])
        except BaseException:
            self._sync(seq_id)
            raise
        self._now_holds(seq_id, len(tokens))

    def _engine_drop(self, seq_id: int) -> None:
        super()._engine_drop(seq_id)
        self._now_holds(seq_id, 0)

    def _now_holds(self, seq_id: int, length: int) -> None:
        self._counted[seq_id] = length
        self._mrope_positions.forget(seq_id)

    # Decoding.

    def _positions(self, batch: Batch) -> NDArray[np.integer]:
        return self._mrope_positions.of(batch)

    def _positions_of(self, tokens: Sequence[Held], start: int) -> NDArray[np.integer]:
        return mrope_positions_of(tokens)  # without cuts there is one run, from position 0 on

    def _ran(self, batch: Batch, output_mask: NDArray[np.bool_], read: Callable[[int], Rows], check: Check) -> Rows:
        rows = super()._ran(batch, output_mask, read, check)
        for seq_id, n in zip(*np.unique(batch.seq_ids, return_counts=True), strict=True):
            self._counted[int(seq_id)] = self._ledger.length(int(seq_id)) + int(n)
        return rows

    def _run_part(self, part: Part) -> None:
        self._counted |= dict.fromkeys(np.unique(part.seq_ids).tolist(), _UNKNOWN)
        super()._run_part(part)

    def _sync(self, seq_id: int) -> None:
        if self._counted.get(seq_id, 0) != self._ledger.length(seq_id):
            self._rebuild(seq_id)

    def _refill(self, seq_id: int, others: Sequence[int]) -> None:
        self._rebuild(seq_id)  # llama.cpp's positions differ from the ledger's, so no cells are shared

    def _rebuild(self, seq_id: int) -> None:
        super()._rebuild(seq_id)
        self._now_holds(seq_id, self._ledger.length(seq_id))
