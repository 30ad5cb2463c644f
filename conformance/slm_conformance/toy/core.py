"""The toy's context without dumps: a sequence is a list of immutable cells.

A fork is a copy of a list. A call that raises changes nothing, because lists are replaced last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import numpy as np

from slm_conformance.toy.engine import Array, Cell, Run, ToyEngine
from slm_core.adapters import AdapterSet, LoadedAdapters, stacked, summed_directions
from slm_core.context.batch import TokenBatch
from slm_core.context.checks import failures_of
from slm_core.context.finite import check_logits, check_states
from slm_core.context.inputs import (
    Held,
    ahead_of,
    are_blocks,
    batch_inputs,
    next_mrope_position,
    row_of,
    token_of,
)
from slm_core.context.ledger import truncated_edits
from slm_core.context.sequence_adapters import part_of
from slm_core.context.snapshot import Edit
from slm_core.embedding_rows import check_rows
from slm_core.errors import (
    BatchFull,
    ContextBusy,
    ContextClosed,
    ContextFull,
    InvalidOption,
    InvalidPosition,
    InvalidSequence,
    InvalidToken,
    UnsupportedEdit,
    UnsupportedInput,
    UnsupportedOutput,
)
from slm_core.interrupts import uninterrupted
from slm_core.numerics import as_integer
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits, Pos, States, TopLogits


class ToyCore:
    """A context without dumps that holds, per sequence, a list of cells and the edits since its start."""

    capabilities: frozenset[Capability] = frozenset(
        {
            Capability.SHARED_FORK,
            Capability.KV_PAYLOAD,
            Capability.EMBEDDINGS,
            Capability.DEVICE_SAMPLING,
            Capability.EMBEDDING_INPUT,
            Capability.BIDIRECTIONAL_BLOCKS,
            Capability.MROPE_POSITIONS,
            Capability.ATTENTION_BIAS,
            Capability.ADAPTERS,
            Capability.MTP,
            Capability.LAYER_STATES,
        }
    )
    payload_format = "toy-1"

    def __init__(self, engine: ToyEngine, fingerprint: str, options: ContextOptions, edit_level: EditLevel) -> None:
        self.options = options
        self.n_ctx, self.n_seq_max, self.n_batch = options.n_ctx, options.n_seq_max, options.n_batch
        self.edit_level = edit_level
        self.engine = engine
        self.fingerprint = fingerprint
        self.cells: list[list[Cell]] = [[] for _ in range(options.n_seq_max)]
        self.edits: list[list[Edit]] = [[] for _ in range(options.n_seq_max)]
        self.sets: list[AdapterSet] = [() for _ in range(options.n_seq_max)]
        self.loaded = LoadedAdapters(None)  # the model replaces it by its own
        self.restores: set[int] = set()  # sequences that are being restored in steps
        self.closed = False
        self._lock = threading.Lock()
        if not engine.shape.sections:
            self.capabilities = self.capabilities - {Capability.MROPE_POSITIONS}
        if not engine.shape.n_mtp:
            self.capabilities = self.capabilities - {Capability.MTP}

    @property
    def n_embd(self) -> int:
        """E: the width of embedding rows and hidden states."""
        return self.engine.shape.n_embd

    @property
    def n_free(self) -> int:
        """Free positions. A cell in several sequences counts once."""
        return self.n_ctx - len({id(cell) for cells in self.cells for cell in cells})

    def length(self, seq_id: int) -> int:
        """The number of tokens of a sequence."""
        return len(self.tokens(seq_id))

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The tokens of a sequence."""
        self._check_open()
        return tuple(token_of(cell.token) for cell in self.cells[self._checked(seq_id)])

    def n_exclusive(self, seq_id: int) -> int:
        """The number of cells that no other sequence has."""
        self._check_open()
        others = {id(cell) for i, cells in enumerate(self.cells) if i != seq_id for cell in cells}
        return sum(id(cell) not in others for cell in self.cells[self._checked(seq_id)])

    def adapters(self, seq_id: int) -> dict[str, float]:
        """The adapters of a sequence."""
        self._check_open()
        return {use.adapter.info.name: use.scale for use in self.sets[self._checked(seq_id)]}

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Replace the adapters of an empty sequence."""
        with self._call():
            if scales and Capability.ADAPTERS not in self.capabilities:
                raise UnsupportedInput("this toy takes no adapters")
            adapters = self.loaded.set_of(scales) if scales else ()
            if adapters != self.sets[self._changeable(seq_id)] and self.cells[seq_id]:
                raise InvalidSequence(f"sequence {seq_id} has tokens with other adapters", seq_id=seq_id)
            self.sets[seq_id] = adapters

    def engine_with(self, adapters: AdapterSet) -> ToyEngine:
        """The engine of the model with all changes added to its matrices, and all directions after its layers."""
        if not adapters:
            return self.engine
        changes = {name: change.dense() for name, change in stacked(adapters).items()}
        return self.engine.with_changes(changes | self.directions_of(adapters))

    def directions_of(self, adapters: AdapterSet) -> dict[str, Array]:
        """The directions of control vectors, by their names in the engine."""
        return {f"blk.{layer}.direction": values for layer, values in summed_directions(adapters).items()}

    def new_batch(self, capacity: int | None = None) -> Batch:
        """An empty batch."""
        self._check_open()
        if capacity is not None and not 1 <= capacity <= self.n_batch:
            raise InvalidOption(f"batch capacity is {capacity} (accepted: 1 to {self.n_batch})")
        return TokenBatch(self.n_batch if capacity is None else capacity)

    def decode(self, batch: Batch) -> Logits:
        """Run the inputs one after another, each in its sequence."""
        with self._call():
            self._check_batch(batch)
            return self._run_batch(batch, self.engine.run, self.engine.n_vocab)

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """The k largest logits of each row, by a sort of whole rows."""
        if Capability.DEVICE_SAMPLING not in self.capabilities:
            raise UnsupportedOutput("this toy gives whole rows only")
        if not 1 <= k <= self.engine.n_vocab:
            raise InvalidOption(f"k is {k} (accepted: 1 to {self.engine.n_vocab})")
        return top_of(self.decode(batch), k)

    def embed(self, batch: Batch) -> States:
        """Like ``decode``, without the output matrix."""
        with self._call():
            if Capability.EMBEDDINGS not in self.capabilities:
                raise UnsupportedOutput("this toy gives no hidden states")
            self._check_batch(batch)
            return self._run_batch(batch, self.engine.states, self.engine.shape.n_embd)

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Like ``embed``, after each of these layers."""
        with self._call():
            if Capability.LAYER_STATES not in self.capabilities:
                raise UnsupportedOutput("this toy gives no hidden states of layers")
            if not layers or not all(0 <= layer < self.engine.shape.n_layers for layer in layers):
                raise InvalidOption(f"layers={layers} (accepted: 0 to {self.engine.shape.n_layers - 1})")
            self._check_batch(batch)
            grown: dict[int, list[Cell]] = {}
            states = np.empty((len(layers), len(batch), self.engine.shape.n_embd), np.float32)
            mask, inputs, seq_ids = batch.logits_mask.copy(), batch_inputs(batch), batch.seq_ids.tolist()
            for first, end in runs_of(inputs, seq_ids):
                cells = grown.setdefault(seq_ids[first], list(self.cells[seq_ids[first]]))
                is_block, engine = ahead_of(inputs[first]) > 0, self.engine_with(self.sets[seq_ids[first]])
                new_cells, outputs = engine.layers(inputs[first:end], cells, bidirectional=is_block)
                states[:, first:end] = [outputs[layer] for layer in layers]
                cells += new_cells
            with failures_of(list(grown)):
                check_states(states[:, mask])
            for seq_id, cells in grown.items():
                self.cells[seq_id] = cells
            return states[:, mask]

    def draft(self, seq_id: int, token: int, n: int, k: int = 1) -> TopLogits:
        """The largest logits of the MTP layer, which reads the whole sequence again."""
        with self._call():
            if Capability.MTP not in self.capabilities:
                raise UnsupportedOutput("this toy has no layer for multi-token prediction")
            self.check_draft(self._changeable(seq_id), token, n, k)
            rows = self.engine_with(self.sets[seq_id]).predict(self.drafted_after(seq_id), token, n)
            with failures_of([seq_id]):
                check_logits(rows)
            return top_of(rows, k)

    def drafted_after(self, seq_id: int) -> Sequence[Held]:
        """The tokens that the MTP layer reads: those of the sequence."""
        return [cell.token for cell in self.cells[seq_id]]

    def check_draft(self, seq_id: int, token: int, n: int, k: int) -> None:
        """Check the arguments of ``draft``."""
        if not 0 <= token < self.engine.n_vocab:
            raise InvalidToken(f"token {token} (accepted: 0 to {self.engine.n_vocab - 1})", seq_id=seq_id)
        if n < 1 or not 1 <= k <= self.engine.n_vocab:
            raise InvalidOption(f"n is {n}, k is {k} (accepted: n from 1 on, k 1 to {self.engine.n_vocab})")
        if n > self.n_free:
            raise ContextFull(n, self.n_free, seq_id=seq_id)

    def _run_batch(self, batch: Batch, run: Run, width: int) -> Array:
        if any(self.sets[seq_id] for seq_id in batch.seq_ids.tolist()):
            return self._run_adapted(batch, run, width)
        grown: dict[int, list[Cell]] = {}
        rows, mask = np.empty((len(batch), width), np.float32), batch.logits_mask.copy()
        inputs, seq_ids = batch_inputs(batch), batch.seq_ids.tolist()
        for first, end in runs_of(inputs, seq_ids):
            cells = grown.setdefault(seq_ids[first], list(self.cells[seq_ids[first]]))
            if ahead_of(inputs[first]):
                cells += self._run_block(inputs[first:end], cells, rows[first:end])
            else:
                new_cells, rows[first:end] = run(inputs[first:end], cells)
                cells += new_cells
        with failures_of(list(grown)):
            (check_logits if width == self.engine.n_vocab else check_states)(rows[mask])
        for seq_id, cells in grown.items():
            self.cells[seq_id] = cells
        return rows[mask]

    def _run_adapted(self, batch: Batch, run: Run, width: int) -> Array:
        """Run the sequences one after another, each with an engine of its own."""
        seq_ids, rows = batch.seq_ids, np.empty((len(batch), width), np.float32)
        engine, sets, cells = self.engine, self.sets, list(self.cells)
        try:
            for seq_id in sorted(set(seq_ids.tolist())):
                self.engine, self.sets = self.engine_with(sets[seq_id]), [() for _ in sets]
                adapted_run = self.engine.run if width == engine.n_vocab else self.engine.states
                part = part_of(batch, [seq_id])
                rows[(seq_ids == seq_id) & batch.logits_mask] = self._run_batch(part, adapted_run, width)
                self.engine, self.sets = engine, sets
        except BaseException:
            self.cells = cells
            raise
        finally:
            self.engine, self.sets = engine, sets
        return rows[batch.logits_mask]

    def _run_block(self, inputs: Sequence[Held], cells: Sequence[Cell], rows: Array) -> list[Cell]:
        """Run a bidirectional block; writes its logits or hidden states to ``rows``."""
        block, states = self.engine.bidirectional_block(inputs, cells)
        rows[:] = self.engine.logits(states) if rows.shape[1] == self.engine.n_vocab else states
        return block

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Copy the list of cells."""
        with self._call():
            self._checked(src), self._changeable(dst)
            if src == dst or self.cells[dst]:
                raise InvalidSequence(
                    f"cannot fork {src} into {dst}: the destination must be another, empty sequence", seq_id=dst
                )
            end = self._checked_index(src, len(self.cells[src]) if end is None else end)
            self._check_whole_blocks(src, end)
            self.replace(dst, self.fork_cells(self.cells[src][:end]), truncated_edits(self.edits[src], end))
            self.sets[dst] = self.sets[src]
            return Pos(dst, end)

    def fork_cost(self, src: int, end: int | None = None) -> int:
        """0: a fork makes no cells."""
        with self._call():
            end = self._checked_index(self._checked(src), len(self.cells[src]) if end is None else end)
            self._check_whole_blocks(src, end)
            return 0

    def fork_cells(self, cells: list[Cell]) -> list[Cell]:
        """The cells of a fork: the same cells."""
        return cells

    def truncate(self, pos: Pos) -> Pos:
        """Keep the first cells."""
        with self._call():
            self._check_level(EditLevel.TRUNCATE)
            end = self._checked_index(self._checked(pos.seq_id), pos.index)
            self._check_whole_blocks(pos.seq_id, end)
            self.replace(pos.seq_id, self.cells[pos.seq_id][:end], truncated_edits(self.edits[pos.seq_id], end))
            return pos

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Remove cells, and move the later cells down."""
        with self._call():
            self._check_level(EditLevel.CUT)
            if start.seq_id != end.seq_id:
                raise InvalidSequence(f"a cut has one sequence, not {start.seq_id} and {end.seq_id}")
            seq_id = self._checked(start.seq_id)
            first, last = self._checked_index(seq_id, start.index), self._checked_index(seq_id, end.index)
            if last < first:
                raise InvalidPosition(f"a cut of sequence {seq_id} ends at {last}, before {first}", seq_id=seq_id)
            if first < last == len(self.cells[seq_id]):
                self._check_whole_blocks(seq_id, first)
            cells, edits = self.cut_cells(self.cells[seq_id], self.edits[seq_id], first, last)
            self.replace(seq_id, cells, edits)
            return Pos(seq_id, len(cells))

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Cells and edits after a cut of [first, last)."""
        if first == last:
            return cells, edits
        if last == len(cells):
            return cells[:first], truncated_edits(edits, first)
        removed = tuple(cell.token for cell in cells[first:last])
        by = self.n_mrope_positions(cells[:first]) - self.n_mrope_positions(cells[:last])
        moved = [self.engine.moved(cell, by) for cell in cells[last:]]
        return cells[:first] + moved, [*edits, Edit(first, removed, len(cells))]

    @staticmethod
    def n_mrope_positions(cells: list[Cell]) -> int:
        """The number of M-RoPE positions of the first cells of a sequence."""
        return next_mrope_position(cell.token for cell in cells)

    def drop(self, seq_id: int) -> None:
        """Empty one list."""
        with uninterrupted.closing(), self._call():
            self._drop(self._checked(seq_id))

    def clear(self) -> None:
        """Empty all lists."""
        with uninterrupted.closing(), self._call():
            for seq_id in range(self.n_seq_max):
                self._drop(seq_id)

    def _drop(self, seq_id: int) -> None:
        self.restores.discard(seq_id)
        self.replace(seq_id, [], [])

    def close(self) -> None:
        """Drop all cells."""
        with self._call(closing=True):
            self.closed = True
            self.cells = [[] for _ in range(self.n_seq_max)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def replace(self, seq_id: int, cells: Sequence[Cell], edits: Sequence[Edit]) -> None:
        """Replace the contents of a sequence if there is room."""
        others = {id(cell) for i, other in enumerate(self.cells) if i != seq_id for cell in other}
        needed, free = len({id(cell) for cell in cells} - others), self.n_ctx - len(others)
        if needed > free:
            raise ContextFull(needed, free, seq_id=seq_id)
        self.cells[seq_id], self.edits[seq_id] = list(cells), list(edits)

    @contextmanager
    def _call(self, *, closing: bool = False) -> Iterator[None]:
        with uninterrupted, self.alone():
            if not closing:
                self._check_open()
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads out of a call."""
        if not self._lock.acquire(blocking=False):
            raise ContextBusy("another thread is inside a call of this context (use one context a thread)")
        try:
            yield
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self.closed:
            raise ContextClosed("the context is closed")

    def _check_level(self, level: EditLevel) -> None:
        if self.edit_level < level:
            raise UnsupportedEdit(f"the edit level is {self.edit_level.name}: drop the sequence and decode it again")

    def _checked(self, seq_id: int) -> int:
        checked = as_integer(seq_id)
        if checked is None or not 0 <= checked < self.n_seq_max:
            raise InvalidSequence(f"no sequence {seq_id} (accepted: 0 to {self.n_seq_max - 1})", seq_id=checked)
        return checked

    def _changeable(self, seq_id: int) -> int:
        if self._checked(seq_id) in self.restores:
            raise InvalidSequence(f"sequence {seq_id} is being restored (drop it first)", seq_id=seq_id)
        return seq_id

    def _checked_index(self, seq_id: int, index: int) -> int:
        length, checked = len(self.cells[seq_id]), as_integer(index)
        if checked is None or not 0 <= checked <= length:
            raise InvalidPosition(
                f"position {index} is outside sequence {seq_id} (accepted: 0 to {length})", seq_id=seq_id
            )
        return checked

    def _check_batch(self, batch: Batch) -> None:
        if len(batch) > self.n_batch:
            raise BatchFull(f"a batch of {len(batch)} tokens (accepted: up to n_batch, {self.n_batch})")
        self._check_rows(batch.embeddings)
        self._check_blocks(batch)
        self._check_offsets(batch)
        self._check_bias(batch)
        lengths: dict[int, int] = {}
        inputs = batch_inputs(batch)
        for token, seq_id, position in zip(inputs, batch.seq_ids.tolist(), batch.positions, strict=True):
            if not (row_of(token) is not None or 0 <= token_of(token) < self.engine.n_vocab):
                raise InvalidToken(
                    f"token {token} of sequence {seq_id} (accepted: 0 to {self.engine.n_vocab - 1})", seq_id=seq_id
                )
            length = lengths.setdefault(seq_id, len(self.cells[self._changeable(seq_id)]))
            if position != length:
                raise InvalidPosition(f"position {position} in sequence {seq_id} (accepted: {length})", seq_id=seq_id)
            lengths[seq_id] += 1
        if len(batch) > (n_free := self.n_free):
            raise ContextFull(len(batch), n_free, seq_id=int(batch.seq_ids[n_free]))

    def _check_rows(self, rows: Array) -> None:
        if len(rows) and Capability.EMBEDDING_INPUT not in self.capabilities:
            raise UnsupportedInput("this toy takes no embedding rows")
        check_rows(rows, self.engine.shape.n_embd)

    def _check_blocks(self, batch: Batch) -> None:
        if batch.ahead.any() and Capability.BIDIRECTIONAL_BLOCKS not in self.capabilities:
            raise UnsupportedInput("this toy takes no bidirectional blocks")
        if not are_blocks(batch.ahead):
            raise InvalidOption("the batch holds parts of bidirectional blocks")

    def _check_offsets(self, batch: Batch) -> None:
        if len(batch.offsets) and Capability.MROPE_POSITIONS not in self.capabilities:
            raise UnsupportedInput("this toy takes no offsets of rows")

    def _check_bias(self, batch: Batch) -> None:
        if len(batch.bias) and Capability.ATTENTION_BIAS not in self.capabilities:
            raise UnsupportedInput("this toy takes no attention bias")

    def _check_whole_blocks(self, seq_id: int, length: int) -> None:
        cells = self.cells[seq_id]
        if 0 < length < len(cells) and ahead_of(cells[length - 1].token):
            raise InvalidPosition(
                f"position {length} of sequence {seq_id} lies in a bidirectional block"
                " (accepted: its start, or past its end)",
                seq_id=seq_id,
            )


def top_of(rows: Array, k: int) -> TopLogits:
    """The k largest logits of each row."""
    tokens = np.argsort(-rows, axis=1, kind="stable")[:, :k].astype(np.int32)
    totals = np.log(np.exp(rows.astype(np.float64)).sum(axis=1)).astype(np.float32)
    return TopLogits(tokens, np.take_along_axis(rows, tokens, 1), totals)


def runs_of(inputs: Sequence[Held], seq_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first index and the end of each bidirectional block, and of each run of other inputs of one sequence."""
    first = 0
    while first < len(inputs):
        end = first + ahead_of(inputs[first]) + 1
        if end == first + 1:
            while end < len(inputs) and seq_ids[end] == seq_ids[first] and not ahead_of(inputs[end]):
                end += 1
        yield first, end
        first = end
