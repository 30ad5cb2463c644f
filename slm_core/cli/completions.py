"""``slm run`` with several answers: sampled completions, or the hypotheses of a beam search."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from slm_core.chat import Session
from slm_core.cli.constraints import after_reasoning
from slm_core.cli.options import KvTypes
from slm_core.cli.terminal import PrefillBar, stopping, write
from slm_core.constraints import Spec
from slm_core.errors import InvalidOption
from slm_core.generation import Answer, BeamAnswer, Beams, Completion, FinishReason, Hypothesis, Infill
from slm_core.model import Model
from slm_core.sampling import Sampling
from slm_core.types import Tool


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the options of its answers.

    Attributes:
        text: the question, or the text to continue.
        n_ctx: positions that all answers share.
        sampling: how to choose tokens, and the limits.
        raw: whether the text is continued as it is.
        system: content of a system message.
        thinking: turn reasoning on or off.
        suffix: the text after the gap that the answer fills; ``text`` is the one before it. None without a gap.
        constraint: restricts the answers.
        tools: tools that the model may call.
        adapters: adapters of the model by name, with their scales.
        kv_types: the KV types of the context.
    """

    text: str
    n_ctx: int
    sampling: Sampling
    raw: bool = False
    system: str | None = None
    thinking: bool | None = None
    suffix: str | None = None
    constraint: Spec | None = None
    tools: Sequence[Tool] = ()
    adapters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kv_types: KvTypes = dataclasses.field(default_factory=KvTypes)

    def constraint_for(self, loaded: Model) -> Spec | None:
        """The constraint of an answer of a model; in a chat format, it begins after reasoning that the prompt opens."""
        if self.raw or self.constraint is None:
            return self.constraint
        return after_reasoning(self.constraint, loaded.formatter, thinking=self.thinking)

    @property
    def prompt(self) -> str | Infill:
        """The text to continue, or with a gap."""
        return self.text if self.suffix is None else Infill(self.text, self.suffix)


def sample_completions(loaded: Model, request: Request, n: int, best_of: int | None) -> tuple[Completion, ...]:
    """``n`` sampled completions. Ctrl-C ends all of them and keeps their text so far."""
    with _prompted(loaded, request, best_of or n) as session, PrefillBar() as bar:
        sampling = dataclasses.replace(request.sampling, stop=(*request.sampling.stop, *_stops(loaded, request)))
        running = session.completions(
            n,
            sampling,
            best_of=best_of,
            constraint=request.constraint_for(loaded),
            special=not request.raw,
            progress=bar,
        )
        with running, stopping(running):
            return running.run()


def beam_search(loaded: Model, request: Request, width: int, n_best: int) -> BeamAnswer:
    """The ``n_best`` hypotheses of ``width`` beams. Ctrl-C ends the search and keeps its best hypotheses so far.

    Raises:
        InvalidOption: an option changes how tokens are sampled; a beam search does not sample.
    """
    default, sampling = Sampling(), request.sampling
    changed = [f.name for f in dataclasses.fields(Sampling) if getattr(default, f.name) != getattr(sampling, f.name)]
    if names := sorted(set(changed) - {"max_tokens", "stop"}):
        raise InvalidOption(
            f"a beam search draws nothing: {', '.join(names)} (accepted with --beams: max_tokens, stop)"
        )
    beams = Beams(
        width,
        n_best=n_best,
        max_tokens=Beams().max_tokens if sampling.max_tokens is None else sampling.max_tokens,
        stop=(*sampling.stop, *_stops(loaded, request)),
    )
    cancelled = threading.Event()
    with _prompted(loaded, request, width) as session, PrefillBar() as bar, stopping(_Cancellation(cancelled)):
        return session.beam_search(
            beams,
            constraint=request.constraint_for(loaded),
            special=not request.raw,
            cancelled=cancelled.is_set,
            progress=bar,
        )


def show_all(loaded: Model, request: Request, answers: Sequence[Completion] | BeamAnswer, console: Console) -> None:
    """Write the answers, each with its number and the score that ranks it."""
    for heading, text in _listed(loaded, request, answers):
        write(console, f"[{heading}]", "dim")
        write(console, f" {text}\n")


def was_cancelled(answers: Sequence[Completion] | BeamAnswer) -> bool:
    """Whether Ctrl-C ended any of the answers."""
    if isinstance(answers, BeamAnswer):
        reasons = [hypothesis.finish_reason for hypothesis in answers.hypotheses]
        return not reasons or FinishReason.CANCELLED in reasons
    return any(completion.answer.finish_reason is FinishReason.CANCELLED for completion in answers)


def as_json(loaded: Model, request: Request, answers: Sequence[Completion] | BeamAnswer) -> dict[str, object]:
    """The answers as JSON values."""
    listed: list[dict[str, object]]
    total: dict[str, object] = {}
    if isinstance(answers, BeamAnswer):
        listed = [_hypothesis_json(loaded, request, hypothesis) for hypothesis in answers.hypotheses]
        total = usage_json(answers)
    else:
        listed = [
            {
                "index": completion.index,
                "text": _content(loaded, request, completion.answer.text),
                "mean_logprob": completion.mean_logprob,
                "finish_reason": completion.answer.finish_reason,
                **usage_json(completion.answer),
            }
            for completion in answers
        ]
    return {"answers": listed, **total, "model": loaded.info.path, "backend": loaded.info.backend}


def usage_json(answer: Answer | BeamAnswer) -> dict[str, object]:
    """Tokens and seconds of an answer, as JSON values."""
    timings = {**dataclasses.asdict(answer.timings), "tokens_per_second": answer.tokens_per_second}
    return {"usage": dataclasses.asdict(answer.usage), "timings": timings}


@contextlib.contextmanager
def _prompted(loaded: Model, request: Request, n: int) -> Iterator[Session]:
    """A session with the prompt, and room for ``n`` branches and for the scratch branch of a chat."""
    if request.raw:
        session = loaded.session(n_ctx=request.n_ctx, n_seq_max=n + 1, adapters=request.adapters, **request.kv_types)
        with session:
            session.append(request.prompt)
            yield session
        return
    chat = loaded.chat(
        system=request.system,
        n_ctx=request.n_ctx,
        n_seq_max=n + 2,
        sampling=request.sampling,
        adapters=request.adapters,
        **request.kv_types,
    )
    with chat, chat.scratch_branch(request.text, thinking=request.thinking) as session:
        yield session


def _stops(loaded: Model, request: Request) -> Sequence[str]:
    return () if request.raw else loaded.formatter.stops


def _content(loaded: Model, request: Request, text: str) -> str:
    return text if request.raw else loaded.formatter.parse(text).content


def _listed(loaded: Model, request: Request, answers: Sequence[Completion] | BeamAnswer) -> Iterator[tuple[str, str]]:
    if isinstance(answers, BeamAnswer):
        for i, hypothesis in enumerate(answers.hypotheses, 1):
            yield f"{i}, score {hypothesis.score:.3f}", _content(loaded, request, hypothesis.text)
    else:
        for completion in answers:
            heading = f"{completion.index + 1}, mean logprob {completion.mean_logprob:.3f}"
            yield heading, _content(loaded, request, completion.answer.text)


def _hypothesis_json(loaded: Model, request: Request, hypothesis: Hypothesis) -> dict[str, object]:
    return {
        "text": _content(loaded, request, hypothesis.text),
        "score": hypothesis.score,
        "logprobs": hypothesis.logprobs,
        "finish_reason": hypothesis.finish_reason,
    }


@dataclass(frozen=True, slots=True)
class _Cancellation:
    event: threading.Event

    def cancel(self) -> None:
        """Set the event."""
        self.event.set()
