"""Mutants that verify drafts wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_conformance.mutants.above import breaks
from slm_core.chat import session_dump
from slm_core.chat.decoded import DecodedSequence
from slm_core.errors import ContextFull
from slm_core.generation.speculation import SpeculativeSource, dumped, lookup, model, rounds
from slm_core.protocols import Sampler


@breaks("TestSpeculation::test_greedy_is_the_largest_logit", SpeculativeSource, "choose")
def DraftsAreBelieved(original: Any, drafts: SpeculativeSource, sampler: Sampler, logits: Any) -> int:  # noqa: N802
    """A drafted token with the second largest logit is accepted in place of the largest."""
    queue = drafts.queue
    chosen: int = original(drafts, sampler, logits)
    second, first = np.argsort(logits)[-2:]
    return int(second) if queue and queue[0][0] == second and chosen == first else chosen


@breaks("TestSpeculation::test_the_chain_decides", SpeculativeSource, "choose")
def DraftsPassTheSampler(original: Any, drafts: SpeculativeSource, sampler: Sampler, logits: Any) -> int:  # noqa: N802
    """A drafted token with the largest logit is accepted without the sampler."""
    queue = drafts.queue
    if queue and queue[0][0] == int(logits.argmax()):
        return queue[0][0]
    chosen: int = original(drafts, sampler, logits)
    return chosen


@breaks("TestSpeculation::test_one_batch_for_a_draft", DecodedSequence, "next_row")
def OneDraftedTokenABatch(  # noqa: N802
    original: Any,
    decoded: DecodedSequence,
    tokens: Any,
    cancelled: Any,
    expected: Sequence[int] = (),
    progress: Any = None,
) -> Any:
    """Only the first token of a draft of seven is decoded in the same batch."""
    return original(decoded, tokens, cancelled, expected[:1] if len(expected) == 7 else expected, progress)


@breaks("TestSpeculation::test_nothing_stays_of_a_draft", SpeculativeSource, "settle")
def DraftStays(original: Any, drafts: SpeculativeSource) -> None:  # noqa: N802
    """Decoded tokens of a draft stay in the context when the answer ends."""


@breaks("TestSpeculation::test_drawn_drafts_keep_the_shares", rounds, "_looked_up")
def DraftProbabilitiesIgnored(original: Any, draft_probabilities: Any, ids: Any) -> Any:  # noqa: N802
    """All drafted tokens count as drawn from uniform draft probabilities."""
    return np.full(len(ids), 1 / len(draft_probabilities[0]))


@breaks("TestSpeculation::test_a_constraint_rules_drafts", rounds, "_allowed")
def ConstraintIsMovedOn(original: Any, proposal: Any, constraint: Any) -> Any:  # noqa: N802
    """A draft of a function advances the answer's constraint, not a copy."""
    if not isinstance(proposal.tokens, tuple):
        return original(proposal, constraint)

    class Itself:
        """Returns the constraint itself as its clone."""

        def clone(self) -> Any:
            """Return the original constraint."""
            return constraint

    return list(original(proposal, Itself()))


@breaks("TestSpeculation::test_dumped_within_a_draft", session_dump, "_answer_meta")
def DumpWithoutDrafts(original: Any, answer: Any) -> Any:  # noqa: N802
    """A dump lacks the answer's speculation."""
    return original(dataclasses.replace(answer, speculation=None))


@breaks("TestSpeculation::test_in_a_full_context", DecodedSequence, "next_row")
def DraftsNeedRoom(  # noqa: N802
    original: Any,
    decoded: DecodedSequence,
    tokens: Any,
    cancelled: Any,
    expected: Sequence[int] = (),
    progress: Any = None,
) -> Any:
    """A draft that does not fit is refused, not shortened."""
    needed = len(tokens) - decoded.n_held + len(expected)
    if expected and needed > decoded.context.n_free:
        raise ContextFull(needed, decoded.context.n_free)
    return original(decoded, tokens, cancelled, expected, progress)


@breaks("TestSpeculation::test_a_draft_model", model, "common_prefix")
def ChangesUnseen(original: Any, held: Sequence[int], tokens: Sequence[int]) -> int:  # noqa: N802
    """A draft model does not notice that the history has changed."""
    return min(len(held), len(tokens))


@breaks("TestSpeculation::test_below_truncate", SpeculativeSource, "_reason")
def AlwaysTooLow(original: Any, drafts: SpeculativeSource) -> str:  # noqa: N802
    """Speculation reports for every context that the edit level is too low."""
    return "off: the context cannot take a wrong guess back (edit level REPLAY)"


@breaks("TestSpeculation::test_counts", SpeculativeSource, "begin_round")
def RoundsCountTwice(original: Any, drafts: SpeculativeSource, n: int, seconds: float) -> None:  # noqa: N802
    """Drafted tokens are counted twice."""
    original(drafts, n, seconds)
    drafts._drafted += n  # noqa: SLF001  (a mutant changes internals)


@breaks("TestSpeculation::test_drafts_of_the_history", lookup, "continued")
def FirstTokensAgain(original: Any, tokens: Sequence[int], start: int, n: int) -> list[int]:  # noqa: N802
    """Drafts past the end of the history repeat its first tokens."""
    copied = list(tokens[start : start + n])
    return copied + list(tokens[: n - len(copied)])


@breaks("TestSpeculation::test_damaged_drafts", dumped, "_read_draft_probabilities")
def BytesAreLeftOver(original: Any, data: bytes, n: int, n_vocab: int) -> Any:  # noqa: N802
    """A byte after the draft probabilities of a dump is ignored."""
    return original(data[: len(data) // 4 * 4], n, n_vocab)


@breaks("TestSpeculation::test_drawn_drafts", model.DraftModel, "_choose")
def DraftsClaimToBeUniform(original: Any, drafter: Any, row: Any, position: int) -> Any:  # noqa: N802
    """The draft probabilities of a draft model are uniform."""
    token, drawn_from = original(drafter, row, position)
    return token, None if drawn_from is None else (drawn_from[0], np.full(len(drawn_from[0]), 1 / len(drawn_from[0])))
