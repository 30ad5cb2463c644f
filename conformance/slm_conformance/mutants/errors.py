"""Toys whose errors do not say which sequence they are about."""

from __future__ import annotations

import re

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_core.errors import ContextFull, InvalidPosition, InvalidToken
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos


@mutant("TestErrors::test_name_the_sequence_without_room")
class FullForTheFirst(ToyContext):
    """A batch without room is that of its first sequence, whichever has no room."""

    def decode(self, batch: Batch) -> Logits:
        """Name it."""
        try:
            return super().decode(batch)
        except ContextFull as error:
            raise ContextFull(error.needed, error.free, seq_id=int(batch.seq_ids[0])) from error


@mutant("TestErrors::test_name_the_sequence_of_a_bad_batch")
class TokensOfNobody(ToyContext):
    """The error of a token that does not exist has the sequence in its message alone."""

    def decode(self, batch: Batch) -> Logits:
        """Forget it."""
        try:
            return super().decode(batch)
        except InvalidToken as error:
            raise InvalidToken(str(error)) from error


@mutant("TestErrors::test_name_the_sequence_of_a_call")
class PlacesOfNobody(ToyContext):
    """The error of a truncate has no sequence in its message."""

    def truncate(self, pos: Pos) -> Pos:
        """Leave it out."""
        try:
            return super().truncate(pos)
        except InvalidPosition as error:
            place = re.sub(r"sequence \d+", "the sequence", str(error).replace(str(pos.index), "n"))
            raise InvalidPosition(re.sub(r"\d+", "n", place), seq_id=pos.seq_id) from error
