"""The steps of random programs: all calls that change a context, and the runs of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from slm_conformance.oracle.runs import Run

Call: TypeAlias = Literal["decode", "embed", "top"]
Variant: TypeAlias = Literal["own", "foreign", "format", "truncated", "short", "model", "token"]
"""The variant of a dump that is restored: see ``programs.variant``."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a context, and the length of runs in its programs.

    Attributes:
        n_ctx: number of positions.
        n_seq_max: number of sequences.
        n_batch: most tokens of a batch.
        longest: most inputs of a run.
    """

    n_ctx: int
    n_seq_max: int
    n_batch: int
    longest: int


@dataclass(frozen=True, slots=True)
class Decode:
    """``decode``, ``embed`` or ``decode_top`` of a batch of runs.

    Attributes:
        runs: in the order of the batch.
        call: which of the three.
        every: every n-th input of the batch has logits; 0 for none.
        woven: whether runs are interleaved, one input each. Only for runs of plain tokens.
    """

    runs: tuple[Run, ...]
    call: Call = "decode"
    every: int = 1
    woven: bool = False

    def order(self) -> list[tuple[int, int]]:
        """For each input of the batch: its run, and its index in the run."""
        indices = [(i, j) for i, run in enumerate(self.runs) for j in range(len(run.tokens))]
        return sorted(indices, key=lambda index: (index[1], index[0])) if self.woven else indices

    def rows_with_logits(self) -> list[int]:
        """The inputs of the batch with logits."""
        return list(range(0, sum(len(run.tokens) for run in self.runs), self.every)) if self.every else []


@dataclass(frozen=True, slots=True)
class Fork:
    """``fork``."""

    src: int
    dst: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Truncate:
    """``truncate``."""

    seq_id: int
    index: int


@dataclass(frozen=True, slots=True)
class Cut:
    """``cut``."""

    seq_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Drop:
    """``drop``."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Clear:
    """``clear``."""


@dataclass(frozen=True, slots=True)
class Dump:
    """``dump``; the bytes are stored as ``name``."""

    seq_id: int
    name: int


@dataclass(frozen=True, slots=True)
class Restore:
    """``restore`` a variant of the dump ``name``; nothing if there is no such dump."""

    seq_id: int
    name: int
    variant: Variant


Step: TypeAlias = Decode | Fork | Truncate | Cut | Drop | Clear | Dump | Restore
