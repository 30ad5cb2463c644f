"""The parent's side of an isolated context."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.closing import Closing
from slm_core.container import PART_BYTES
from slm_core.context import picture
from slm_core.context.batch import TokenBatch
from slm_core.context.one_call import one_call
from slm_core.errors import BackendCrashed, ContextClosed, InvalidOption, ModelClosed
from slm_core.interrupts import uninterrupted
from slm_core.isolation.channel import ANY_LENGTH, Channel
from slm_core.isolation.process import Process
from slm_core.isolation.raised import rebuilt
from slm_core.isolation.shared_rows import N_BYTES, SharedRows
from slm_core.isolation.values import Garbled, Message, pack
from slm_core.protocols import BackendModel, Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits, ModelInfo, Pos, States, TopLogits

_SMALL = 1 << 16
"""The longest payload of a reply without arrays, in bytes."""
_READING = frozenset(
    {"length", "tokens", "n_exclusive", "all_exclusive", "fork_cost", "dump", "part", "adapters", "draft"}
)
"""Calls that change no sequence."""
_WIDEST = 1 << 20
"""The largest width of hidden states."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What a context declares."""

    capabilities: frozenset[Capability]
    edit_level: EditLevel
    options: ContextOptions
    n_free: int
    n_embd: int
    n_vocab: int


def declared_of(value: dict[str, Any], options: ContextOptions, info: ModelInfo) -> Declared:
    """The declarations of a context, from ``served_context.declared``, checked.

    Raises:
        Garbled: a value is invalid.
    """
    sizes = {name: value[name] for name in ("n_ctx", "n_seq_max", "n_batch", "n_free", "n_embd")}
    if not all(type(size) is int and 0 <= size < 2**31 for size in sizes.values()):
        raise Garbled("sizes of a context")
    n_free, n_embd = sizes.pop("n_free"), sizes.pop("n_embd")
    capabilities, edit_level = frozenset(map(Capability, value["capabilities"])), EditLevel(value["edit_level"])
    return Declared(capabilities, edit_level, replace(options, **sizes), n_free, n_embd, info.n_vocab)


class IsolatedContext(Closing):
    """A context in the process of its model; ``protocols.Context`` documents the calls.

    Args:
        model: the model; the context keeps it alive.
        process: the process.
        channel: the connection to this context.
        rows: the memory for logits.
        declared: the declarations of the context.
    """

    def __init__(
        self, model: BackendModel, process: Process, channel: Channel, rows: SharedRows, declared: Declared
    ) -> None:
        self._model = model
        self._process = process
        self._channel = channel
        self._declared = declared
        self._n_free = declared.n_free
        self._lengths = [0] * declared.options.n_seq_max
        self._exclusive: list[int] | None = None  # n_exclusive of each sequence; None after calls that may change it
        self._lock = threading.Lock()
        self._closed = False
        self._rows = rows
        self._abandoned: deque[int] = deque()  # numbers of dumps and restores that were garbage-collected
        weakref.finalize(self, channel.close)

    def __repr__(self) -> str:
        return picture.line(self, None if self._closed else dict(enumerate(self._lengths)))

    def _repr_html_(self) -> str:
        return picture.page(self, None if self._closed else dict(enumerate(self._lengths)), None)

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
        """Positions of all sequences together."""
        return self._declared.options.n_ctx

    @property
    def n_batch(self) -> int:
        """The largest number of tokens of one ``decode``."""
        return self._declared.options.n_batch

    @property
    def n_seq_max(self) -> int:
        """The number of sequences."""
        return self._declared.options.n_seq_max

    @property
    def n_embd(self) -> int:
        """E: the width of embedding rows and hidden states; 0 if the context neither takes nor returns them."""
        return self._declared.n_embd

    @property
    def n_free(self) -> int:
        """Free positions, after the last call."""
        return self._n_free

    def length(self, seq_id: int) -> int:
        """The number of tokens of a sequence, after the last call."""
        self._check_open()
        if isinstance(seq_id, int | np.integer) and 0 <= seq_id < self.n_seq_max:
            return self._lengths[seq_id]
        with self._call():
            return self._count(self._ask("length", seq_id))

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The tokens of a sequence, in order; ``EMBEDDED`` for each embedding row."""
        with self._call():
            ids = self._ask("tokens", seq_id, most_bytes=4 * self.n_ctx + _SMALL)
            self._check_array("tokens", ids, np.int32, (self._lengths[seq_id],))
            return tuple(ids.tolist())

    def n_exclusive(self, seq_id: int) -> int:
        """The number of positions that ``drop`` would free."""
        with self._call():
            if not (isinstance(seq_id, int | np.integer) and 0 <= seq_id < self.n_seq_max):
                return self._count(self._ask("n_exclusive", seq_id))
            if self._exclusive is None:  # one call for all sequences: an engine asks for each of them in each step
                counts = self._check_array(
                    "all_exclusive",
                    self._ask("all_exclusive", most_bytes=4 * self.n_seq_max + _SMALL),
                    np.int32,
                    (self.n_seq_max,),
                )
                if counts.min() < 0:
                    raise self._garbled("all_exclusive")
                self._exclusive = counts.tolist()
            return self._exclusive[seq_id]

    def adapters(self, seq_id: int) -> Mapping[str, float]:
        """The adapters of a sequence, by name, with their scales."""
        with self._call():
            match self._ask("adapters", seq_id):
                case [list() as names, list() as scales] if _are_scales(names, scales):
                    return dict(zip(names, scales, strict=True))
            raise self._garbled("adapters")

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Give an empty sequence these adapters of the model."""
        with self._call():
            if not isinstance(scales, Mapping):
                raise InvalidOption(f"adapters={repr(scales)[:80]} (accepted: names with their scales)")
            self._ask("set_adapters", seq_id, list(scales), list(scales.values()))

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
            arrays = _arrays(batch)
            n_rows, width = int(np.count_nonzero(arrays["logits_mask"])), self._declared.n_vocab
            n_bytes = 4 * n_rows * width
            rows = self._ask("decode", arrays, most_bytes=n_bytes + _SMALL)
            if isinstance(rows, list) and n_bytes <= N_BYTES:  # the shape of the rows in the shared memory
                self._check_list("decode", rows, [n_rows, width])
                return self._rows.read((n_rows, width))
            return self._check_array("decode", rows, np.float32, (n_rows, width))

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Run a batch; returns the k largest logits of each requested row."""
        with self._call():
            arrays, n_vocab = _arrays(batch), self._declared.n_vocab
            n_rows = int(np.count_nonzero(arrays["logits_mask"]))
            value = self._ask("decode_top", arrays, k, most_bytes=8 * n_rows * (n_vocab + 1) + _SMALL)
            return self._check_top("decode_top", value, n_rows, k)

    def embed(self, batch: Batch) -> States:
        """Run a batch; returns the requested hidden states, float32 [n_rows, E]."""
        with self._call():
            arrays = _arrays(batch)
            n_rows = int(np.count_nonzero(arrays["logits_mask"]))
            rows = self._ask("embed", arrays, most_bytes=4 * n_rows * _WIDEST + _SMALL)
            width = rows.shape[1] if isinstance(rows, np.ndarray) and rows.ndim == 2 else -1
            return self._check_array("embed", rows, np.float32, (n_rows, width))

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Run a batch; returns hidden states after layers, float32 [len(layers), n_rows, E]."""
        with self._call():
            arrays = _arrays(batch)
            numbers = [int(layer) if isinstance(layer, np.integer) else layer for layer in layers]
            n_rows = int(np.count_nonzero(arrays["logits_mask"]))
            n_bytes = 4 * len(numbers) * n_rows * self.n_embd
            rows = self._ask("layer_states", arrays, numbers, most_bytes=n_bytes + _SMALL)
            return self._check_array("layer_states", rows, np.float32, (len(numbers), n_rows, self.n_embd))

    def draft(self, seq_id: int, token: int, n: int, k: int = 1) -> TopLogits:
        """Predict the tokens after ``token``, the next of a sequence, with the model's MTP layers."""
        with self._call():
            most_rows = n if isinstance(n, int) and 0 < n <= self.n_ctx else 0  # the process refuses other numbers
            most_bytes = 8 * most_rows * (self._declared.n_vocab + 1) + _SMALL
            return self._check_top("draft", self._ask("draft", seq_id, token, n, k, most_bytes=most_bytes), n, k)

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Make the empty sequence ``dst`` a copy of ``src[:end]``."""
        with self._call():
            self._ask("fork", src, dst, end)
            return self._end_of(dst)

    def fork_cost(self, src: int, end: int | None = None) -> int:
        """The number of tokens that ``fork(src, dst, end)`` would decode again."""
        with self._call():
            return self._count(self._ask("fork_cost", src, end))

    def truncate(self, pos: Pos) -> Pos:
        """Forget the tokens of a sequence from ``pos.index`` on."""
        with self._call():
            self._ask("truncate", pos.seq_id, pos.index)
            return pos

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Forget [start, end) of one sequence; later tokens move down."""
        with self._call():
            self._ask("cut", start.seq_id, start.index, end.seq_id, end.index)
            return self._end_of(start.seq_id)

    def drop(self, seq_id: int) -> None:
        """Forget one sequence."""
        with uninterrupted.closing(), self._call():
            self._ask("drop", seq_id)

    def clear(self) -> None:
        """Forget all sequences."""
        with uninterrupted.closing(), self._call():
            self._ask("clear")

    def dump(self, seq_id: int) -> bytes:
        """Dump a sequence."""
        with self._call():
            return self._check_bytes("dump", self._ask("dump", seq_id, most_bytes=ANY_LENGTH), ANY_LENGTH)

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """The bytes of ``dump`` in parts. Other sequences may change between parts."""
        with self._call():
            return _Parts(self, self._count(self._ask("dump_parts", seq_id, part_bytes)), part_bytes)

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Replace a sequence by a dump, of this or another backend."""
        with self._call():
            self._ask("restore", seq_id, data)
            return self._end_of(seq_id)

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Like ``restore``, for a dump in parts."""
        with self._call():
            self._ask("restore_parts", seq_id, parts=iter(parts))
            return self._end_of(seq_id)

    def restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        """Restore a dump into an empty sequence, about one part a step."""
        with self._call():
            return _RestoreSteps(self, self._count(self._ask("restore_steps", seq_id)), iter(parts))

    def dump_context(self, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Dump all sequences, in parts."""
        with self._call():
            return _Parts(self, self._count(self._ask("dump_context", part_bytes)), part_bytes)

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Fill the empty context from ``dump_context``."""
        with self._call():
            self._ask("restore_context", parts=iter(parts))

    def close(self) -> None:
        """Free the memory now. A second call does nothing."""
        with uninterrupted.closing(), one_call(self._lock, "let it return before close()"):
            if not self._closed:
                self._closed = True
                self._rows.close()
                try:
                    self._close()
                finally:
                    self._channel.close()

    def _close(self) -> None:
        try:
            match self._process.exchange(self._channel, "close", pack(["close", []]), most_bytes=_SMALL):
                case ["error", error]:
                    raise rebuilt(error)
        except (BackendCrashed, ModelClosed, Garbled):
            pass  # the process has freed the memory

    def next_part(self, number: int, part_bytes: int) -> bytes | None:
        """The next part of a dump; None after the last one."""
        with self._call():
            part = self._ask("part", number, most_bytes=part_bytes + _SMALL)
            return None if part is None else self._check_bytes("part", part, part_bytes)

    def restore_step(self, number: int, parts: Iterator[bytes]) -> bool:
        """Make a step of a restore; returns whether it was the last."""
        with self._call():
            try:
                return bool(self._ask("restore_step", number, parts=parts))
            except BaseException:
                with suppress(BackendCrashed):
                    self._ask("length", 0)  # notes the positions that the restore no longer reserves
                raise

    def abandon(self, number: int) -> None:
        """Note that a dump in parts or a restore in steps was garbage-collected; the next call tells the process."""
        self._abandoned.append(number)

    # Steps that several calls share.

    @contextmanager
    def _call(self) -> Iterator[None]:
        with one_call(self._lock):
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise ContextClosed("the context is closed")
        self._process.check()

    def _ask(
        self,
        call: str,
        *arguments: object,
        most_bytes: int = _SMALL,
        parts: Iterator[bytes] | None = None,
    ) -> Any:
        """Make a call in the process; returns its value."""
        if call not in _READING:
            self._exclusive = None
        abandoned = [self._abandoned.popleft() for _ in range(len(self._abandoned))]
        message = pack([call, abandoned, *arguments])
        reply = self._process.exchange(self._channel, call, message, most_bytes=most_bytes)
        failure: BaseException | None = None
        while parts is not None and reply[0] == "next":
            answer, failure = _next_part(parts, failure)
            reply = self._process.exchange(self._channel, call, answer, most_bytes=most_bytes)
        try:
            match reply:
                case ["ok", value, int() as n_free, list() as lengths]:
                    self._note(n_free, lengths)
                case ["error", error]:
                    raise failure or rebuilt(error)
                case _:
                    raise Garbled("no reply")
        except Garbled:
            raise self._garbled(call) from None
        return value

    def _note(self, n_free: int, lengths: list[Any]) -> None:
        """Note the free positions, and the lengths of the sequences that a call changed."""
        limit = self.n_ctx
        if not 0 <= n_free <= limit:
            raise Garbled("n_free")
        for change in lengths:
            match change:
                case [int() as seq_id, int() as length] if 0 <= seq_id < self.n_seq_max and 0 <= length <= limit:
                    self._lengths[seq_id] = length
                case _:
                    raise Garbled("lengths")
        self._n_free = n_free

    def _garbled(self, call: str) -> BackendCrashed:
        return self._process.fail(f"was killed: its answer to {call} is malformed")

    def _end_of(self, seq_id: int) -> Pos:
        return Pos(seq_id, self._lengths[seq_id])

    def _count(self, value: object) -> int:
        if type(value) is not int or value < 0:
            raise self._garbled("a count")
        return value

    def _check_top(self, call: str, value: object, n_rows: int, k: int) -> TopLogits:
        if not isinstance(value, list) or len(value) != 3:
            raise self._garbled(call)
        tokens = self._check_array(call, value[0], np.int32, (n_rows, k))
        logits = self._check_array(call, value[1], np.float32, (n_rows, k))
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self._declared.n_vocab):
            raise self._garbled(call)
        return TopLogits(tokens, logits, self._check_array(call, value[2], np.float32, (n_rows,)))

    def _check_bytes(self, call: str, value: object, most: int) -> bytes:
        if not isinstance(value, bytes) or len(value) > most:
            raise self._garbled(call)
        return value

    def _check_list(self, call: str, value: Sequence[object], expected: Sequence[int]) -> None:
        if any(type(number) is not int for number in value) or value != expected:
            raise self._garbled(call)

    def _check_array(self, call: str, value: object, dtype: type[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != shape:
            raise self._garbled(call)
        return value


class _Parts:
    """The parts of a dump. Each is made when it is requested."""

    def __init__(self, context: IsolatedContext, number: int, part_bytes: int) -> None:
        self._context = context
        self._number = number
        self._part_bytes = part_bytes
        weakref.finalize(self, context.abandon, number).atexit = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        part = self._context.next_part(self._number, self._part_bytes)
        if part is None:
            raise StopIteration
        return part


class _RestoreSteps:
    """The steps of a restore."""

    def __init__(self, context: IsolatedContext, number: int, parts: Iterator[bytes]) -> None:
        self._context = context
        self._number = number
        self._parts = parts
        self._is_over = False
        weakref.finalize(self, context.abandon, number).atexit = False

    def __iter__(self) -> Iterator[None]:
        return self

    def __next__(self) -> None:
        self._is_over = self._is_over or self._context.restore_step(self._number, self._parts)
        if self._is_over:
            raise StopIteration


def _next_part(parts: Iterator[bytes], failure: BaseException | None) -> tuple[Message, BaseException | None]:
    """The message with the next part, and the error if there is none."""
    if failure is None:
        try:
            with uninterrupted.paused():  # a pipe may give no part for a long time
                part = next(parts)
            return pack(["part", part]), None
        except StopIteration:
            return pack(["end"]), None
        except BaseException as error:
            failure = error
    return pack(["failed"]), failure


def _are_scales(names: list[Any], scales: list[Any]) -> bool:
    return (
        len(names) == len(scales)
        and all(isinstance(name, str) for name in names)
        and all(isinstance(scale, float) for scale in scales)
    )


def _arrays(batch: Batch) -> dict[str, NDArray[Any]]:
    """The arrays of a batch."""
    return {
        "tokens": batch.tokens,
        "seq_ids": batch.seq_ids,
        "positions": batch.positions,
        "logits_mask": batch.logits_mask,
        "ahead": batch.ahead,
        "embeddings": batch.embeddings,
        "offsets": batch.offsets,
        "bias": batch.bias,
    }
