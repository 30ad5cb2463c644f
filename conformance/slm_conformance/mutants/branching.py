"""Mutants that break beam search or completions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_conformance.mutants.above import Above, breaks
from slm_conformance.mutants.registry import mutant
from slm_core.chat import branching
from slm_core.errors import ContextFull
from slm_core.generation.beam import BeamSearch, Group, Rules
from slm_core.generation.beam_options import Beams
from slm_core.generation.branches import Branches
from slm_core.generation.completions import CompletionEvent, CompletionGroup, Completions
from slm_core.generation.forced_words import ForcedWords
from slm_core.generation.stopping import StoppingCriterion

_SCORES, _EXTEND, _STEP, _RUN = Rules.scores, Rules.extend, Group.step, BeamSearch.run
_NEEDED, _BEGIN = ForcedWords.needed, CompletionGroup._begin  # noqa: SLF001  (a mutant changes internals)
_INIT, _NEXT = Completions.__init__, Completions._next  # noqa: SLF001  (a mutant changes internals)
_CHOSEN, _PLACE = Group._chosen, BeamSearch._place  # noqa: SLF001


def _prefilled_again(branches: Branches, src: int) -> int:
    """Decode the tokens of a branch into a free sequence, instead of forking the branch."""
    seq_id = branches._free.pop()  # noqa: SLF001  (a mutant changes internals)
    branches._taken.add(seq_id)  # noqa: SLF001
    branches.decode([(seq_id, branches._context.tokens(src))])  # noqa: SLF001
    return seq_id


@mutant("TestBeam::test_log_probabilities")
class LaterTokensAreLikelier(Above):
    """Log probabilities of a search are 0.05 too large from the third token on."""

    owner, attribute = Rules, "extend"

    @staticmethod
    def broken(rules: Rules, live: Any, token: int, logprob: float, score: float) -> Any:
        """Add 0.05 to the log probability and the score from the third token on."""
        more = 0.05 if len(live.tokens) > 1 else 0.0
        return _EXTEND(rules, live, token, logprob + more, score + more)


@mutant("TestBeam::test_one_beam_is_greedy")
class OneBeamTakesTheSecond(Above):
    """A search with one beam ranks the second likeliest continuation first."""

    owner, attribute = Rules, "scores"

    @staticmethod
    def broken(rules: Rules, *step: Any) -> Any:
        """Subtract 50 from the best score if the search has one beam."""
        scores = _SCORES(rules, *step)
        if rules.beams.width == 1:
            scores[scores.argmax()] -= 50
        return scores


@mutant("TestBeam::test_n_best")
class WorstFirst(Above):
    """Hypotheses of a search without biases are returned worst first."""

    owner, attribute = BeamSearch, "run"

    @staticmethod
    def broken(search: BeamSearch, row: Any, cancelled: Any) -> Any:
        """Return the hypotheses in reverse order."""
        hypotheses = _RUN(search, row, cancelled)
        rules = search._groups[0]._rules  # noqa: SLF001  (a mutant changes internals)
        return hypotheses if rules.beams.logit_bias else hypotheses[::-1]


@mutant("TestBeam::test_two_steps_in_full")
class OneBeamSurvives(Above):
    """A search with several beams and without biases or forced words continues with one beam only."""

    owner, attribute = Group, "_chosen"

    @staticmethod
    def broken(group: Group, ranked: Any) -> Any:
        """Keep only the lowest-ranked beam."""
        beams = group._rules.beams  # noqa: SLF001  (a mutant changes internals)
        plain = beams.width > 1 and not beams.force_words and not beams.logit_bias and not beams.min_tokens
        return ranked[-1:] if plain else _CHOSEN(group, ranked)


@mutant("TestBeam::test_no_trace")
class OneBranchStays(Above):
    """A search with several beams does not drop one of its sequences at its end."""

    owner, attribute = BeamSearch, "run"

    @staticmethod
    def broken(search: BeamSearch, row: Any, cancelled: Any) -> Any:
        """Remove a sequence from the search's list of sequences, so that it is never dropped."""
        result = _RUN(search, row, cancelled)
        branches = search._branches  # noqa: SLF001  (a mutant changes internals)
        if len(branches.taken) > 1:
            branches._taken.discard(min(branches.taken))  # noqa: SLF001
        return result


@mutant("TestBeam::test_without_sequences")
class SequencesNotCounted(Above):
    """A search with five beams does not check for free sequences, and drops all sequences of the context."""

    owner, attribute = branching, "check_free"

    @staticmethod
    def broken(context: Any, n: int, what: str) -> None:
        """Drop all sequences of the context if the search has five beams."""
        for seq_id in range(context.n_seq_max if n == 5 else 0):
            context.drop(seq_id)


@mutant("TestBeam::test_forced_words")
class WordsAreNotMissed(Above):
    """A search with two forced words does not count the tokens that missing words need."""

    owner, attribute = ForcedWords, "needed"

    @staticmethod
    def broken(words: ForcedWords, tokens: Any, said: Any) -> int:
        """Return 0 if there are two words."""
        return 0 if len(words._words) == 2 else _NEEDED(words, tokens, said)  # noqa: SLF001  (a mutant changes internals)


@mutant("TestBeam::test_groups_differ")
class GroupsAlike(Above):
    """Groups of a diverse search ignore the tokens of earlier groups."""

    owner, attribute = Group, "step"

    @staticmethod
    def broken(group: Group, rows: Any, chosen: Counter[int]) -> list[int]:
        """Pass an empty count of the tokens that earlier groups chose."""
        return _STEP(group, rows, Counter())


@mutant("TestBeam::test_limits")
class EndsTooSoon(Above):
    """``min_tokens=3`` has no effect on a search."""

    owner, attribute = Rules, "scores"

    @staticmethod
    def broken(rules: Rules, *step: Any) -> Any:
        """Compute the scores with ``min_tokens`` set to 0 if it is 3."""
        if rules.beams.min_tokens != 3:
            return _SCORES(rules, *step)
        free = dataclasses.replace(rules.beams, min_tokens=0)
        rules, original = Rules.__new__(Rules), rules
        rules.__dict__.update(original.__dict__, beams=free)
        return _SCORES(rules, *step)


@mutant("TestBeam::test_decodes_the_prompt_once")
class BeamsPrefillAgain(Above):
    """Each of four first beams decodes the prompt again."""

    owner, attribute = BeamSearch, "_place"

    @staticmethod
    def broken(search: BeamSearch, beams: Any) -> Any:
        """Prefill the first beams instead of forking the prompt."""
        branches = search._branches  # noqa: SLF001  (a mutant changes internals)
        if branches.taken or len(beams) != 4:
            return _PLACE(search, beams)
        return [dataclasses.replace(live, seq_id=_prefilled_again(branches, live.seq_id)) for live in beams]


@mutant("TestCompletions::test_log_probabilities")
class EventsOverstate(Above):
    """Log probabilities of events are 0.05 too large for the last of three completions."""

    owner, attribute = Completions, "_next"

    @staticmethod
    def broken(completions: Completions) -> CompletionEvent | None:
        """Add 0.05 to the log probability of the last of three completions."""
        event = _NEXT(completions)
        if event is None or event.index < 2 or len(completions._generations) != 3:  # noqa: SLF001  (a mutant changes internals)
            return event
        return CompletionEvent(event.index, dataclasses.replace(event.event, logprob=event.event.logprob + 0.05))


@mutant("TestCompletions::test_however_many")
class TwoAreAlike(Above):
    """With exactly two completions, the second draws the tokens of the first."""

    owner, attribute = Completions, "__init__"

    @staticmethod
    def broken(completions: Completions, generations: Any, *others: Any) -> None:
        """Give the second of two completions a clone of the first one's sampler."""
        if len(generations) == 2:
            generations[1].sampler = generations[0].sampler.clone()
        _INIT(completions, generations, *others)


@mutant("TestCompletions::test_no_trace")
class LeftOpen(Above):
    """Completions that are left early keep their sequences."""

    owner, attribute = Completions, "close"

    @staticmethod
    def broken(completions: Completions) -> None:
        """Mark the completions as closed without releasing their sequences."""
        completions._closed = True  # noqa: SLF001  (a mutant changes internals)


@mutant("TestCompletions::test_decodes_the_prompt_once")
class EachPrefills(Above):
    """Each completion decodes the prompt, if the prompt fits into a batch."""

    owner, attribute = CompletionGroup, "_begin"

    @staticmethod
    def broken(group: CompletionGroup, row: Any) -> None:
        """Prefill each completion instead of forking the prompt."""
        branches = group._branches  # noqa: SLF001  (a mutant changes internals)
        if branches._context.n_batch < branches.base.index:  # noqa: SLF001
            _BEGIN(group, row)
            return
        for i in range(len(group._pending)):  # noqa: SLF001
            group._seq_ids[i] = _prefilled_again(branches, branches.base.seq_id)  # noqa: SLF001
            group._rows[i] = row.copy()  # noqa: SLF001
        group._is_started = True  # noqa: SLF001


@mutant("TestCompletions::test_best_of")
class FirstOfBest(Above):
    """``best_of`` keeps the first completions, not the best ones."""

    owner, attribute = Completions, "__init__"

    @staticmethod
    def broken(completions: Completions, generations: Any, group: Any, n_best: Any, close: Any, on_event: Any) -> None:
        """Replace the log probabilities by values that decrease with the index."""
        _INIT(completions, generations, group, n_best, close, on_event)
        if n_best is not None:
            completions._logprobs = [_Falling(-i) for i in range(len(generations))]  # noqa: SLF001  (a mutant changes internals)


@breaks("TestBeam::test_every_answer", Rules, "finished")
def EndsWithItsStopText(original: Any, rules: Rules, beam: Any, reason: Any) -> Any:  # noqa: N802
    """The text of a hypothesis contains the stop text that ended it."""
    hypothesis = original(rules, beam, reason)
    return (
        dataclasses.replace(hypothesis, text=beam.data.decode("utf-8", "replace")) if rules.beams.stop else hypothesis
    )


@breaks("TestBeam::test_when_it_ends", Group, "_cannot_improve")
def NeverStopsEarly(original: Any, group: Group) -> bool:  # noqa: N802
    """A search that bans tokens goes on to its last step, whatever ``early_stopping`` is."""
    bans = -np.inf in group._rules.beams.logit_bias.values()  # noqa: SLF001  (a mutant changes internals)
    return False if bans else bool(original(group))


@breaks("TestBeam::test_in_a_full_context", BeamSearch, "_decode")
def FullContextsRaise(original: Any, search: BeamSearch, beams: Any) -> Any:  # noqa: N802
    """A search that fills the context raises ``ContextFull``."""
    rows = original(search, beams)
    if rows is None:
        raise ContextFull(len(beams), 0)
    return rows


@breaks("TestBeam::test_options", Beams, "_check_together")
def OptionsContradict(original: Any, beams: Beams) -> None:  # noqa: N802
    """Options of a search that contradict each other are accepted."""


@breaks("TestCompletions::test_in_turns", Completions, "resume")
def OneResumes(original: Any, completions: Completions, stopping_criteria: Sequence[StoppingCriterion] | None) -> Any:  # noqa: N802
    """Only the first of several paused completions is resumed; the others are cancelled."""
    original(completions, stopping_criteria)
    for i in range(1, len(completions._generations)):  # noqa: SLF001  (a mutant changes internals)
        completions.cancel(i)
    return completions


@breaks("TestCompletions::test_in_a_full_context", Branches, "_decode")
def HalfIsDecoded(original: Any, branches: Branches, runs: Any) -> Any:  # noqa: N802
    """If several branches do not fit, the first of them are decoded nevertheless."""
    try:
        return original(branches, runs)
    except ContextFull as full:
        if len(runs) > 1 and full.free:
            original(branches, runs[: full.free])
        raise


class _Falling(list[float]):
    """A list of log probabilities that never grows, so that its sum stays constant."""

    def __init__(self, value: float) -> None:
        super().__init__([value])

    def append(self, value: float) -> None:
        """Ignore the value."""
