"""Mutants whose drafts are wrong, or change the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_core.context.inputs import Held
from slm_core.protocols import Batch
from slm_core.types import Capability, Logits, Pos, TopLogits


@mutant("TestMtp::test_as_declared")
class DraftsAreMissing(ToyContext):
    """Multi-token prediction is not declared, and ``draft`` raises ``NotImplementedError``."""

    capabilities = ToyContext.capabilities - {Capability.MTP}

    def draft(self, seq_id: int, token: int, n: int, k: int = 1) -> TopLogits:
        """Raise ``NotImplementedError``."""
        raise NotImplementedError


@mutant("TestMtp::test_as_declared")
class DraftsAreWide(ToyContext):
    """The tokens of ``draft`` are int64."""

    def draft(self, seq_id: int, token: int, n: int, k: int = 1) -> TopLogits:
        """Convert the tokens to int64."""
        top = super().draft(seq_id, token, n, k)
        return dataclasses.replace(top, tokens=top.tokens.astype(np.int64))


@mutant("TestMtp::test_after_batches")
class DraftsSkipSingles(ToyContext):
    """The MTP layer ignores tokens that were decoded alone."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.singles: set[int] = set()

    def decode(self, batch: Batch) -> Logits:
        """Note the position of a token that is alone in its batch."""
        rows = super().decode(batch)
        if len(batch) == 1:
            self.singles.add(int(batch.positions[0]))
        return rows

    def drafted_after(self, seq_id: int) -> Sequence[Held]:
        """Leave out tokens that were decoded alone."""
        return [token for i, token in enumerate(super().drafted_after(seq_id)) if i not in self.singles]


@mutant("TestMtp::test_changes_nothing")
class DraftsStay(ToyContext):
    """If more than a third of the context is full, a draft leaves ``token`` in its sequence."""

    def draft(self, seq_id: int, token: int, n: int, k: int = 1) -> TopLogits:
        """Decode the token after the draft."""
        top = super().draft(seq_id, token, n, k)
        if 3 * self.n_free < 2 * self.n_ctx:
            batch = self.new_batch()
            batch.add(token, Pos(seq_id, len(self.cells[seq_id])))
            self.decode(batch)
        return top


class _Remembers(ToyContext):
    """Drafts from the tokens that a sequence had after its last decode."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.seen: dict[int, Sequence[Held]] = {}

    def decode(self, batch: Batch) -> Logits:
        """Remember the tokens of all sequences."""
        rows = super().decode(batch)
        self.seen |= {i: [cell.token for cell in cells] for i, cells in enumerate(self.cells) if cells}
        return rows


@mutant("TestMtp::test_after_edits")
class DraftsForgetTruncates(_Remembers):
    """After a truncate, a draft continues the removed tokens."""

    def drafted_after(self, seq_id: int) -> Sequence[Held]:
        """Read the remembered tokens if the sequence has fewer now."""
        now, seen = super().drafted_after(seq_id), self.seen.get(seq_id, [])
        return seen if 0 < len(now) < len(seen) else now


@mutant("TestMtp::test_after_restores")
class DraftsOfNothing(_Remembers):
    """A restored sequence drafts as if it were empty."""

    def drafted_after(self, seq_id: int) -> Sequence[Held]:
        """Read nothing if this context decoded and forked none of the tokens."""
        is_fork = any(self.cells[seq_id][:1] == other[:1] for i, other in enumerate(self.cells) if i != seq_id)
        return super().drafted_after(seq_id) if seq_id in self.seen or is_fork else []


@mutant("TestMtp::test_refusals")
class DraftsPastTheEnd(ToyContext):
    """A draft may be longer than the free positions."""

    def check_draft(self, seq_id: int, token: int, n: int, k: int) -> None:
        """Check a draft of one token."""
        super().check_draft(seq_id, token, min(n, 1), k)
