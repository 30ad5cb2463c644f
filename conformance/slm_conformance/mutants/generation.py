"""Toys above which generation or sampling is broken: while such a model is open, a part of slm_core does it wrong."""

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
    token_loop,
)
from slm_core.generation.stopping import ask
from slm_core.numerics import log_probability
from slm_core.sampling import SamplerChain, Sampling, penalties
from slm_core.sampling.stream import UniformStream
from slm_core.types import EditLevel

# ruff: noqa: N802  (the names are those of backends)

_CHOOSE = Generation._choose  # noqa: SLF001  (a mutant changes internals)
_RESUME, _NEXT, _FEED, _NEXT_LOGITS = Generation.resume, Generation.__next__, TextStream.feed, SessionSource.next_logits
_CHAIN, _WRITE = SamplerChain.__init__, session_dump.write
_TAKE, _PENALTIES = UniformStream.take, penalties.penalties
_ROWS: list[Any] = []


@mutant("TestGeneration::test_log_probabilities")
class LogProbabilityOfTheKept(Above):
    """If top_k keeps few tokens, log probabilities are too close to 0."""

    owner, attribute = Generation, "__next__"

    @staticmethod
    def broken(generation: Generation) -> Event:
        """Halve them."""
        event: Event = _NEXT(generation)
        few = isinstance(generation.sampler, SamplerChain) and 0 < generation.sampler.sampling.top_k < 40
        return dataclasses.replace(event, logprob=event.logprob / 2) if few else event


@mutant("TestGeneration::test_log_probabilities")
class LogitForLogProbability(Above):
    """Events carry the logit in place of the log probability."""

    owner, attribute = token_loop, "log_probability"

    @staticmethod
    def broken(logits: Any, token: int) -> float:
        """Not normalised."""
        return log_probability(logits, token) + float(np.log(np.exp(logits - logits.max()).sum()))


@mutant("TestGeneration::test_stopping_criteria")
class StopIsFinish(Above):
    """A stopping criterion's STOP ends the answer as complete."""

    owner, attribute = token_loop, "ask"

    @staticmethod
    def broken(stopping_criteria: Sequence[StoppingCriterion], event: Event, draft: Draft) -> StoppingAction:
        """Confuse them."""
        action = ask(stopping_criteria, event, draft)
        return StoppingAction.FINISH if action is StoppingAction.STOP else action


@mutant("TestGeneration::test_stopping_criteria_in_order")
class ContinueAsksOn(Above):
    """CONTINUE works like NEXT."""

    owner, attribute = token_loop, "ask"

    @staticmethod
    def broken(stopping_criteria: Sequence[StoppingCriterion], event: Event, draft: Draft) -> StoppingAction:
        """Ask on."""
        for criterion in stopping_criteria:
            action = criterion(event, draft)
            if action not in (StoppingAction.NEXT, StoppingAction.CONTINUE):
                return action
        return StoppingAction.NEXT


@mutant("TestGeneration::test_a_criterion_does_not_lift_the_limit")
class CriteriaLiftTheLimit(Above):
    """A token limit applies only without stopping criteria."""

    owner, attribute = token_loop, "ask"

    @staticmethod
    def broken(stopping_criteria: Sequence[StoppingCriterion], event: Event, draft: Draft) -> StoppingAction:
        """Make the tokens seem few."""
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
        """Begin a new stream of text."""
        if not isinstance(generation.sampler, SamplerChain):
            generation._stream = TextStream(generation.progress.stops)  # noqa: SLF001  (a mutant changes internals)
        resumed: Generation = _RESUME(generation, *arguments, **options)
        return resumed


@mutant("TestGeneration::test_limits")
class ZeroIsOne(Above):
    """``max_tokens=0`` generates a token."""

    owner, attribute = Generation, "__next__"

    @staticmethod
    def broken(generation: Generation) -> Event:
        """At least one."""
        if generation.progress.max_tokens == 0:
            generation.progress.max_tokens = 1
        event: Event = _NEXT(generation)
        return event


@mutant("TestGeneration::test_stop_text_across_tokens")
class StopTextLeaks(Above):
    """A stop text is searched in each token only, and text before it is shown."""

    owner, attribute = StopMatcher, "feed"

    @staticmethod
    def broken(matcher: StopMatcher, text: str) -> tuple[str, bool]:
        """Hold nothing back."""
        whole, matcher.held = StopMatcher(matcher._stops), ""  # noqa: SLF001  (a mutant changes internals)
        starts = [at for at in (text.find(stop) for stop in whole._stops) if at >= 0]  # noqa: SLF001
        return (text[: min(starts)], True) if starts else (text, False)


@mutant("TestGeneration::test_what_only_begins_a_stop_text")
class HeldTextIsLost(Above):
    """Text held back for one of several stop texts is lost at the end."""

    owner, attribute = StopMatcher, "flush"

    @staticmethod
    def broken(matcher: StopMatcher) -> str:
        """Drop it."""
        held, matcher.held = matcher.held, ""
        return "" if len(matcher._stops) > 1 else held  # noqa: SLF001  (a mutant changes internals)


@mutant("TestGeneration::test_characters_are_whole")
class CharactersSplit(Above):
    """The bytes of each token are decoded to text separately."""

    owner, attribute = TextStream, "feed"

    @staticmethod
    def broken(stream: TextStream, data: bytes) -> tuple[str, bool]:
        """Replace what is not whole."""
        return stream._matcher.feed(data.decode("utf-8", "replace"))  # noqa: SLF001  (a mutant changes internals)


@mutant("TestGeneration::test_random_bytes")
class BadBytesAreDropped(Above):
    """Bytes that are not UTF-8 vanish from the text."""

    owner, attribute = TextStream, "feed"

    @staticmethod
    def broken(stream: TextStream, data: bytes) -> tuple[str, bool]:
        """Leave the replacement characters out."""
        text, stopped = _FEED(stream, data)
        return text.replace("\ufffd", ""), stopped


class _OnlyEos:
    """A vocabulary that knows one end of generation."""

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
        self.vocab = _OnlyEos(self.vocab)  # all else is the vocabulary's


@mutant("TestGeneration::test_cancelled_in_prefill")
class PrefillGoesOn(Above):
    """A cancelled prompt is decoded to its end."""

    owner, attribute = SessionSource, "next_logits"

    @staticmethod
    def broken(source: SessionSource, cancelled: Any, **options: Any) -> Any:
        """Do not ask."""
        return _NEXT_LOGITS(source, lambda: False, **options)


@mutant("TestGeneration::test_paused_anywhere")
class PauseBeginsTheDraws(Above):
    """A pause resets a sampler with top_k to its first draw."""

    owner, attribute = Generation, "resume"

    @staticmethod
    def broken(generation: Generation, *arguments: Any, **options: Any) -> Generation:
        """Reset it."""
        if isinstance(generation.sampler, SamplerChain) and generation.sampler.sampling.top_k:
            generation.sampler._stream.n_draws = 0  # noqa: SLF001
        resumed: Generation = _RESUME(generation, *arguments, **options)
        return resumed


@mutant("TestGeneration::test_greedy_is_the_largest_logit")
class GreedyTires(Above):
    """After 11 greedy tokens of an answer with a limit, the second best token is taken."""

    owner, attribute = Generation, "_choose"

    @staticmethod
    def broken(generation: Generation, logits: Any) -> int:
        """Take it."""
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
        """Give the last one."""
        _ROWS.append(_NEXT_LOGITS(source, cancelled, **options))
        return _ROWS[-2] if len(_ROWS) > 1 else _ROWS[0]


@mutant("TestGeneration::test_a_full_context")
class FullIsAnError(Above):
    """A context that becomes full during an answer raises."""

    owner, attribute = loop, "ContextFull"
    broken = DecodeFailed


@mutant("TestGeneration::test_usage")
class CachedIsPrompt(Above):
    """Usage reports the whole prompt as cached."""

    owner, attribute = token_loop, "Usage"

    @staticmethod
    def broken(n_prompt: int, n_cached: int, n_tokens: int) -> Usage:
        """All of it."""
        return Usage(n_prompt, n_prompt, n_tokens)


@mutant("TestSampling::test_shares")
class UnevenDraws(Above):
    """Small random numbers come too often."""

    owner, attribute = UniformStream, "take"

    @staticmethod
    def broken(stream: UniformStream) -> float:
        """Bend them."""
        return float(_TAKE(stream) ** 1.3)


class _OtherChain(Above):
    """A chain that is made with other arguments."""

    owner, attribute = SamplerChain, "__init__"


@mutant("TestSampling::test_truncation")
class TopPIgnored(_OtherChain):
    """``top_p`` has no effect."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Keep all."""
        _CHAIN(chain, dataclasses.replace(sampling, top_p=1.0), stream=stream, **known)


@mutant("TestSampling::test_a_seed")
class OneSeedForAll(_OtherChain):
    """Every seed gives the same draws."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Take seed 0."""
        _CHAIN(chain, dataclasses.replace(sampling, seed=0), stream=stream, **known)


@mutant("TestSampling::test_draws_differ")
class OneStream(_OtherChain):
    """All streams of a seed are the same."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Take stream 0."""
        _CHAIN(chain, sampling, **known)


@mutant("TestSampling::test_greedy")
class SeededGreedyDraws(_OtherChain):
    """A seed makes temperature 0 a low temperature."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Take 0.9."""
        cold = sampling.temperature == 0 and sampling.seed is not None
        _CHAIN(chain, dataclasses.replace(sampling, temperature=0.9) if cold else sampling, stream=stream, **known)


@mutant("TestSampling::test_greedy")
class GreedyDraws(_OtherChain):
    """Temperature 0 is a low temperature."""

    @staticmethod
    def broken(chain: SamplerChain, sampling: Sampling, *, stream: int = 0, **known: Any) -> None:
        """Take 0.9."""
        warm = sampling if sampling.temperature else dataclasses.replace(sampling, temperature=0.9)
        _CHAIN(chain, warm, stream=stream, **known)


@mutant("TestSampling::test_the_row_stays")
class PenaltyInPlace(Above):
    """Penalties modify the row of logits."""

    owner, attribute = penalties, "penalties"

    @staticmethod
    def broken(ids: Any, logits: Any, state: Any, **options: Any) -> Any:
        """Write."""
        logits[:] = _PENALTIES(ids, logits, state, **options)[1]
        return ids, logits


@mutant("TestSampling::test_penalty")
class PenaltyOfTheLast(Above):
    """A repeat penalty sees the last token only."""

    owner, attribute = penalties, "penalties"

    @staticmethod
    def broken(ids: Any, logits: Any, state: Any, **options: Any) -> Any:
        """Forget the others."""
        return _PENALTIES(ids, logits, dataclasses.replace(state, history=state.history[-1:]), **options)


@mutant("TestSampling::test_the_state_of_each_step")
class CloneBeginsAnew(Above):
    """A clone restarts the random stream."""

    owner, attribute = SamplerChain, "clone"

    @staticmethod
    def broken(chain: SamplerChain) -> SamplerChain:
        """A new one."""
        return SamplerChain(chain.sampling)


@mutant("TestSampling::test_a_session_dump_goes_on")
class DumpWithoutSampler(Above):
    """A session's dump between two answers holds a fresh sampler."""

    owner, attribute = session_dump, "write"

    @staticmethod
    def broken(state: Any) -> Any:
        """Leave it out."""
        if state.answer is None:
            state = dataclasses.replace(state, sampler=SamplerChain(state.sampling).state())
        return _WRITE(state)


@breaks("TestGeneration::test_greedy_is_the_largest_logit", Generation, "_choose")
def GreedyForgetsTheTail(whole: Any, generation: Generation, logits: Any) -> int:
    """If only the largest logit is needed, the rest of a row after groups of 64 is ignored."""
    sampler = generation.sampler
    plain = isinstance(sampler, SamplerChain) and sampler.sampling.steps == Sampling(temperature=0).steps
    if plain and generation.speculation is None and generation.constraint is None:
        logits = logits[: len(logits) // 64 * 64]
    token: int = whole(generation, logits)
    return token


@breaks("TestGeneration::test_characters_are_whole", TextStream, "feed")
def FourBytesAreTooMany(whole: Any, stream: TextStream, data: bytes) -> tuple[str, bool]:
    """Characters of four bytes are invalid."""
    text, stopped = whole(stream, data)
    return "".join("\ufffd" if ord(character) > 0xFFFF else character for character in text), stopped


@breaks("TestGeneration::test_a_full_context", Generation, "_end")
def FullIsCancelled(whole: Any, generation: Generation, reason: FinishReason) -> Event | None:
    """An answer that fills the context ends as cancelled."""
    full = reason is FinishReason.LENGTH and generation.progress.max_tokens is None
    event: Event | None = whole(generation, FinishReason.CANCELLED if full else reason)
    return event


@breaks("TestGeneration::test_the_first_of_several_stop_texts", StopMatcher, "feed")
def ListedFirstEndsFirst(whole: Any, matcher: StopMatcher, text: str) -> tuple[str, bool]:
    """If several stop texts match, the answer ends before the one that is listed first."""
    joined = matcher.held + text
    matches = [stop for stop in matcher._stops if stop in joined]  # noqa: SLF001
    if not matches:
        text_and_end: tuple[str, bool] = whole(matcher, text)
        return text_and_end
    matcher.held = ""
    return joined[: joined.find(matches[0])], True


@breaks("TestGeneration::test_a_criterion_that_raises_at_the_end", Generation, "_close_step")
def CriteriaReopen(whole: Any, generation: Generation, *args: Any, **options: Any) -> Event:
    """An answer that has ended continues if a stopping criterion raised at its end."""
    try:
        event: Event = whole(generation, *args, **options)
    except BaseException:
        generation._reason = None  # noqa: SLF001
        raise
    return event


@breaks("TestGeneration::test_stopping_criteria_stay_after_a_pause", Generation, "resume")
def PausesLoseCallbacks(
    whole: Any, generation: Generation, stopping_criteria: Any = None, **options: Any
) -> Generation:
    """After a pause, callbacks that are not passed again are lost."""
    whole(generation, stopping_criteria if stopping_criteria is not None else (), **options)
    generation._control = dataclasses.replace(generation._control, on_event=options.get("on_event"))  # noqa: SLF001
    return generation


@breaks("TestSampling::test_the_steps_and_their_order", penalties, "penalties")
def PresenceCounts(
    whole: Any, ids: Any, logits: Any, state: Any, *, presence: float, frequency: float, **rest: Any
) -> Any:
    """A presence penalty is applied once per occurrence."""
    return whole(ids, logits, state, presence=0.0, frequency=frequency + presence, **rest)


@breaks("TestSampling::test_the_state_of_each_step", SamplerChain, "state")
def StateWithoutMemory(whole: Any, chain: SamplerChain) -> bytes:
    """The state lacks the memory of steps."""
    twin = chain.clone()
    twin._memory = {}  # noqa: SLF001
    return bytes(whole(twin))


@breaks("TestSampling::test_penalty", Session, "generate")
def PromptsGoUnpenalized(whole: Any, session: Session, *args: Any, **options: Any) -> Generation:
    """Penalties ignore the prompt."""
    generation: Generation = whole(session, *args, **options)
    if not generation.progress.tokens and isinstance(generation.sampler, SamplerChain):
        generation.sampler.set_history(())
    return generation


@breaks("TestGeneration::test_stop_text_across_tokens", StopMatcher, "feed")
def StopTextsShowTheirFirst(whole: Any, matcher: StopMatcher, text: str) -> tuple[str, bool]:
    """With one stop text, its first character is shown."""
    shown, stopped = whole(matcher, text)
    return (shown + matcher._stops[0][0] if stopped and len(matcher._stops) == 1 else shown), stopped  # noqa: SLF001


@breaks("TestSampling::test_truncation", SamplerChain, "sample")
def FewAreOne(whole: Any, chain: SamplerChain, logits: Any) -> int:
    """If top_k keeps five tokens, the likeliest one is taken."""
    return int(np.argmax(logits)) if chain.sampling.top_k == 5 else int(whole(chain, logits))
