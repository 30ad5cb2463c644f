"""One request: its history, its options and its state."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType

import numpy as np

from slm_core.adapters import check_scales
from slm_core.engine.drafting import RequestDrafts
from slm_core.engine.metrics import RequestMetrics, RequestTimes
from slm_core.errors import InvalidOption, UnsupportedInput
from slm_core.generation.control import Control
from slm_core.generation.events import Answer, Event
from slm_core.generation.speculation import Speculation
from slm_core.generation.stopping import StoppingCriterion
from slm_core.generation.token_loop import Progress, TokenLoop
from slm_core.numerics import as_finite, shown
from slm_core.protocols import Adapters, Constraint, Vocab
from slm_core.sampling import LogitsProcessor, Sampling, chain_for

_NUMBERS = itertools.count()
_LONGEST_ID = 128


def salt_of(salt: str, scales: Mapping[str, float], adapters: Adapters | None) -> str:
    """The salt of a request and the content of its adapters as one text. Requests with equal texts share prefixes.

    The first NUL separates the adapters from the salt, so no salt can be mistaken for adapters.

    Raises:
        InvalidOption: an unknown adapter, or a scale that is not a number from -1e6 to 1e6.
        UnsupportedInput: there are scales, but the engine has no adapters.
    """
    if not scales:
        return f"\0{salt}"
    if adapters is None:
        raise UnsupportedInput("this engine has no adapters: make it by model.engine()")
    check_scales(scales, adapters)
    uses = sorted((adapters[name].fingerprint, float(scale)) for name, scale in scales.items() if scale)
    return " ".join(f"{fingerprint} {scale!r}" for fingerprint, scale in uses) + f"\0{salt}"


class History:
    """The tokens of a request; see ``token_loop.TokenHistory``."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def take(self, token: int) -> None:
        """Add a token."""
        self.tokens.append(token)

    def settle(self) -> None:
        """Nothing to do: the engine truncates rejected tokens."""


class Request:
    """A prompt, the options of its answer, and the answer so far.

    Args:
        vocab: the model's vocabulary.
        prompt: its tokens, at least one.
        message_ends: tokens of the prompt up to the end of each message, in order; empty for a text.
        sampling: how tokens are chosen.
        constraint: restricts the answer; not shared with other requests. None for no constraint.
        speculation: how tokens are drafted; None for no drafts.
        stopping_criteria: called in order after each token.
        logits_processors: change each row of logits before it is sampled.
        special: whether control tokens other than EOG become text.
        timeout: seconds from now on after which the answer ends as cancelled; None for no limit.
        priority: requests of larger priority come first.
        key: the client of the request: keys of equal priority get equal shares; "" is a key, too.
        salt: requests share prefixes only with requests of the same salt.
        adapters: adapters of the model by name, with their scales.
        loaded: the adapters of the model; None if there are none.
        stream: the stream of random numbers.
        on_event: called with each event, in the engine's thread.
        on_end: called when the answer is over or failed.
        request_id: its name, 1 to 128 printable characters; None for a random name.
        clock: the engine's clock, in seconds.

    Attributes:
        id: its number: requests are numbered as they come.
        adapters: its adapters by name, with their scales.
        salt: requests share prefixes only with requests of the same salt; it depends on the adapters' content.
        sampling: how tokens are chosen.
        loop: turns rows of logits into the answer.
        history: the tokens of the prompt and of the answer.
        drafts: its drafts; None without speculation.
        ahead: tokens that the next step may decode after the history.
        message_ends: tokens of the prompt up to the end of each message.
        waiting_tokens: the history at the time when the request last began to wait, int32 [T].
        seq_id: its sequence; None while it waits.
        error: the error that ended it; None if there is none.
        n_exact: at its last preemption, the tokens of its sequence that do not depend on removed tokens.
        n_preempted: how often it was preempted.
        last_turn: the last step that decoded tokens of it.
        saved: a future, whose result is whether its history is on disk; None if it will not be written.
        step_s: seconds of steps since its last row of logits.
        times: the times of its events.
        n_cached: tokens of its prompt that its first sequence already held.
        metrics: its final metrics; None while it is not over.
        origin: the origin of the request, for tracing.

    Raises:
        InvalidOption: no tokens, a priority that is not a finite number, a key or salt that is not a text, an invalid
            id, a drafter for sessions only, logits processors that are not a list of functions, or see ``salt_of``.
        UnsupportedInput: see ``salt_of``.
    """

    def __init__(
        self,
        vocab: Vocab,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        message_ends: Sequence[int] = (),
        constraint: Constraint | None = None,
        speculation: Speculation | None = None,
        stopping_criteria: Sequence[StoppingCriterion] = (),
        logits_processors: Sequence[LogitsProcessor] = (),
        special: bool = False,
        timeout: float | None = None,
        priority: float = 0,
        key: str = "",
        salt: str = "",
        adapters: Mapping[str, float] = MappingProxyType({}),
        loaded: Adapters | None = None,
        stream: int = 0,
        on_event: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] | None = None,
        request_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not prompt:
            raise InvalidOption("a prompt without tokens: the model's first token has to follow something")
        finite = as_finite(priority)
        if finite is None:
            raise InvalidOption(f"priority={shown(priority)} (accepted: a finite number; larger ones come first)")
        for name, text in (("key", key), ("salt", salt)):
            if not isinstance(text, str):
                raise InvalidOption(f"{name} is a value of type {type(text).__name__} (accepted: a text)")
        self.id = next(_NUMBERS)
        self.request_id = checked_id(request_id)
        self.history = History(prompt)
        self.waiting_tokens = np.asarray(prompt, np.int32)
        self.n_prompt = len(prompt)
        self.adapters = adapters
        self.salt = salt_of(salt, adapters, loaded)
        self._caller_salt, self._loaded = salt, loaded
        self.message_ends = message_ends
        self._stops: set[int] = set()
        self.sampling = sampling
        sampler = chain_for(sampling, vocab, logits_processors, stream=stream)
        sampler.set_history(prompt)
        progress = Progress(len(prompt), 0, sampling.max_tokens, sampling.stop, time_left_s=timeout)
        self.drafts: RequestDrafts | None = None
        if speculation is not None:
            self.drafts = RequestDrafts(self.history, speculation, progress, constraint, vocab.size)
        self.ahead: Sequence[int] = ()
        self.loop = TokenLoop(
            self.drafts or self.history,
            vocab,
            sampler,
            progress,
            control=Control(stopping_criteria, on_event),
            constraint=constraint,
            speculation=self.drafts,
            special=special,
        )
        self.loop.start_timeout()
        self.priority = finite
        self.key = key
        self.on_end = on_end
        self.arrived_s = clock()
        self.times = RequestTimes(self.arrived_s)
        self.n_cached = 0
        self.metrics: RequestMetrics | None = None
        self.origin: object = None
        self.seq_id: int | None = None
        self.error: BaseException | None = None
        self.n_exact = 0
        self.n_preempted = 0
        self.last_turn = -1
        self.saved: Future[bool] | None = None
        self.step_s = 0.0

    def check_adapters(self) -> None:
        """Check that no adapter of the request was replaced since the request was made.

        Raises:
            InvalidOption: they were unloaded, or others have their names.
        """
        if self.adapters and salt_of(self._caller_salt, self.adapters, self._loaded) != self.salt:
            when = "while the request was preempted" if self.n_preempted else "before the request began"
            raise InvalidOption(f"the adapters {', '.join(self.adapters)} were replaced {when}")

    @property
    def over(self) -> bool:
        """Whether its answer is complete, or failed."""
        return self.loop.finished or self.error is not None

    @property
    def begun(self) -> bool:
        """Whether it has its first token."""
        return len(self.history.tokens) > self.n_prompt

    def stop_at(self, length: int) -> None:
        """Make a step end when the sequence has ``length`` positions, so that other requests can fork it there."""
        self._stops.add(length)

    def next_stop(self, length: int) -> int | None:
        """The next length at which a step ends, from ``length`` on; None for none."""
        return min((stop for stop in self._stops if stop >= length), default=None)

    def stopped(self, length: int) -> bool:
        """Whether ``length`` is a stop; removes the stop."""
        is_stop = length in self._stops
        self._stops.discard(length)
        return is_stop

    @property
    def answer(self) -> Answer:
        """The answer.

        Raises:
            SessionError: it is not over yet.
            SlmError: the request failed.
        """
        if self.error is not None:
            raise self.error
        return self.loop.answer


def checked_id(request_id: str | None) -> str:
    """A valid id: it fits into a log line, a header and a label. None gives a random id.

    Raises:
        InvalidOption: the id is invalid.
    """
    if request_id is None:
        return secrets.token_hex(8)
    if not isinstance(request_id, str) or not 0 < len(request_id) <= _LONGEST_ID or not request_id.isprintable():
        accepted = f"1 to {_LONGEST_ID} printable characters, or None for a fresh one"
        raise InvalidOption(f"request_id={request_id!r:.80} (accepted: {accepted})")
    return request_id
