"""The contract in plain Python: the tokens of each sequence, the errors of each call, and ``n_free``.

Each position of a sequence is an object; sequences that share storage share objects, so that ``n_free`` is ``n_ctx``
less the distinct objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from slm_conformance.oracle.runs import Run
from slm_conformance.suite.programs.context_steps import (
    Clear,
    Cut,
    Decode,
    Drop,
    Dump,
    Fork,
    Restore,
    Sizes,
    Step,
    Truncate,
    Variant,
)
from slm_core.errors import (
    BatchFull,
    ContextFull,
    InvalidPosition,
    InvalidSequence,
    InvalidSnapshot,
    InvalidToken,
    SlmError,
    SnapshotMismatch,
    UnsupportedEdit,
    UnsupportedInput,
    UnsupportedOutput,
)
from slm_core.types import EMBEDDED, Capability, EditLevel

Errors: TypeAlias = set[type[SlmError]]
_BAD_DUMPS: dict[Variant, type[SlmError]] = {
    "truncated": InvalidSnapshot,
    "short": InvalidSnapshot,
    "model": SnapshotMismatch,
    "token": InvalidSnapshot,
}
_OUTPUTS = {"embed": Capability.EMBEDDINGS, "top": Capability.DEVICE_SAMPLING}
_images = itertools.count(1)


class Slot:
    """The storage of one position.

    Attributes:
        token: the value in ``tokens``; ``EMBEDDED`` for a row.
        ahead: number of inputs after it in its block.
        image: a number that the rows of one image share; 0 for none.
    """

    __slots__ = ("ahead", "image", "token")

    def __init__(self, token: int, ahead: int = 0, image: int = 0) -> None:
        self.token = token
        self.ahead = ahead
        self.image = image


@dataclass(frozen=True, slots=True)
class SequenceModel:
    """A sequence of the model.

    Attributes:
        slots: the storage of each position.
        n_cut: the number of tokens that cuts removed; a context that decodes a dump again may need room for them.
    """

    slots: tuple[Slot, ...] = ()
    n_cut: int = 0


@dataclass(slots=True)
class ContractModel:
    """The contents of a context, and the errors of each call, by the contract.

    Attributes:
        n_vocab: vocabulary size V.
        edit_level: the context's edit level.
        capabilities: the context's capabilities.
        sizes: sizes of the context.
        sequences: by sequence id.
        dumps: the dumped sequences, by name.
        copied: the destination of the last fork and its slots as a copy, if the fork may have copied an image that its
            end splits.
    """

    n_vocab: int
    edit_level: EditLevel
    capabilities: frozenset[Capability]
    sizes: Sizes
    sequences: list[SequenceModel] = field(init=False)
    dumps: dict[int, SequenceModel] = field(default_factory=dict)
    copied: tuple[int, SequenceModel] | None = None

    def __post_init__(self) -> None:
        self.sequences = [SequenceModel()] * self.sizes.n_seq_max

    @property
    def n_free(self) -> int:
        """Free positions. A shared position counts once."""
        return self.sizes.n_ctx - len({slot for sequence in self.sequences for slot in sequence.slots})

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The tokens of a sequence."""
        return tuple(slot.token for slot in self.sequences[seq_id].slots)

    def length(self, seq_id: int) -> int:
        """Tokens of a sequence; 0 for one that does not exist."""
        return len(self.sequences[seq_id].slots) if self.exists(seq_id) else 0

    def exists(self, seq_id: int) -> bool:
        """Whether the context has this sequence id."""
        return 0 <= seq_id < self.sizes.n_seq_max

    def first_positions(self, runs: Sequence[Run]) -> list[int]:
        """The first position of each run of a batch."""
        lengths = {run.seq_id: self.length(run.seq_id) for run in runs}
        firsts = []
        for run in runs:
            firsts.append(max(0, lengths[run.seq_id] + run.shift))
            lengths[run.seq_id] += len(run.tokens)
        return firsts

    def play(self, step: Step) -> tuple[Errors, bool]:
        """Make a step, if it is legal.

        Returns:
            errors: the errors that a context may raise; none for a legal call.
            must: whether it must raise one of them, or may also succeed.
        """
        errors, must = self._errors(step)
        if not errors:
            self.make(step)
        return errors, must

    def make(self, step: Step) -> None:
        """Make a legal step."""
        self.copied = None
        match step:
            case Decode(runs):
                for run in runs:
                    self._set(run.seq_id, (*self.sequences[run.seq_id].slots, *_new_slots(run)))
            case Fork(src, dst, end):
                self._fork(src, dst, self.length(src) if end is None else end)
            case Truncate(seq_id, index):
                self._set(seq_id, self.sequences[seq_id].slots[:index])
            case Cut(seq_id, start, end):
                self._set(seq_id, self._without(seq_id, start, end), end - start)
            case Drop(seq_id):
                self.sequences[seq_id] = SequenceModel()
            case Clear():
                self.sequences = [SequenceModel()] * self.sizes.n_seq_max
            case Dump(seq_id, name):
                self.dumps[name] = self.sequences[seq_id]
            case Restore(seq_id, name, _) if name in self.dumps:
                self.sequences[seq_id] = SequenceModel(_fresh(self.dumps[name].slots), self.dumps[name].n_cut)

    def _set(self, seq_id: int, slots: tuple[Slot, ...], n_cut: int = 0) -> None:
        self.sequences[seq_id] = SequenceModel(slots, self.sequences[seq_id].n_cut + n_cut)

    def _fork(self, src: int, dst: int, end: int) -> None:
        slots, n_cut = self.sequences[src].slots[:end], self.sequences[src].n_cut
        shared = Capability.SHARED_FORK in self.capabilities
        self.sequences[dst] = SequenceModel(slots if shared else _fresh(slots), n_cut)
        if shared and (n := self._n_split(src, end)):
            self.copied = dst, SequenceModel(slots[: end - n] + _fresh(slots[end - n :]), n_cut)

    def _n_split(self, src: int, end: int) -> int:
        """The number of rows before ``end`` of the image that it splits. A fork may have to copy them."""
        slots = self.sequences[src].slots
        if not 0 < end < len(slots) or not slots[end].image or slots[end - 1].image != slots[end].image:
            return 0
        return sum(slot.image == slots[end].image for slot in slots[:end])

    def _without(self, seq_id: int, start: int, end: int) -> tuple[Slot, ...]:
        """The slots after a cut. It moves later tokens, which are not shared then."""
        slots = self.sequences[seq_id].slots
        return slots if start == end else slots[:start] + _fresh(slots[end:])

    # Errors.

    def _errors(self, step: Step) -> tuple[Errors, bool]:
        errors: Errors = set() if all(map(self.exists, _sequences(step))) else {InvalidSequence}
        match step:
            case Decode():
                errors |= {error for error, applies in self._decode_errors(step) if applies}
            case Fork(src, dst, end):
                return self._fork_errors(errors, src, dst, self.length(src) if end is None else end)
            case Truncate(seq_id, index):
                errors |= self._level_errors(EditLevel.TRUNCATE)
                return self._with_block_errors(errors | self._index_errors(seq_id, index), seq_id, index)
            case Cut(seq_id, start, end):
                return self._cut_errors(errors, seq_id, start, end)
            case Restore(seq_id, name, variant) if name in self.dumps:
                restore_errors, must = self._restore_errors(seq_id, self.dumps[name], variant)
                return errors | restore_errors, must or bool(errors)
        return errors, True

    def _decode_errors(self, step: Decode) -> Iterator[tuple[type[SlmError], bool]]:
        runs, declared = step.runs, self.capabilities
        n = sum(len(run.tokens) for run in runs)
        yield BatchFull, n > self.sizes.n_batch
        yield ContextFull, n > self.n_free
        ids = [token for run in runs if run.kind == "tokens" for token in run.tokens]
        yield InvalidToken, any(token >= self.n_vocab for token in ids)
        contiguous = [Run(run.seq_id, 0, run.tokens) for run in runs]
        yield InvalidPosition, self.first_positions(runs) != self.first_positions(contiguous)
        yield UnsupportedOutput, step.call in _OUTPUTS and _OUTPUTS[step.call] not in declared
        for is_used, capability in (
            (any(run.kind != "tokens" for run in runs), Capability.EMBEDDING_INPUT),
            (any(run.kind == "image" and len(run.tokens) > 1 for run in runs), Capability.MROPE_POSITIONS),
            (any(run.block and len(run.tokens) > 1 for run in runs), Capability.BIDIRECTIONAL_BLOCKS),
        ):
            yield UnsupportedInput, is_used and capability not in declared

    def _fork_errors(self, errors: Errors, src: int, dst: int, end: int) -> tuple[Errors, bool]:
        errors = errors | self._index_errors(src, end)
        if src == dst or self.length(dst):
            errors.add(InvalidSequence)
        if Capability.SHARED_FORK not in self.capabilities and end > self.n_free:
            errors.add(ContextFull)
        if errors:
            return self._with_block_errors(errors, src, end)
        possible: Errors = {ContextFull} if self._n_split(src, end) > self.n_free else set()
        if 0 < end < self.length(src) and self.edit_level < EditLevel.TRUNCATE:
            possible.add(UnsupportedEdit)
        block_errors, must = self._with_block_errors(set(), src, end)
        return possible | block_errors, must if block_errors else not possible

    def _cut_errors(self, errors: Errors, seq_id: int, start: int, end: int) -> tuple[Errors, bool]:
        errors = errors | self._level_errors(EditLevel.CUT)
        errors |= self._index_errors(seq_id, start) | self._index_errors(seq_id, end)
        errors |= {InvalidPosition} if end < start else set()
        if errors:
            return errors, True
        if len(self._without(seq_id, start, end)) > self._room(seq_id, start, end):
            return {ContextFull}, True
        to_the_end = start < end == self.length(seq_id)
        return self._with_block_errors(errors, seq_id, start) if to_the_end else (errors, True)

    def _with_block_errors(self, errors: Errors, seq_id: int, length: int) -> tuple[Errors, bool]:
        """Errors of keeping the first ``length`` tokens: no block may be split, unless a cut removed part of it."""
        slots = self.sequences[seq_id].slots if self.exists(seq_id) else ()
        if not 0 < length < len(slots) or not slots[length - 1].ahead:
            return errors, True
        n = slots[length - 1].ahead
        is_whole = [slot.ahead for slot in slots[length : length + n]] == list(range(n - 1, -1, -1))
        return errors | {InvalidPosition}, bool(errors) or is_whole

    def _room(self, seq_id: int, start: int, end: int) -> int:
        """The most slots that a sequence may have after a cut: free ones, its own, and those that stay shared."""
        others = {slot for i, sequence in enumerate(self.sequences) if i != seq_id for slot in sequence.slots}
        may_stay_shared = self.sequences[seq_id].slots if start == end else self.sequences[seq_id].slots[:start]
        return self.sizes.n_ctx - len(others) + len(others & set(may_stay_shared))

    def _restore_errors(self, seq_id: int, dumped: SequenceModel, variant: Variant) -> tuple[Errors, bool]:
        free = self._room(seq_id, 0, self.sizes.n_ctx) if self.exists(seq_id) else self.sizes.n_ctx
        # A context that decodes the dump again, or keeps the old sequence until the end, may need more.
        peak = max(len(dumped.slots) + dumped.n_cut, self.length(seq_id))
        errors: Errors = {ContextFull} if peak > free else set()
        has_payload = Capability.KV_PAYLOAD in self.capabilities and len(dumped.slots) > 0
        is_bad = variant in _BAD_DUMPS and (has_payload or variant != "short")
        is_bad &= len(dumped.slots) > 0 or variant != "token"
        if is_bad:
            return errors | {_BAD_DUMPS[variant]}, True
        return errors, len(dumped.slots) > free

    def _level_errors(self, level: EditLevel) -> Errors:
        return {UnsupportedEdit} if self.edit_level < level else set()

    def _index_errors(self, seq_id: int, index: int) -> Errors:
        return set() if 0 <= index <= self.length(seq_id) else {InvalidPosition}


def _new_slots(run: Run) -> Iterator[Slot]:
    n, image = len(run.tokens), next(_images) if run.kind == "image" else 0
    for i, token in enumerate(run.tokens):
        yield Slot(token if run.kind == "tokens" else EMBEDDED, n - 1 - i if run.block else 0, image)


def _fresh(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    return tuple(Slot(slot.token, slot.ahead, slot.image) for slot in slots)


def _sequences(step: Step) -> list[int]:
    """The sequences that a step names."""
    match step:
        case Decode(runs):
            return [run.seq_id for run in runs]
        case Fork(src, dst, _):
            return [src, dst]
        case Clear():
            return []
    return [step.seq_id]
