"""Mutants whose errors do not name the sequence that they are about."""

from __future__ import annotations

import re

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_core.errors import ContextFull, InvalidPosition, InvalidToken
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos


@mutant("TestErrors::test_name_the_sequence_without_room")
class FullForTheFirst(ToyContext):
    """``ContextFull`` always names the first sequence of the batch."""

    def decode(self, batch: Batch) -> Logits:
        """Replace the error's ``seq_id`` by that of the first token."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            raise ContextFull(error.needed, error.free, seq_id=int(batch.seq_ids[0])) from error


@mutant("TestErrors::test_name_the_sequence_of_a_bad_batch")
class TokensOfNobody(ToyContext):
    """The error for a token outside the vocabulary names the sequence only in its message."""

    def decode(self, batch: Batch) -> Logits:
        """Raise the error again without its ``seq_id``."""
        try:
            return super().decode(batch)
        except InvalidToken as error:
            raise InvalidToken(str(error)) from error


@mutant("TestErrors::test_name_the_sequence_of_a_call")
class TruncateErrorNamesNoSequence(ToyContext):
    """The message of a ``truncate`` error does not name the sequence."""

    def truncate(self, pos: Pos) -> Pos:
        """Remove the sequence and all numbers from the error's message."""
        try:
            return super().truncate(pos)
        except InvalidPosition as error:
            message = re.sub(r"sequence \d+", "the sequence", str(error).replace(str(pos.index), "n"))
            raise InvalidPosition(re.sub(r"\d+", "n", message), seq_id=pos.seq_id) from error
