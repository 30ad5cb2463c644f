"""One request: the history it extends, and where it stands."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from slm_core.engine.metrics import RequestMetrics, RequestTimes
from slm_core.errors import InvalidOption
from slm_core.generation.control import Control
from slm_core.generation.events import Answer, Event
from slm_core.generation.stopping import StoppingCriterion
from slm_core.generation.token_loop import Progress, TokenLoop
from slm_core.protocols import Constraint, Vocab
from slm_core.sampling import SamplerChain, Sampling

_NUMBERS = itertools.count()
_LONGEST_ID = 128


class History:
    """The tokens of a request; see ``token_loop.TokenHistory``."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def take(self, token: int) -> None:
        """Add a token."""
        self.tokens.append(token)

    def settle(self) -> None:
        """Nothing to do: the engine drops what it decoded ahead."""


class Request:
    """A prompt, how it is to be answered, and the answer so far.

    Args:
        vocab: the model's vocabulary.
        prompt: its tokens, at least one.
        sampling: how tokens are chosen.
        constraint: what may be said; the request's own.
        stopping_criteria: asked in order after each token.
        special: whether control tokens other than EOG become text.
        timeout: seconds from now on after which the answer ends as cancelled.
        priority: requests of larger priority come first.
        key: requests of one key share what is left to requests of their priority; "" is a key, too.
        salt: requests share prefixes of their prompts with requests of the same salt only.
        stream: which stream of random numbers it draws from.
        on_event: called with each event, in the thread that computes.
        on_end: called when the answer is over, or failed.
        request_id: its name, of 1 to 128 printable characters; None for a fresh one.
        clock: seconds; that of the engine.

    Attributes:
        id: its number: requests are numbered as they come.
        sampling: how tokens are chosen.
        loop: makes the answer of rows of logits.
        history: the prompt and the answer's tokens.
        waiting_tokens: the history as it was when the request last began to wait, int32 [T].
        seq_id: its sequence; None while it waits.
        error: what it failed with; None where it did not.
        n_preempted: how often it gave up its sequence.
        last_turn: the last step that computed a piece of it.
        saved: tells whether its history came to be on disk; None where it is not to be written.
        step_s: seconds of steps since its last row of logits.
        times: when things happened to it.
        n_cached: tokens of its prompt that its first sequence held at once.
        metrics: what became of it; None while it is not over.
        origin: where it came from, for whoever traces it.

    Raises:
        InvalidOption: no tokens, a priority that is no number, or an id of another form.
    """

    def __init__(
        self,
        vocab: Vocab,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        constraint: Constraint | None = None,
        stopping_criteria: Sequence[StoppingCriterion] = (),
        special: bool = False,
        timeout: float | None = None,
        priority: float = 0,
        key: str = "",
        salt: str = "",
        stream: int = 0,
        on_event: Callable[[Event], None] | None = None,
        on_end: Callable[[], None] | None = None,
        request_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not prompt:
            raise InvalidOption("a prompt without tokens: the model's first token has to follow something")
        if isinstance(priority, bool) or not isinstance(priority, int | float) or priority != priority:
            raise InvalidOption(f"priority={priority!r} (accepted: a number; larger ones come first)")
        self.id = next(_NUMBERS)
        self.request_id = checked_id(request_id)
        self.history = History(prompt)
        self.waiting_tokens = np.asarray(prompt, np.int32)
        self.n_prompt = len(prompt)
        self.sampling = sampling
        sampler = SamplerChain.for_vocab(sampling, vocab, stream=stream)
        sampler.set_history(prompt)
        self.loop = TokenLoop(
            self.history,
            vocab,
            sampler,
            Progress(len(prompt), 0, sampling.max_tokens, sampling.stop, time_left_s=timeout),
            control=Control(tuple(stopping_criteria), on_event),
            constraint=constraint,
            special=special,
        )
        self.loop.start_timeout()
        self.priority = priority
        self.key, self.salt = key, salt
        self.on_end = on_end
        self.arrived_s = clock()
        self.times = RequestTimes(self.arrived_s)
        self.n_cached = 0
        self.metrics: RequestMetrics | None = None
        self.origin: object = None
        self.seq_id: int | None = None
        self.error: BaseException | None = None
        self.n_preempted = 0
        self.last_turn = -1
        self.saved: Future[bool] | None = None
        self.step_s = 0.0

    @property
    def over(self) -> bool:
        """Whether its answer is whole, or failed."""
        return self.loop.finished or self.error is not None

    @property
    def begun(self) -> bool:
        """Whether it has its first token."""
        return len(self.history.tokens) > self.n_prompt

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
    """An id that fits into a line of a log, a header and a label; a fresh one for None.

    Raises:
        InvalidOption: it does not fit.
    """
    if request_id is None:
        return secrets.token_hex(8)
    if not isinstance(request_id, str) or not 0 < len(request_id) <= _LONGEST_ID or not request_id.isprintable():
        accepted = f"1 to {_LONGEST_ID} printable characters, or None for a fresh one"
        raise InvalidOption(f"request_id={request_id!r:.80} (accepted: {accepted})")
    return request_id
