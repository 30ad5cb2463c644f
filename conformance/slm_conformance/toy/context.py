"""The context of the toy: dumps and their replay, over ``core.ToyCore``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from slm_conformance.toy.core import ToyCore, runs_of
from slm_conformance.toy.engine import Cell
from slm_core.adapters import AdapterSet
from slm_core.container import PART_BYTES, check_numbers, pack, unpack
from slm_core.context.checks import check_part_bytes
from slm_core.context.inputs import (
    Held,
    ahead_of,
    all_ahead_of,
    are_blocks,
    biases_of,
    offsets_of,
    row_of,
    rows_of,
    token_ids,
    token_of,
)
from slm_core.context.ledger import replay_plan
from slm_core.context.payload import Steps
from slm_core.context.sequence_adapters import dumped_scales
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import (
    ContextFull,
    InvalidSequence,
    InvalidSnapshot,
    SequenceChanged,
    SnapshotMismatch,
)
from slm_core.types import Capability, EditLevel, Pos


class ToyContext(ToyCore):
    """A context with dumps of tokens, edits and cells."""

    def dump(self, seq_id: int) -> bytes:
        """Tokens, edits and cells."""
        with self._call():
            cells = self.cells[self._checked(seq_id)]
            tokens = [cell.token for cell in cells]
            return SequenceSnapshot(
                "toy",
                self.payload_format,
                self.fingerprint,
                tokens=np.array(token_ids(tokens), np.int32),
                edits=tuple(self.edits[seq_id]),
                payload=self.pack_payload(cells),
                rows=rows_of(tokens),
                ahead=all_ahead_of(tokens),
                offsets=offsets_of(tokens),
                bias=biases_of(tokens),
                adapters=dumped_scales(self.sets[seq_id]),
            ).to_bytes()

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """The dump, cut into parts."""
        check_part_bytes(part_bytes)
        data, cells = self.dump(seq_id), self.cells[seq_id]
        parts = (data[first : first + part_bytes] for first in range(0, len(data), part_bytes))
        return Steps(parts, lambda: self._unchanged(seq_id, cells))

    @contextmanager
    def _unchanged(self, seq_id: int, cells: list[Cell]) -> Iterator[None]:
        with self._call():
            if self.cells[seq_id] is not cells:
                raise SequenceChanged(f"sequence {seq_id} was changed since its dump began", seq_id=seq_id)
            yield

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """The payload of a dump."""
        return b"".join(cell.keys.tobytes() + cell.values.tobytes() for cell in cells)

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Make cells from the payload. A dump of another backend is decoded and cut again."""
        with self._call():
            return self._restore(self._changeable(seq_id), data)

    def _restore(self, seq_id: int, data: bytes) -> Pos:
        snapshot = SequenceSnapshot.from_bytes(data)
        self._check_snapshot(seq_id, snapshot)
        adapters = self.dumped_adapters(snapshot)
        parts = self.unpack_payload(snapshot) if self._is_ours(snapshot) else self._replayed(snapshot)
        self.replace(seq_id, *parts)
        self.sets[seq_id] = adapters
        return Pos(seq_id, len(snapshot.tokens))

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Join the parts and restore them."""
        return self.restore(seq_id, b"".join(map(_checked_part, parts)))

    def restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        """Join the parts, one a step, and restore them at the last step."""
        with self._call():
            if self.cells[self._changeable(seq_id)]:
                raise InvalidSequence(f"sequence {seq_id} is not empty", seq_id=seq_id)
            self.restores.add(seq_id)
            cells = self.cells[seq_id]
        return Steps(self._restore_steps(seq_id, parts), lambda: self._unchanged(seq_id, cells))

    def _restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        joined = b""
        try:
            for part in parts:
                joined += _checked_part(part)
                yield
            self._restore(seq_id, joined)
        except GeneratorExit:
            raise
        except BaseException:
            self._drop(seq_id)
            raise
        self.restores.discard(seq_id)

    def dump_context(self, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """The dumps of all sequences, and the cells that several sequences share."""
        check_part_bytes(part_bytes)
        seq_ids = [seq_id for seq_id in range(self.n_seq_max) if self.length(seq_id)]
        first_uses = {id(cell): (i, j) for i in reversed(seq_ids) for j, cell in enumerate(self.cells[i])}
        same = [[seq_id, [first_uses[id(cell)] for cell in self.cells[seq_id]]] for seq_id in seq_ids]
        data = pack("toy context", {"cells": same}, [self.dump(seq_id) for seq_id in seq_ids])
        cells, parts = list(self.cells), (data[at : at + part_bytes] for at in range(0, len(data), part_bytes))
        return Steps(parts, lambda: self._all_unchanged(cells))

    @contextmanager
    def _all_unchanged(self, cells: list[list[Cell]]) -> Iterator[None]:
        with self._call():
            for seq_id, (before, after) in enumerate(zip(cells, self.cells, strict=True)):
                if before is not after:
                    raise SequenceChanged(f"sequence {seq_id} was changed since the dump began", seq_id=seq_id)
            yield

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Restore each sequence, then share cells as before."""
        in_use = next((seq_id for seq_id in range(self.n_seq_max) if self.length(seq_id)), None)
        if in_use is not None:
            raise InvalidSequence(f"sequence {in_use} holds tokens (accepted: an empty context)", seq_id=in_use)
        meta, dumps = unpack("toy context", b"".join(parts))
        sets = list(self.sets)
        n_ctx, self.n_ctx = self.n_ctx, 2**62  # restored sequences share no cells yet
        try:
            for (seq_id, same), data in zip(cast("list[Any]", meta["cells"]), dumps, strict=True):
                self.restore(seq_id, data)
                self.cells[seq_id] = [self.cells[i][j] for i, j in same]
            if self.n_free < 2**62 - n_ctx:
                raise ContextFull(2**62 - self.n_free, n_ctx)
        except BaseException:
            self.clear()
            self.sets = sets
            raise
        finally:
            self.n_ctx = n_ctx

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """The cells of a payload of the toy."""
        shape, n = self.engine.shape, len(snapshot.tokens)
        dims = (n, 2, shape.n_layers, shape.n_kv_heads, shape.head_dim)
        if len(snapshot.payload) != 4 * int(np.prod(dims)):
            raise InvalidSnapshot("the dump's payload does not fit its tokens")
        keys_and_values = np.frombuffer(snapshot.payload, np.float32).reshape(dims)
        check_numbers(keys_and_values, "the dump's payload")
        return [Cell(token, *keys_and_values[i]) for i, token in enumerate(snapshot.held())], snapshot.edits

    def dumped_adapters(self, snapshot: SequenceSnapshot) -> AdapterSet:
        """The adapters of a dump."""
        if not snapshot.adapters:
            return ()
        if Capability.ADAPTERS not in self.capabilities:
            raise SnapshotMismatch("the dump was made with adapters, which this toy does not take")
        return self.loaded.of_dump(snapshot.adapters)

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        if snapshot.edits:
            self._check_level(EditLevel.CUT)
        cells: list[Cell] = []
        edits: list[Edit] = []
        engine = self.engine_with(self.dumped_adapters(snapshot))
        runs, _ = replay_plan(snapshot.held(), snapshot.edits)
        for run, edit in zip(runs, (*snapshot.edits, None), strict=True):
            for first, end in runs_of(run, [0] * len(run)):
                compute = engine.bidirectional_block if ahead_of(run[first]) else engine.states
                cells += compute(run[first:end], cells)[0]
            if edit is not None:
                cells, edits = self.cut_cells(cells, edits, edit.start, edit.end)
        return cells, edits

    def _check_dumped_offsets(self, inputs: Sequence[Held]) -> None:
        if len(offsets_of(inputs)) and Capability.MROPE_POSITIONS not in self.capabilities:
            raise SnapshotMismatch("the dump holds rows with offsets, which this toy does not take")

    def _check_dumped_bias(self, inputs: Sequence[Held]) -> None:
        if len(biases_of(inputs)) and Capability.ATTENTION_BIAS not in self.capabilities:
            raise SnapshotMismatch("the dump holds rows with an attention bias, which this toy does not take")

    def _check_dumped_blocks(self, snapshot: SequenceSnapshot) -> None:
        for ahead in map(all_ahead_of, replay_plan(snapshot.held(), snapshot.edits)[0]):
            if len(ahead) and not are_blocks(ahead):
                raise InvalidSnapshot("the dump holds parts of bidirectional blocks")
            if len(ahead) and (Capability.BIDIRECTIONAL_BLOCKS not in self.capabilities or ahead.max() >= self.n_batch):
                raise SnapshotMismatch("the dump holds bidirectional blocks, which this toy does not take")

    def _check_snapshot(self, seq_id: int, snapshot: SequenceSnapshot) -> None:
        if snapshot.fingerprint != self.fingerprint:
            raise SnapshotMismatch("the dump is of another model")
        inputs = [*snapshot.held(), *(token for edit in snapshot.edits for token in edit.removed)]
        rows = rows_of(inputs)
        if len(rows) and Capability.EMBEDDING_INPUT not in self.capabilities:
            raise SnapshotMismatch("the dump holds embedding rows, which this toy does not take")
        if len(rows) and rows.shape[1] != self.engine.shape.n_embd:
            raise InvalidSnapshot("the dump's embedding rows are of another width")
        self._check_dumped_offsets(inputs)
        self._check_dumped_bias(inputs)
        self._check_dumped_blocks(snapshot)
        if any(not (row_of(token) is not None or 0 <= token_of(token) < self.engine.n_vocab) for token in inputs):
            raise InvalidSnapshot("the dump holds tokens outside the vocabulary")
        needed = (
            len(snapshot.tokens)
            if self._is_ours(snapshot)
            else replay_plan(snapshot.tokens.tolist(), snapshot.edits)[1]
        )
        others = {id(cell) for i, other in enumerate(self.cells) if i != seq_id for cell in other}
        if needed > self.n_ctx - len(others):
            raise ContextFull(needed, self.n_ctx - len(others), seq_id=seq_id)

    def _is_ours(self, snapshot: SequenceSnapshot) -> bool:
        ours = (snapshot.backend, snapshot.payload_format) == ("toy", self.payload_format)
        return ours and Capability.KV_PAYLOAD in self.capabilities and len(snapshot.payload) > 0


def _checked_part(part: object) -> bytes:
    if not isinstance(part, bytes | bytearray | memoryview):
        raise InvalidSnapshot(f"a part of a dump is {type(part).__name__} (accepted: bytes)")
    return bytes(part)


class PlainToyContext(ToyContext):
    """A context without capabilities: forks copy cells, and restored dumps are decoded again."""

    capabilities = frozenset()

    def fork_cells(self, cells: list[Cell]) -> list[Cell]:
        """The cells of a fork: copies."""
        return [Cell(cell.token, cell.keys.copy(), cell.values.copy()) for cell in cells]

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """No payload."""
        return b""
