"""Broken toys: each breaks one promise of the contract, and names the scenario that must notice.

``slm_conformance.faults:NAME`` is a backend like any other: ``pytest --slm-backend slm_conformance.faults:CutUpwards``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slm_conformance.toy import ToyBackend, ToyModel
from slm_conformance.toy_context import ToyContext
from slm_conformance.toy_engine import Array, Cell, ToyEngine
from slm_conformance.weights import Weights
from slm_core.errors import ContextFull, DecodeFailed, SlmError, UnsupportedEdit
from slm_core.protocols import Batch, Vocab
from slm_core.snapshot import Edit, SequenceSnapshot
from slm_core.types import Capability, EditLevel, Logits, ModelOptions, Pos


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken toy.

    Attributes:
        backend: how the adopter of it is to call it, ``module:attribute``.
        breaks: what is wrong with it.
        killed_by: the scenario that must fail, ``TestClass::test_name``.
    """

    backend: str
    breaks: str
    killed_by: str

    @property
    def name(self) -> str:
        """Of the broken toy."""
        return self.backend.partition(":")[2]


FAULTS: list[Fault] = []


def fault(killed_by: str) -> Callable[[type], type[ToyBackend]]:
    """Register a broken context, model or backend; the name of the class becomes that of a backend."""

    def register(broken: type) -> type[ToyBackend]:
        FAULTS.append(Fault(f"{broken.__module__}:{broken.__name__}", str(broken.__doc__), killed_by))
        if issubclass(broken, ToyBackend):
            return broken
        place = "context_type" if issubclass(broken, ToyContext) else "model_type"
        return type(broken.__name__, (ToyBackend,), {place: broken})

    return register


# Decoding.


@fault("TestDecode::test_strangers_in_a_batch")
class BatchLeaks(ToyContext):
    """A token sees the tokens of other sequences that stand before it in the batch."""

    def decode(self, batch: Batch) -> Logits:
        """Leak."""
        with self._call():
            self._check_batch(batch)
            rows = []
            seen: list[tuple[int, Cell]] = []
            for token, seq_id in zip(batch.tokens.tolist(), batch.seq_ids.tolist(), strict=True):
                strangers = [cell for other, cell in seen if other != seq_id]
                cell, logits = self.engine.step(token, strangers + self.cells[seq_id])
                self.cells[seq_id] = [*self.cells[seq_id], cell]
                seen.append((seq_id, cell))
                rows.append(logits)
            return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.wants_logits]


@fault("TestDecode::test_rows_come_in_the_order_of_the_batch")
class RowsBySequence(ToyContext):
    """Rows come sequence by sequence, not in the order of the batch."""

    def decode(self, batch: Batch) -> Logits:
        """Sort."""
        rows = super().decode(batch)
        return rows[np.argsort(batch.seq_ids[batch.wants_logits], kind="stable")]


@fault("TestDecode::test_a_prompt_in_chunks")
class ChunksForgetEachOther(ToyContext):
    """A token sees those of its own batch only."""

    def decode(self, batch: Batch) -> Logits:
        """Begin anew."""
        with self._call():
            self._check_batch(batch)
            fresh: list[list[Cell]] = [[] for _ in self.cells]
            rows = []
            for token, seq_id in zip(batch.tokens.tolist(), batch.seq_ids.tolist(), strict=True):
                cell, logits = self.engine.step(token, fresh[seq_id])
                fresh[seq_id].append(cell)
                rows.append(logits)
            self.cells = [old + new for old, new in zip(self.cells, fresh, strict=True)]
            return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.wants_logits]


@fault("TestDecode::test_rows_not_asked_for")
class AllRows(ToyContext):
    """``decode`` gives a row for every token, asked for or not."""

    def decode(self, batch: Batch) -> Logits:
        """Ask for all."""
        whole = self.new_batch()
        for token, seq_id, position in zip(batch.tokens, batch.seq_ids, batch.positions, strict=True):
            whole.add(int(token), Pos(int(seq_id), int(position)), logits=True)
        return super().decode(whole)


@fault("TestDecodeRefusals::test_a_bad_run_after_a_good_one")
class DirtyAfterRefusal(ToyContext):
    """Tokens before a bad one are decoded, then the bad one is refused."""

    def decode(self, batch: Batch) -> Logits:
        """Check while decoding."""
        rows = []
        for i in range(len(batch)):
            one = self.new_batch(1)
            one.add(int(batch.tokens[i]), Pos(int(batch.seq_ids[i]), int(batch.positions[i])), logits=True)
            rows.append(super().decode(one)[0])
        return np.array(rows, np.float32).reshape(-1, self.engine.n_vocab)[batch.wants_logits]


@fault("TestDecodeRefusals::test_a_position_that_is_not_the_next")
class PositionsIgnored(ToyContext):
    """Tokens are appended, whatever positions the batch gives them."""

    def _check_batch(self, batch: Batch) -> None:
        if len(batch) > self.n_free:
            raise ContextFull(len(batch), self.n_free)


@fault("TestDecodeLimits::test_overflow_in_prefill")
class WrongErrorType(ToyContext):
    """A full context raises ``DecodeFailed``."""

    def decode(self, batch: Batch) -> Logits:
        """Hide what is the matter."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            raise DecodeFailed("the engine returned 1") from error


@fault("TestDecodeLimits::test_overflow_in_generation")
class NeededAndFreeSwapped(ToyContext):
    """``ContextFull`` says free where it means needed."""

    def decode(self, batch: Batch) -> Logits:
        """Swap."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            raise ContextFull(error.free, error.needed) from error


# Edits.


@fault("TestTruncate::test_replaying_the_tail_gives_what_it_gave")
class TruncateOffByOne(ToyContext):
    """``truncate`` keeps a token too many."""

    def truncate(self, pos: Pos) -> Pos:
        """Keep one more."""
        super().truncate(Pos(pos.seq_id, min(pos.index + 1, self.length(pos.seq_id))))
        return pos


@fault("TestTruncate::test_past_the_end")
class TruncateClamps(ToyContext):
    """``truncate`` past the end is taken for a no-op."""

    def truncate(self, pos: Pos) -> Pos:
        """Clamp."""
        return super().truncate(Pos(pos.seq_id, min(pos.index, self.length(pos.seq_id))))


@fault("TestTruncate::test_frees_positions")
class TruncateLeaksPositions(ToyContext):
    """Positions that ``truncate`` forgets stay taken."""

    leaked = 0

    @property
    def n_free(self) -> int:
        """Fewer and fewer."""
        return super().n_free - self.leaked

    def truncate(self, pos: Pos) -> Pos:
        """Leak."""
        before = self.n_free
        place = super().truncate(pos)
        self.leaked += self.n_free - before
        return place


class _Moves(ToyContext):
    """A context whose engine moves cells wrongly."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Cut with ``move`` in place of the engine's."""
        kept, edits = super().without(cells, edits, first, last)
        return kept[:first] + [self.move(cell, first - last) for cell in cells[last:]], edits

    def move(self, cell: Cell, by: int) -> Cell:
        """The wrong way to move a cell."""
        raise NotImplementedError


@fault("TestCut::test_at_the_head")
class CutWithoutRotation(_Moves):
    """Keys keep the positions they had before a cut."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Not at all."""
        return dataclasses.replace(cell)


@fault("TestCut::test_in_the_middle")
class CutUpwards(_Moves):
    """Keys are rotated the wrong way."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Up."""
        return self.engine.moved(cell, -by)


@fault("TestCut::test_one_token")
class CutHalfRotation(_Moves):
    """Only the first half of each key is rotated."""

    def move(self, cell: Cell, by: int) -> Cell:
        """Half."""
        moved, half = self.engine.moved(cell, by), self.engine.shape.head_dim // 2
        keys = np.concatenate((moved.keys[..., :half], cell.keys[..., half:]), axis=-1)
        return Cell(cell.token, keys, cell.values)


@fault("TestCut::test_is_no_fresh_prefill")
class CutRecomputes(ToyContext):
    """What remains after a cut is decoded anew."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Prefill."""
        _, edits = super().without(cells, edits, first, last)
        kept = cells[:first]
        for cell in cells[last:]:
            kept.append(self.engine.step(cell.token, kept)[0])
        return kept, edits


@fault("TestCut::test_of_a_fork")
class CutChangesTheFork(ToyContext):
    """A cut of shared storage moves the keys of the other side, too."""

    def without(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Write what is shared."""
        for cell in cells[last:]:
            cell.keys[...] = self.engine.moved(cell, first - last).keys
        kept, edits = super().without(cells, edits, first, last)
        return kept[:first] + [dataclasses.replace(cell) for cell in cells[last:]], edits


@fault("TestDeclarations::test_cut_as_declared")
class CutOverdeclared(ToyContext):
    """The edit level is CUT, but a cut is refused."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Refuse."""
        raise UnsupportedEdit("this engine cannot cut")


# Forks.


@fault("TestFork::test_copy_and_original_diverge")
class ForkIsAnAlias(ToyContext):
    """Copy and original are one list."""

    def decode(self, batch: Batch) -> Logits:
        """Grow the aliases, too."""
        aliases = [(a, b) for a in range(self.n_seq_max) for b in range(a) if self.cells[a] and self._same(a, b)]
        rows = super().decode(batch)
        for a, b in aliases:
            longer = max(self.cells[a], self.cells[b], key=len)
            self.cells[a], self.cells[b] = list(longer), list(longer)
        return rows

    def _same(self, a: int, b: int) -> bool:
        return [id(cell) for cell in self.cells[a]] == [id(cell) for cell in self.cells[b]]


@fault("TestFork::test_dropping_one_leaves_the_other")
class DropFreesNeighbour(ToyContext):
    """``drop`` frees shared storage under the other side."""

    def drop(self, seq_id: int) -> None:
        """Free all that was shared."""
        dropped = {id(cell) for cell in self.cells[self._checked(seq_id)]}
        super().drop(seq_id)
        for other, cells in enumerate(self.cells):
            self.cells[other] = [cell for cell in cells if id(cell) not in dropped]


@fault("TestFork::test_shares_storage_as_declared")
class SharingOverdeclared(ToyContext):
    """Shared forks are declared, but a fork copies."""

    def forked(self, cells: list[Cell]) -> list[Cell]:
        """Copy."""
        return [dataclasses.replace(cell) for cell in cells]


@fault("TestFork::test_without_room")
class SharingUnderdeclared(ToyContext):
    """Forks share storage, and that is not declared."""

    capabilities = frozenset({Capability.KV_PAYLOAD})


# Dumps.


@fault("TestBadDumps::test_changed")
class ChecksumIgnored(ToyContext):
    """``restore`` takes bytes whose checksum does not match."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Correct the checksum."""
        body = data[:-32]
        return super().restore(seq_id, body + hashlib.blake2b(body, digest_size=32).digest())


@fault("TestBadDumps::test_with_a_payload_that_does_not_fit")
class PayloadTrusted(ToyContext):
    """A payload is cut or filled to the size that is wanted."""

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Make it fit."""
        shape = self.engine.shape
        n_bytes = len(snapshot.tokens) * 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * 4
        payload = snapshot.payload[:n_bytes].ljust(n_bytes, b"\0")
        return super().unpacked(dataclasses.replace(snapshot, payload=payload))


@fault("TestDumpRestore::test_in_place_of_another_history")
class RestoreAppends(ToyContext):
    """``restore`` appends to what the sequence holds."""

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Keep the old cells."""
        cells, edits = super().unpacked(snapshot)
        return self.cells[0] + cells, edits


@fault("TestDumpRestore::test_by_another_backend")
class ReplayWithoutEdits(ToyContext):
    """Another backend's dump is replayed without its cuts."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Forget the edits."""
        snapshot = SequenceSnapshot.from_bytes(data)
        if snapshot.backend != "toy":
            data = dataclasses.replace(snapshot, edits=()).to_bytes()
        return super().restore(seq_id, data)


@fault("TestDumpRestore::test_after_edits")
class DumpedKeysUnrotated(ToyContext):
    """A dump of an edited sequence holds keys as if there had been no edit."""

    def dump(self, seq_id: int) -> bytes:
        """Decode anew for the dump."""
        edited, cells = self.cells[seq_id], list[Cell]()
        if self.edits[seq_id]:
            for cell in edited:
                cells.append(self.engine.step(cell.token, cells)[0])
            self.cells[seq_id] = cells
        data = super().dump(seq_id)
        self.cells[seq_id] = edited
        return data


# Life and limits.


@fault("TestThreads::test_a_busy_context_refuses")
class NeverBusy(ToyContext):
    """Calls of several threads are not kept apart."""

    @contextmanager
    def _call(self, *, closing: bool = False) -> Iterator[None]:
        if not closing:
            self._check_open()
        yield


@fault("TestClose::test_use_after_close")
class OpenAfterClose(ToyContext):
    """A closed context is as a new one."""

    def close(self) -> None:
        """Empty it."""
        self.cells = [[] for _ in self.cells]


@fault("TestSizes::test_kv_types")
class KvTypeIgnored(ToyModel):
    """A KV type that does not exist here is ignored."""

    def check_kv_type(self, kv_type: object) -> None:
        """Take any."""


@fault("TestBackend::test_fingerprint")
class FingerprintOfThePath(ToyModel):
    """The fingerprint is of the path."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        digest = hashlib.blake2b(str(source).encode(), digest_size=32).hexdigest()
        self.info = dataclasses.replace(self.info, fingerprint=digest)


class _HalfEngine(ToyEngine):
    def _linear(self, name: str, x: Array) -> Array:
        return super()._linear(name, x.astype(np.float16).astype(np.float32))


@fault("TestNumbers::test_against_the_reference")
class SixteenBits(ToyModel):
    """It declares float32 and computes in 16 bits."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.engine = _HalfEngine(Weights.read(source))


@fault("TestBackend::test_an_unknown_option")
class OptionIgnored(ToyBackend):
    """An option that does not exist is ignored."""

    def load(self, source: Path, options: ModelOptions) -> ToyModel:
        """Leave it out."""
        known = {name: value for name, value in options.backend_options.items() if name in self.load_options}
        return super().load(source, dataclasses.replace(options, backend_options=known))


@fault("TestBackend::test_a_missing_file")
class RawErrors(ToyBackend):
    """What the operating system raises is let through."""

    def load(self, source: Path, options: ModelOptions) -> ToyModel:
        """Raise it."""
        try:
            return super().load(source, options)
        except SlmError as error:
            raise FileNotFoundError(str(source)) from error


@fault("TestBackend::test_an_unknown_device")
class AnyDevice(ToyBackend):
    """A device that does not exist is taken for the CPU."""

    def load(self, source: Path, options: ModelOptions) -> ToyModel:
        """Take it."""
        return super().load(source, dataclasses.replace(options, device="cpu"))


@fault("TestClose::test_of_the_model")
class ContextsOutliveTheModel(ToyModel):
    """Closing a model leaves its contexts open."""

    def close(self) -> None:
        """Close the model alone."""
        self._closed = True


@fault("TestDrop::test_all")
class ClearForgetsTheLast(ToyContext):
    """``clear`` leaves the last sequence."""

    def clear(self) -> None:
        """Stop one short."""
        for seq_id in range(self.n_seq_max - 1):
            self.drop(seq_id)


@fault("TestFork::test_of_the_first_tokens")
class ForkIgnoresEnd(ToyContext):
    """``fork`` copies all, whatever ``end`` says."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Copy all."""
        place = super().fork(src, dst, end)
        self.replace(dst, self.cells[src], self.edits[src])
        return place


class _WrongVocab:
    """A vocabulary that passes everything on; its descendants get one thing wrong."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.size, self.bos, self.eos, self.eog_ids = vocab.size, vocab.bos, vocab.eos, vocab.eog_ids

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._vocab.encode(text, add_special=add_special, parse_special=parse_special)

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:  # noqa: A002
        return self._vocab.token_bytes(id, special=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._vocab.decode(ids, special=special)


class _AlwaysSpecial(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return super().encode(text, add_special=add_special, parse_special=True)


class _Strict(_WrongVocab):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return super().encode(text.encode().decode(), add_special=add_special, parse_special=parse_special)


class _Alone(_WrongVocab):
    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(super(_Alone, self).decode([token], special=special) for token in ids)


@fault("TestVocabulary::test_control_tokens_are_parsed_or_not")
class SpecialAlwaysParsed(ToyModel):
    """Spelled-out control tokens are always those tokens."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.vocab = _AlwaysSpecial(self.vocab)


@fault("TestVocabulary::test_any_string_is_text")
class SurrogatesRaise(ToyModel):
    """A text with an unpaired surrogate raises ``UnicodeEncodeError``."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.vocab = _Strict(self.vocab)


@fault("TestVocabulary::test_bytes_join_back")
class TokensDecodedAlone(ToyModel):
    """``decode`` joins the texts of tokens, not their bytes, so that characters of several tokens break."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.vocab = _Alone(self.vocab)
