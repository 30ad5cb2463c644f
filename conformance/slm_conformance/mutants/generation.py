"""Mutants that break generation or sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slm_conformance.mutants.above import Above, breaks
from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.backend import ToyModel
from slm_conformance.toy.context import ToyContext
from slm_core.chat import Session, session_dump
from slm_core.chat.source import SessionSource
from slm_core.errors import DecodeFailed
from slm_core.generation import (
    Draft,
    Event,
    FinishReason,
    Generation,
    StopMatcher,
    StoppingAction,
    StoppingCriterion,
    TextStream,
    Usage,
    loop,
    scoring,
    token_loop,
)
from slm_core.generation.stopping import ask
from slm_core.numerics import log_probability
from slm_core.sampling import SamplerChain, Sampling, checks, penalties
from slm_core.sampling.stream import UniformStream
from slm_core.types import EditLevel

# ruff: noqa: N802  (functions become backends and are named like classes)

_CHOOSE = Generation._choose  # noqa: SLF001  (a mutant changes internals)
_RESUME, _NEXT, _FEED, _NEXT_LOGITS = Generation.resume, Generation.__next__, TextStream.feed, SessionSource.next_logits
_CHAIN, _WRITE = SamplerChain.__init__, session_dump.write
_TAKE, _PENALTIES = UniformStream.take, penalties.penalties
_ROWS: list[Any] = []


@mutant("TestGeneration::test_log_probabilities")
class LogProbabilityOfTheKept(Above):
    """With ``top_k`` from 1 to 39 and without ``logprobs``, log probabilities are halved."""

    owner, attribute = Generation, "__next__"

    @staticmethod
    def broken(generation: Generation) -> Event:
        """Halve the log probability if ``top_k`` is from 1 to 39, and ``logprobs`` is off."""
        event: Event = _NEXT(generation)
        options = generation.sampler.sampling if isinstance(generation.sampler, SamplerChain) else Sampling()
        few = 0 < options.top_k < 40 and options.logprobs is None
        return dataclasses.replace(event, logprob=event.logprob / 2) if few else event


@mutant("TestGeneration::test_log_probabilities")
class LogitForLogProbability(Above):
    """Events carry the logit less the largest logit in place of the log probability."""

    owner, attribute = token_loop, "log_probability"

    @staticmethod
    def broken(logits: Any, token: int) -> float:
        """Return a log probability that is not normalized."""
        return log_probability(logits, token) + float(np.log(np.exp(logits - logits.max()).sum()))


@mutant("TestGeneration::test_stopping_criteria")
class StopIsFinish(Above):
    """A stopping criterion's STOP ends the answer as complete."""

    owner, attribute = token_loop, "ask"

    @staticmethod
    def broken(stopping_criteria: Sequence[StoppingCriterion], event: Event, draft: Draft) -> StoppingAction:
        """Return FINISH in place of STOP."""
        action = ask(stopping_criteria, event, draft)
        return StoppingAction.FINISH if action is StoppingAction.STOP else action


@mutant("TestGeneration::test_stopping_criteria_in_order")
class ContinueAsksOn(Above):
    """A stopping criterion's CONTINUE works like NEXT."""

    owner, attribute = token_loop, "ask"

    @staticmethod
    def broken(stopping_criteria: Sequence[StoppingCriterion], event: Event, draft: Draft) -> StoppingAction:
        """Call the next criterion after CONTINUE, too."""
        for criterion in stopping_criteria:
            action = ask([criterion], event, draft)
            if action not in (StoppingAction.NEXT, StoppingAction.CONTINUE):
                return action
        return StoppingAction.NEXT


@mutant("TestGeneration::test_a_criterion_does_not_lift_the_limit")
class CriteriaLiftTheLimit(Above):
    """A token limit has no effect if a stopping criterion returns CONTINUE."""

    owner, attribute = token_loop, "ask"

    @staticmethod
    def broken(stopping_criteria: Sequence[StoppingCriterion], event: Event, draft: Draft) -> StoppingAction:
        """Remove a token from the draft after CONTINUE, so that the limit is not reached."""
        action = ask(stopping_criteria, event, draft)
        if action is StoppingAction.CONTINUE and isinstance(draft.tokens, list) and len(draft.tokens) > 4:
            del draft.tokens[0]
        return action


@mutant("TestGeneration::test_paused_in_a_character")
class PauseLosesThePrefix(Above):
    """A pause loses the bytes of an incomplete character."""

    owner, attribute = Generation, "resume"

    @staticmethod
    def broken(generation: Generation, *arguments: Any, **options: Any) -> Generation:
        """Replace the text stream, unless the sampler is a ``SamplerChain``."""
        if not isinstance(generation.sampler, SamplerChain):
            progress = generation.progress
            generation._stream = TextStream(progress.stops, b"", progress.held)  # noqa: SLF001  (a mutant changes internals)
        resumed: Generation = _RESUME(generation, *arguments, **options)
        return resumed


@mutant("TestGeneration::test_limits")
class ZeroIsOne(Above):
    """``max_tokens=0`` generates a token."""

    owner, attribute = Generation, "__next__"

    @staticmethod
    def broken(generation: Generation) -> Event:
        """Raise a limit of 0 tokens to 1."""
        if generation.progress.max_tokens == 0:
            generation.progress.max_tokens = 1
        event: Event = _NEXT(generation)
        return event


@mutant("TestGeneration::test_stop_text_across_tokens")
class StopTextLeaks(Above):
    """A stop text is searched in each token separately, and is not found across tokens."""

    owner, attribute = StopMatcher, "feed"

    @staticmethod
    def broken(matcher: StopMatcher, text: str) -> tuple[str, bool]:
        """Search the stop texts in this piece of text only, and hold no text back."""
        fresh, matcher.held = StopMatcher(matcher._stops), ""  # noqa: SLF001  (a mutant changes internals)
        starts = [at for at in (text.find(stop) for stop in fresh._stops) if at >= 0]  # noqa: SLF001
        return (text[: min(starts)], True) if starts else (text, False)


@mutant("TestGeneration::test_what_only_begins_a_stop_text")
class HeldTextIsLost(Above):
    """Text that is held back for one of several stop texts is lost at the end."""

    owner, attribute = StopMatcher, "flush"

    @staticmethod
    def broken(matcher: StopMatcher) -> str:
        """Drop the held text if there are several stop texts."""
        held, matcher.held = matcher.held, ""
        return "" if len(matcher._stops) > 1 else held  # noqa: SLF001  (a mutant changes internals)


@mutant("TestGeneration::test_characters_are_whole")
class CharactersSplit(Above):
    """The bytes of each token are decoded to text separately."""

    owner, attribute = TextStream, "feed"

    @staticmethod
    def broken(stream: TextStream, data: bytes) -> tuple[str, bool]:
        """Decode the bytes of the token alone, with replacement characters."""
        return stream._matcher.feed(data.decode("utf-8", "replace"))  # noqa: SLF001  (a mutant changes internals)


@mutant("TestGeneration::test_random_bytes")
class BadBytesAreDropped(Above):
    """Bytes that are not UTF-8 are missing from the text."""

    owner, attribute = TextStream, "feed"

    @staticmethod
    def broken(stream: TextStream, data: bytes) -> tuple[str, bool]:
        """Remove replacement characters from the text."""
        text, stopped = _FEED(stream, data)
        return text.replace("\ufffd", ""), stopped


class _OnlyEos:
    """A vocabulary whose only EOG token is EOS."""

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self.eog_ids = frozenset({vocab.eos})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vocab, name)


@mutant("TestGeneration::test_every_end_of_generation")
class OnlyEosEnds(ToyModel):
    """Only EOS ends an answer; other EOG tokens are ordinary tokens."""

    def __init__(self, source: Path, edit_level: EditLevel, context_type: type[ToyContext]) -> None:
        super().__init__(source, edit_level, context_type)
        self.vocab = _OnlyEos(self.vocab)  # forwards everything else to the vocabulary


@mutant("TestGeneration::test_cancelled_in_prefill")
class PrefillGoesOn(Above):
    """A cancelled prefill continues to its end."""

    owner, attribute = SessionSource, "next_logits"

    @staticmethod
    def broken(source: SessionSource, cancelled: Any, **options: Any) -> Any:
        """Ignore ``cancelled``."""
        return _NEXT_LOGITS(source, lambda: False, **options)


@mutant("TestGeneration::test_paused_anywhere")
class PauseBeginsTheDraws(Above):
    """With ``top_k``, resuming after a pause restarts the random draws."""

    owner, attribute = Generation, "resume"

    @staticmethod
    def broken(generation: Generation, *arguments: Any, **options: Any) -> Generation:
        """Reset the number of draws if the sampler has ``top_k``."""
        if isinstance(generation.sampler, SamplerChain) and generation.sampler.sampling.top_k:
            generation.sampler._stream.n_draws = 0  # noqa: SLF001
        resumed: Generation = _RESUME(generation, *arguments, **options)
        return resumed


@mutant("TestGeneration::test_greedy_is_the_largest_logit")
class GreedyTires(Above):
    """After 11 greedy tokens of an answer with a token limit, the second best token is taken."""

    owner, attribute = Generation, "_choose"

    @staticmethod
    def broken(generation: Generation, logits: Any) -> int:
        """Return the second best token after 11 greedy tokens."""
        token = int(_CHOOSE(generation, logits))
        tired = len(generation.progress.tokens) >= 11 and token == int(logits.argmax())
        greedy = isinstance(generation.sampler, SamplerChain) and generation.sampler.sampling.temperature == 0
        limited = generation.progress.max_tokens is not None
        return int(np.argsort(logits)[-2]) if tired and greedy and limited else token


@mutant("TestGeneration::test_greedy_is_the_largest_logit")
class RowOfTheStepBefore(Above):
    """A generation samples from the row of the previous step."""

    owner, attribute = SessionSource, "next_logits"

    @staticmethod
    def broken(source: SessionSource, cancelled: Any, **options: Any) -> Any:
        """Return the row of the previous call."""
        _ROWS.append(_NEXT_LOGITS(source, cancelled, **options))
        return _ROWS[-2] if len(_ROWS) > 1 else _ROWS[0]


@mutant("TestGeneration::test_a_full_context")
class FullIsAnError(Above):
    """If the context becomes full during an answer, the answer raises an error."""

    owner, attribute = loop, "ContextFull"
    broken = DecodeFailed


@mutant("TestGeneration::test_usage")
class PromptIsLonger(Above):
    """Usage counts one cached token too many if a part of the prompt is cached and the answer has four tokens."""

    owner, attribute = token_loop, "Usage"

    @staticmethod
    def broken(n_prompt: int, n_cached: int, n_tokens: int, n_shifted: int) -> Usage:
        """Add a token to the prompt and to its cached part."""
        more = int(0 < n_cached < n_prompt and n_tokens == 4)
        return Usage(n_prompt + more, n_cached + more, n_tokens, n_shifted)


@mutant("TestSampling::test_the_steps_and_their_order")
class UnevenDraws(Above):
    """Random numbers are skewed towards 0."""

    owner, attribute = UniformStream, "take"

    @staticmethod
    def broken(stream: UniformStream) -> float:
        """Raise the random number to the power of 1.3."""
        return float(_TAKE(stream) ** 1.3)


class _OtherChain(Above):
    """A mutant that replaces the constructor of ``SamplerChain``."""

    owner, attribute = SamplerChain, "__init__"


@mutant("TestSampling::test_the_steps_and_their_order")
class TopPIgnored(_OtherChain):
    """``top_p`` has no effect."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Set ``top_p`` to 1."""
        _CHAIN(chain, dataclasses.replace(sampling, top_p=1.0), stream=stream, **known)


@mutant("TestSampling::test_a_seed")
class SmallSeedsAreOne(_OtherChain):
    """Seeds below 4 give the same draws."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Set a seed below 4 to 0."""
        small = sampling.seed is not None and sampling.seed < 4
        _CHAIN(chain, dataclasses.replace(sampling, seed=0) if small else sampling, stream=stream, **known)


@mutant("TestSampling::test_the_steps_and_their_order")
class OneStream(_OtherChain):
    """All streams of a seed are the same."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Use stream 0 for every stream."""
        _CHAIN(chain, sampling, **known)


@mutant("TestSampling::test_the_steps_and_their_order")
class SeededGreedyDraws(_OtherChain):
    """With a seed, temperature 0 is taken as 0.9."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Set the temperature to 0.9 if it is 0 and there is a seed."""
        cold = sampling.temperature == 0 and sampling.seed is not None
        _CHAIN(chain, dataclasses.replace(sampling, temperature=0.9) if cold else sampling, stream=stream, **known)


@mutant("TestSampling::test_the_steps_and_their_order")
class GreedyDraws(_OtherChain):
    """Temperature 0 is taken as 0.9."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Set the temperature to 0.9 if it is 0."""
        warm = sampling if sampling.temperature else dataclasses.replace(sampling, temperature=0.9)
        _CHAIN(chain, warm, stream=stream, **known)


@mutant("TestSampling::test_the_row_stays")
class PenaltyInPlace(Above):
    """Penalties modify the row of logits."""

    owner, attribute = penalties, "penalties"

    @staticmethod
    def broken(ids: Any, logits: Any, state: Any, **options: Any) -> Any:
        """Write the penalized logits into the row."""
        logits[:] = _PENALTIES(ids, logits, state, **options)[1]
        return ids, logits


@breaks("TestSampling::test_a_row_without_a_choice", SamplerChain, "_likeliest")
def NanIsTheLargest(whole: Any, chain: SamplerChain, logits: Any) -> int:
    """A greedy choice takes the token whose logit is NaN."""
    is_nan = np.isnan(logits)
    return int(is_nan.argmax()) if is_nan.any() else int(whole(chain, logits))


@mutant("TestSampling::test_penalty")
class PenaltyOfTheLast(Above):
    """Penalties see only the last token."""

    owner, attribute = penalties, "penalties"

    @staticmethod
    def broken(ids: Any, logits: Any, state: Any, **options: Any) -> Any:
        """Pass only the last token of the history."""
        return _PENALTIES(ids, logits, dataclasses.replace(state, history=state.history[-1:]), **options)


@mutant("TestSampling::test_the_state_of_each_step")
class CloneBeginsAnew(Above):
    """A clone restarts the random stream."""

    owner, attribute = SamplerChain, "clone"

    @staticmethod
    def broken(chain: SamplerChain) -> SamplerChain:
        """Return a new sampler with the same options."""
        return SamplerChain(chain.sampling)


@mutant("TestSampling::test_a_session_dump_goes_on")
class DumpWithoutSampler(Above):
    """A session's dump between two answers holds a fresh sampler."""

    owner, attribute = session_dump, "write"

    @staticmethod
    def broken(state: Any) -> Any:
        """Replace the sampler's state by that of a new sampler, unless an answer is in progress."""
        if state.answer is None:
            state = dataclasses.replace(state, sampler=SamplerChain(state.sampling).state())
        return _WRITE(state)


@breaks("TestGeneration::test_greedy_is_the_largest_logit", Generation, "_choose")
def GreedyForgetsTheTail(original: Any, generation: Generation, logits: Any) -> int:
    """Plain greedy sampling ignores the logits after the last full group of 64."""
    sampler = generation.sampler
    plain = isinstance(sampler, SamplerChain) and sampler.sampling.steps == Sampling(temperature=0).steps
    if plain and generation.speculation is None and generation.constraint is None:
        logits = logits[: len(logits) // 64 * 64]
    token: int = original(generation, logits)
    return token


@breaks("TestGeneration::test_characters_are_whole", TextStream, "feed")
def FourBytesAreTooMany(original: Any, stream: TextStream, data: bytes) -> tuple[str, bool]:
    """Characters of four bytes are replaced by replacement characters."""
    text, stopped = original(stream, data)
    return "".join("\ufffd" if ord(character) > 0xFFFF else character for character in text), stopped


@breaks("TestGeneration::test_a_full_context", Generation, "_end")
def FullIsCancelled(original: Any, generation: Generation, reason: FinishReason) -> Event | None:
    """An answer that fills the context ends as cancelled."""
    full = reason is FinishReason.LENGTH and generation.progress.max_tokens is None
    event: Event | None = original(generation, FinishReason.CANCELLED if full else reason)
    return event


@breaks("TestGeneration::test_the_first_of_several_stop_texts", StopMatcher, "feed")
def ListedFirstEndsFirst(original: Any, matcher: StopMatcher, text: str) -> tuple[str, bool]:
    """If several stop texts match, the answer ends before the one that is listed first."""
    joined = matcher.held + text
    matches = [stop for stop in matcher._stops if stop in joined]  # noqa: SLF001
    if not matches:
        text_and_end: tuple[str, bool] = original(matcher, text)
        return text_and_end
    matcher.held = ""
    return joined[: joined.find(matches[0])], True


@breaks("TestGeneration::test_a_criterion_that_raises_at_the_end", Generation, "_close_step")
def CriteriaReopen(original: Any, generation: Generation, *args: Any, **options: Any) -> Event:
    """An answer that has ended continues if a stopping criterion raised at its end."""
    try:
        event: Event = original(generation, *args, **options)
    except BaseException:
        generation._reason = None  # noqa: SLF001
        raise
    return event


@breaks("TestGeneration::test_stopping_criteria_stay_after_a_pause", Generation, "resume")
def PausesLoseCallbacks(
    original: Any, generation: Generation, stopping_criteria: Any = None, **options: Any
) -> Generation:
    """After a pause, callbacks that are not passed again are lost."""
    original(generation, stopping_criteria if stopping_criteria is not None else (), **options)
    generation._control = dataclasses.replace(generation._control, on_event=options.get("on_event"))  # noqa: SLF001
    return generation


@breaks("TestSampling::test_the_steps_and_their_order", penalties, "penalties")
def PresenceCounts(
    original: Any, ids: Any, logits: Any, state: Any, *, presence: float, frequency: float, **rest: Any
) -> Any:
    """A presence penalty is applied once per occurrence."""
    return original(ids, logits, state, presence=0.0, frequency=frequency + presence, **rest)


@breaks("TestSampling::test_the_state_of_each_step", SamplerChain, "state")
def StateWithoutMemory(original: Any, chain: SamplerChain) -> bytes:
    """The state of a sampler lacks the memory of its steps."""
    copied = chain.clone()
    copied._memory = {}  # noqa: SLF001
    return bytes(original(copied))


@breaks("TestSampling::test_penalty", Session, "generate")
def PromptsGoUnpenalized(original: Any, session: Session, *args: Any, **options: Any) -> Generation:
    """Penalties ignore the prompt, unless there are logits processors."""
    generation: Generation = original(session, *args, **options)
    if not generation.progress.tokens and type(generation.sampler) is SamplerChain:
        generation.sampler.set_history(())
    return generation


@breaks("TestGeneration::test_stop_text_across_tokens", StopMatcher, "feed")
def StopTextsShowTheirFirst(original: Any, matcher: StopMatcher, text: str) -> tuple[str, bool]:
    """If an answer has one stop text, the stop text's first character is in the answer."""
    shown, stopped = original(matcher, text)
    return (shown + matcher._stops[0][0] if stopped and len(matcher._stops) == 1 else shown), stopped  # noqa: SLF001


@breaks("TestSampling::test_the_steps_and_their_order", SamplerChain, "sample")
def FewAreOne(original: Any, chain: SamplerChain, logits: Any) -> int:
    """With ``top_k=12``, the likeliest token is always taken."""
    return int(np.argmax(logits)) if chain.sampling.top_k == 12 else int(original(chain, logits))


@breaks("TestSampling::test_equal_logits", SamplerChain, "_run_steps")
def TiesGoToTheLast(original: Any, chain: SamplerChain, candidates: Any, state: Any) -> Any:
    """If several tokens have the same logit, the higher ids are kept."""
    remaining, logits = original(chain, candidates, state)
    alike = candidates[1].min() == candidates[1].max()
    return (candidates[0][len(candidates[0]) - len(remaining) :], logits) if alike else (remaining, logits)


@breaks("TestSampling::test_options", checks, "check_together")
def ContradictionsPass(original: Any, sampling: Sampling) -> None:
    """Options that contradict each other are accepted."""


@breaks("TestGeneration::test_likeliest_tokens", token_loop, "logprobs_of")
def LikeliestLast(original: Any, chain: SamplerChain, logits: Any, token: int) -> Any:
    """The likeliest tokens of the model are listed likeliest last."""
    logprobs = original(chain, logits, token)
    return dataclasses.replace(logprobs, model=logprobs.model[::-1])


@breaks("TestGeneration::test_cancelled_and_timed_out", Generation, "cancel")
def CancelledOnlyInPrefill(original: Any, generation: Generation) -> None:
    """An answer that has tokens cannot be cancelled, unless its sampler is a chain."""
    if isinstance(generation.sampler, SamplerChain) or not generation.progress.tokens:
        original(generation)


@breaks("TestGeneration::test_timings", Generation, "_note_seconds")
def AllIsPrefill(original: Any, generation: Generation, seconds: float, n_before: int) -> None:
    """The time of each step counts as prefill."""
    original(generation, seconds, 0)


@breaks("TestGeneration::test_scores", scoring, "log_sum_exp")
def ScoresAreUnlikelier(original: Any, row: Any, **options: Any) -> float:
    """Log probabilities of scores are 0.05 too small."""
    return float(original(row, **options)) + 0.05
