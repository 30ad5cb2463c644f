"""The core of a context: argument checks, free positions, the ledger, adapters, decoding and edits.

The base class of contexts, ``base.ContextBase``, adds dumps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np

from slm_core.adapters import LoadedAdapters
from slm_core.context.batch import TokenBatch
from slm_core.context.checks import Checks, Declaration, check_context_options, failures_of
from slm_core.context.engine_calls import EngineCalls
from slm_core.context.inputs import (
    Held,
    batch_inputs,
    token_ids,
)
from slm_core.context.ledger import Ledger
from slm_core.context.one_call import lock_of_calls, one_call
from slm_core.context.payload import PayloadWriter, Steps
from slm_core.context.sequence_adapters import (
    R,
    SequenceAdapters,
    are_equal,
    in_batch_order,
    part_of,
    scales_of,
)
from slm_core.errors import (
    ContextClosed,
    InvalidOption,
    InvalidPosition,
    InvalidSequence,
    UnsupportedOutput,
)
from slm_core.interrupts import uninterrupted
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits, Pos, States, TopLogits


def no_top_logits(k: int) -> TopLogits:
    """The result of ``decode_top`` for no rows."""
    return TopLogits(np.empty((0, k), np.int32), np.empty((0, k), np.float32), np.empty(0, np.float32))


def joined_top(rows: Sequence[TopLogits]) -> TopLogits:
    """Top logits of several calls, one after the other."""
    return TopLogits(*(np.concatenate([getattr(top, each.name) for top in rows]) for each in fields(TopLogits)))


def _persistent(rows: R) -> R:
    """Rows that stay valid after the next call of the engine: a copy, unless they are top logits."""
    return rows if isinstance(rows, TopLogits) else np.array(rows)


def _runs(batch: Batch, seq_ids: Sequence[int]) -> dict[int, Sequence[Held]]:
    """The inputs of a batch, by sequence. They are read before the engine runs, so a failure here changes nothing."""
    inputs, seq_id_of = batch_inputs(batch), batch.seq_ids
    if len(seq_ids) == 1:
        return {seq_ids[0]: inputs}
    return {seq_id: [inputs[i] for i in np.flatnonzero(seq_id_of == seq_id).tolist()] for seq_id in seq_ids}


class ContextCore(EngineCalls):
    """The bookkeeping of a context, without dumps; ``base.ContextBase`` adds them.

    Args:
        options: the sizes.
        backend: name of the backend, for dumps.
        fingerprint: fingerprint of the model, for dumps.
        n_vocab: vocabulary size V.
        edit_level: the edit level.
        capabilities: the optional capabilities.
        payload_format: name of the layout of KV payloads; a payload of the same backend and format is loaded as it is.
        n_embd: embedding width E; needed for ``EMBEDDINGS`` (hidden states) and ``EMBEDDING_INPUT`` (embedding rows).
        adapters: the adapters of the model, if ``ADAPTERS`` is among the capabilities.
        n_layers: the number of layers L; needed for ``LAYER_STATES``.
    """

    def __init__(
        self,
        options: ContextOptions,
        *,
        backend: str,
        fingerprint: str,
        n_vocab: int,
        edit_level: EditLevel,
        capabilities: frozenset[Capability],
        payload_format: str,
        n_embd: int = 0,
        adapters: LoadedAdapters | None = None,
        n_layers: int = 0,
    ) -> None:
        check_context_options(options)
        self._declared = Declaration(
            options=options,
            backend=backend,
            fingerprint=fingerprint,
            n_vocab=n_vocab,
            edit_level=edit_level,
            capabilities=capabilities,
            payload_format=payload_format,
            n_embd=n_embd,
            n_layers=n_layers,
        )
        self._n_vocab = n_vocab
        self._n_embd = n_embd
        share_forks = Capability.SHARED_FORK in capabilities
        self._ledger = Ledger(options.n_ctx, options.n_seq_max, share_forks=share_forks)
        self._checks = Checks(self._declared, self._ledger)
        loaded = adapters if Capability.ADAPTERS in capabilities else None
        self._adapters = SequenceAdapters(loaded)
        self._lock = lock_of_calls()
        self._closed = False
        self._steps: weakref.WeakSet[Steps[Any]] = weakref.WeakSet()  # dumps and restores that are still valid
        self._writers: dict[int, PayloadWriter] = {}  # by sequence: the storage reserved by restores in steps

    # Properties.

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The optional capabilities of this context."""
        return self._declared.capabilities

    @property
    def edit_level(self) -> EditLevel:
        """The edit level."""
        return self._declared.edit_level

    @property
    def options(self) -> ContextOptions:
        """The options that ``new_context`` got: sizes and KV types."""
        return self._declared.options

    @property
    def n_ctx(self) -> int:
        """Positions of the KV cache, for all sequences together."""
        return self._declared.options.n_ctx

    @property
    def n_batch(self) -> int:
        """The largest number of tokens of one ``decode``."""
        return self._declared.options.n_batch

    @property
    def n_embd(self) -> int:
        """E: the width of embedding rows and hidden states; 0 if the context neither takes nor returns them."""
        return self._n_embd

    @property
    def n_seq_max(self) -> int:
        """The number of sequences."""
        return self._declared.options.n_seq_max

    @property
    def n_free(self) -> int:
        """Free positions."""
        return self._ledger.n_free

    def length(self, seq_id: int) -> int:
        """The number of tokens of a sequence."""
        self._check_open()
        return self._ledger.length(self._checks.sequence(seq_id))

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The tokens of a sequence, in order; ``EMBEDDED`` for each embedding row."""
        self._check_open()
        return tuple(token_ids(self._ledger.inputs(self._checks.sequence(seq_id))))

    def n_exclusive(self, seq_id: int) -> int:
        """The number of positions that ``drop`` would free."""
        self._check_open()
        return self._ledger.n_exclusive(self._checks.sequence(seq_id))

    def adapters(self, seq_id: int) -> Mapping[str, float]:
        """The adapters of a sequence, by name, with their scales."""
        self._check_open()
        return scales_of(self._adapters.of(self._checks.sequence(seq_id)))

    def new_batch(self, capacity: int | None = None) -> Batch:
        """An empty batch of at most ``n_batch`` tokens."""
        self._check_open()
        if capacity is not None and not 1 <= capacity <= self.n_batch:
            raise InvalidOption(f"batch capacity is {capacity} (accepted: 1 to n_batch, which is {self.n_batch})")
        return TokenBatch(self.n_batch if capacity is None else capacity)

    # Calls.

    def decode(self, batch: Batch) -> Logits:
        """Run a batch; returns the requested rows of logits, float32 [n_rows, V]."""
        with self._call():
            if Capability.ENCODER in self._declared.capabilities:
                raise UnsupportedOutput("this model is an encoder: it has hidden states (embed), and no logits")
            seq_ids = self._check_batch(batch)
            if not seq_ids:
                return np.empty((0, self._n_vocab), np.float32)
            runs = _runs(batch, seq_ids)
            with failures_of(seq_ids):
                rows = self._by_adapters(batch, seq_ids, self._engine_decode)
            self._append(runs)
        return rows

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Run a batch; returns the k largest logits of each requested row."""
        with self._call():
            if Capability.DEVICE_SAMPLING not in self._declared.capabilities:
                raise UnsupportedOutput(
                    f"the backend {self._declared.backend} gives whole rows of logits alone: decode"
                )
            self._checks.n_top(k)
            seq_ids = self._check_batch(batch)
            if not seq_ids:
                return no_top_logits(k)
            runs = _runs(batch, seq_ids)
            with failures_of(seq_ids):
                top = self._by_adapters(batch, seq_ids, lambda part: self._engine_decode_top(part, k))
            self._append(runs)
        return top

    def embed(self, batch: Batch) -> States:
        """Run a batch; returns the requested hidden states, float32 [n_rows, E]."""
        with self._call():
            if Capability.EMBEDDINGS not in self._declared.capabilities:
                raise UnsupportedOutput(f"the backend {self._declared.backend} gives no hidden states of this model")
            seq_ids = self._check_batch(batch)
            if not seq_ids:
                return np.empty((0, self._n_embd), np.float32)
            runs = _runs(batch, seq_ids)
            with failures_of(seq_ids):
                rows = self._by_adapters(batch, seq_ids, self._engine_embed)
            if Capability.ENCODER not in self._declared.capabilities:
                self._append(runs)
        return rows

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Run a batch; returns hidden states after layers, float32 [len(layers), n_rows, E]."""
        with self._call():
            if Capability.LAYER_STATES not in self._declared.capabilities:
                raise UnsupportedOutput(
                    f"the backend {self._declared.backend} gives no hidden states of this model's layers"
                )
            numbers = self._checks.layers(layers)
            seq_ids = self._check_batch(batch)
            if not seq_ids:
                return np.empty((len(numbers), 0, self._n_embd), np.float32)
            runs = _runs(batch, seq_ids)
            with failures_of(seq_ids):
                rows = self._by_adapters(batch, seq_ids, lambda part: self._engine_layer_states(part, numbers))
            if Capability.ENCODER not in self._declared.capabilities:
                self._append(runs)
        return rows.swapaxes(0, 1)

    def draft(self, seq_id: int, token: int, n: int, k: int = 1) -> TopLogits:
        """Predict the ``n`` tokens after ``token``, the next of a sequence, with the model's MTP layers."""
        with self._call():
            if Capability.MTP not in self._declared.capabilities:
                raise UnsupportedOutput(
                    "this context does not declare mtp: the model has no layers for multi-token prediction, or they are"
                    " not loaded"
                )
            seq_id = self._checks.draft(seq_id, token, n, k)
            with failures_of((seq_id,)):
                self._use_adapters_of(seq_id)
                return self._engine_draft(seq_id, int(token), n, k)

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Give an empty sequence the loaded adapters of these names, with their scales, in place of its own."""
        with self._call():
            adapters = self._adapters.named(scales)
            seq_id = self._checks.changeable(seq_id)
            if are_equal(adapters, self._adapters.of(seq_id)):
                return
            if length := self._ledger.length(seq_id):
                raise InvalidSequence(
                    f"the {length} tokens of sequence {seq_id} were decoded with other adapters: drop it first",
                    seq_id=seq_id,
                )
            self._adapters.put(seq_id, adapters)

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Make the empty sequence ``dst`` a copy of ``src[:end]``."""
        with self._call():
            src, dst = self._checks.sequence(src), self._checks.changeable(dst)
            if src == dst or self._ledger.length(dst):
                raise InvalidSequence(
                    f"cannot fork {src} into {dst}: the destination must be another, empty sequence", seq_id=dst
                )
            length = self._forked_length(src, end)
            n_copied = self._n_copied_by_fork(src, length)
            self._checks.room(self._ledger.fork_cost(length, n_copied), dst)
            if length:
                with failures_of((dst,)):
                    self._use_adapters_of(src)
                    self._engine_fork(src, dst, length)
                self._ledger.fork(src, dst, length, n_copied)
            self._adapters.put(dst, self._adapters.of(src))
            return Pos(dst, length)

    def fork_cost(self, src: int, end: int | None = None) -> int:
        """The number of tokens that ``fork(src, dst, end)`` would decode again."""
        with self._call():
            src = self._checks.sequence(src)
            length = self._forked_length(src, end)
            return self._engine_fork_cost(src, length) if length else 0

    def truncate(self, pos: Pos) -> Pos:
        """Forget the tokens of a sequence from ``pos.index`` on."""
        with self._call():
            self._checks.level(EditLevel.TRUNCATE)
            seq_id = self._checks.sequence(pos.seq_id)
            index = self._checks.index(seq_id, pos.index)
            self._checks.whole_blocks(seq_id, index)
            if index < self._ledger.length(seq_id):
                with failures_of((seq_id,)):
                    self._use_adapters_of(seq_id)
                    self._engine_truncate(seq_id, index)
                self._ledger.truncate(seq_id, index)
            return Pos(seq_id, index)

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Forget [start, end) of one sequence; later tokens move down."""
        with self._call():
            self._checks.level(EditLevel.CUT)
            if start.seq_id != end.seq_id:
                raise InvalidSequence(f"a cut has one sequence, not {start.seq_id} and {end.seq_id}")
            seq_id = self._checks.sequence(start.seq_id)
            first, last = self._checks.index(seq_id, start.index), self._checks.index(seq_id, end.index)
            if last < first:
                raise InvalidPosition(
                    f"a cut of sequence {seq_id} ends at {last}, before its start {first}", seq_id=seq_id
                )
            if first < last:
                if last == self._ledger.length(seq_id):
                    self._checks.whole_blocks(seq_id, first)
                self._cut(seq_id, first, last)
            return Pos(seq_id, self._ledger.length(seq_id))

    def drop(self, seq_id: int) -> None:
        """Forget one sequence."""
        with uninterrupted.closing(), self._call():
            self._drop(self._checks.sequence(seq_id))

    def clear(self) -> None:
        """Forget all sequences."""
        with uninterrupted.closing(), self._call():
            for seq_id in range(self.n_seq_max):
                self._drop(seq_id)

    def close(self) -> None:
        """Free the memory now. A second call does nothing."""
        with uninterrupted.closing(), one_call(self._lock, "let it return before close()"):
            if not self._closed:
                self._close()

    def _close(self) -> None:
        self._closed = True
        for steps in self._steps:
            steps.forget()
        self._writers.clear()
        self._engine_close()
        self._ledger.clear()
        self._adapters.put_back({})

    # Checks.

    @contextmanager
    def _call(self) -> Iterator[None]:
        with one_call(self._lock):
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise ContextClosed("the context is closed")

    def _check_batch(self, batch: Batch) -> list[int]:
        """Check a batch; returns its sequences, each once. A backend that refuses more batches extends this."""
        return self._checks.batch(batch)

    # Steps that several calls share.

    def _use_adapters_of(self, seq_id: int) -> None:
        self._adapters.use(seq_id, self._engine_use)

    def _by_adapters(self, batch: Batch, seq_ids: Sequence[int], run: Callable[[Batch], R]) -> R:
        """Run a batch; sequences with different adapters run one after the other."""
        groups = self._adapters.groups(seq_ids)
        if len(groups) == 1:
            self._use_adapters_of(seq_ids[0])
            return run(batch)
        results: list[R] = []
        try:
            for group in groups:
                self._use_adapters_of(group[0])
                results.append(_persistent(run(part_of(batch, group))))
        except BaseException:
            if Capability.ENCODER not in self._declared.capabilities:
                for seq_id in (seq_id for group in groups[: len(results)] for seq_id in group):
                    self._use_adapters_of(seq_id)
                    self._engine_take_back(seq_id, self._ledger.length(seq_id))
            raise
        return in_batch_order(batch, groups, results)

    def _append(self, runs: Mapping[int, Sequence[Held]]) -> None:
        for seq_id, run in runs.items():
            self._ledger.append(seq_id, run)

    def _forked_length(self, src: int, end: int | None) -> int:
        """Check a fork; returns its number of tokens."""
        length = self._checks.index(src, self._ledger.length(src) if end is None else end)
        self._checks.whole_blocks(src, length)
        return length

    def _cut(self, seq_id: int, start: int, end: int) -> None:
        self._checks.room(self._ledger.cut_cost(seq_id, start, end), seq_id)
        self._use_adapters_of(seq_id)
        if end == self._ledger.length(seq_id):
            with failures_of((seq_id,)):
                self._engine_truncate(seq_id, start)
            self._ledger.truncate(seq_id, start)
        else:
            with failures_of((seq_id,)):
                self._engine_cut(seq_id, start, end)
            self._ledger.cut(seq_id, start, end)

    def _drop(self, seq_id: int) -> None:
        writer = self._writers.pop(seq_id, None)
        if self._ledger.length(seq_id):
            self._engine_drop(seq_id)
            self._ledger.drop(seq_id)
        elif self._ledger.is_restoring(seq_id):
            if writer is not None:
                writer.undo()
            self._ledger.drop(seq_id)
