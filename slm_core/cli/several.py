"""``slm run`` with more than one answer: completions side by side, or the hypotheses of a beam search."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from slm_core.chat import Session
from slm_core.cli.terminal import PrefillBar, stopping, write
from slm_core.errors import InvalidOption
from slm_core.generation import Answer, BeamAnswer, Beams, Completion, FinishReason, Hypothesis
from slm_core.loading import LoadedModel
from slm_core.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Asked:
    """What several answers are wanted to.

    Attributes:
        text: the question, or the text to continue.
        n_ctx: positions that all answers share.
        sampling: how to choose tokens, and the limits.
        raw: whether the text is continued as it is.
        system: content of a system message.
        thinking: ask for reasoning, or for none.
    """

    text: str
    n_ctx: int
    sampling: Sampling
    raw: bool = False
    system: str | None = None
    thinking: bool | None = None


def completions(loaded: LoadedModel, asked: Asked, n: int, best_of: int | None) -> tuple[Completion, ...]:
    """``n`` completions; Ctrl-C ends them with what was said."""
    with _prompted(loaded, asked, best_of or n) as session, PrefillBar() as bar:
        sampling = dataclasses.replace(asked.sampling, stop=(*asked.sampling.stop, *_stops(loaded, asked)))
        running = session.completions(n, sampling, best_of=best_of, special=not asked.raw, progress=bar)
        with running, stopping(running):
            return running.run()


def beam_search(loaded: LoadedModel, asked: Asked, width: int, n_best: int) -> BeamAnswer:
    """The ``n_best`` hypotheses of ``width`` beams; Ctrl-C ends the search with what it has.

    Raises:
        InvalidOption: the options say how to draw, which a beam search does not do.
    """
    plain, given = Sampling(), asked.sampling
    taken = {"max_tokens", "stop"}
    drawn = [f.name for f in dataclasses.fields(Sampling) if getattr(plain, f.name) != getattr(given, f.name)]
    if names := sorted(set(drawn) - taken):
        raise InvalidOption(
            f"a beam search draws nothing: {', '.join(names)} (accepted with --beams: max_tokens, stop)"
        )
    beams = Beams(
        width,
        n_best=n_best,
        max_tokens=Beams().max_tokens if given.max_tokens is None else given.max_tokens,
        stop=(*given.stop, *_stops(loaded, asked)),
    )
    cancelled = threading.Event()
    with _prompted(loaded, asked, width) as session, PrefillBar() as bar, stopping(_Cancels(cancelled)):
        return session.beam_search(beams, special=not asked.raw, cancelled=cancelled.is_set, progress=bar)


def show_all(loaded: LoadedModel, asked: Asked, answers: Sequence[Completion] | BeamAnswer, console: Console) -> None:
    """Write the answers, each under its number and what it ranks by."""
    for heading, text in _listed(loaded, asked, answers):
        write(console, f"[{heading}]", "dim")
        write(console, f" {text}\n")


def was_cancelled(answers: Sequence[Completion] | BeamAnswer) -> bool:
    """Whether one ended before its end."""
    if isinstance(answers, BeamAnswer):
        reasons = [hypothesis.finish_reason for hypothesis in answers.hypotheses]
        return not reasons or FinishReason.CANCELLED in reasons
    return any(completion.answer.finish_reason is FinishReason.CANCELLED for completion in answers)


def as_json(loaded: LoadedModel, asked: Asked, answers: Sequence[Completion] | BeamAnswer) -> dict[str, object]:
    """The answers for programs."""
    found: list[dict[str, object]] = []
    all_of_them: dict[str, object] = {}
    if isinstance(answers, BeamAnswer):
        found = [_hypothesis_json(loaded, asked, hypothesis) for hypothesis in answers.hypotheses]
        all_of_them = measured(answers)
    else:
        found = [
            {
                "index": completion.index,
                "text": _content(loaded, asked, completion.answer.text),
                "mean_logprob": completion.mean_logprob,
                "finish_reason": completion.answer.finish_reason,
                **measured(completion.answer),
            }
            for completion in answers
        ]
    return {"answers": found, **all_of_them, "model": loaded.info.path, "backend": loaded.info.backend}


def measured(answer: Answer | BeamAnswer) -> dict[str, object]:
    """What an answer took, for programs."""
    timings = {**dataclasses.asdict(answer.timings), "tokens_per_second": answer.tokens_per_second}
    return {"usage": dataclasses.asdict(answer.usage), "timings": timings}


@contextlib.contextmanager
def _prompted(loaded: LoadedModel, asked: Asked, n: int) -> Iterator[Session]:
    """A session that holds the prompt, and sequences for ``n`` branches and for the scratch branch of a chat."""
    if asked.raw:
        with loaded.session(n_ctx=asked.n_ctx, n_seq_max=n + 1) as session:
            session.append(asked.text)
            yield session
        return
    talk = loaded.chat(system=asked.system, n_ctx=asked.n_ctx, n_seq_max=n + 2, sampling=asked.sampling)
    with talk, talk.scratch_branch(asked.text, thinking=asked.thinking) as session:
        yield session


def _stops(loaded: LoadedModel, asked: Asked) -> Sequence[str]:
    return () if asked.raw else loaded.formatter.stops


def _content(loaded: LoadedModel, asked: Asked, text: str) -> str:
    return text if asked.raw else loaded.formatter.parse(text).content


def _listed(loaded: LoadedModel, asked: Asked, answers: Sequence[Completion] | BeamAnswer) -> Iterator[tuple[str, str]]:
    if isinstance(answers, BeamAnswer):
        for i, hypothesis in enumerate(answers.hypotheses, 1):
            yield f"{i}, score {hypothesis.score:.3f}", _content(loaded, asked, hypothesis.text)
    else:
        for completion in answers:
            heading = f"{completion.index + 1}, mean logprob {completion.mean_logprob:.3f}"
            yield heading, _content(loaded, asked, completion.answer.text)


def _hypothesis_json(loaded: LoadedModel, asked: Asked, hypothesis: Hypothesis) -> dict[str, object]:
    return {
        "text": _content(loaded, asked, hypothesis.text),
        "score": hypothesis.score,
        "logprobs": hypothesis.logprobs,
        "finish_reason": hypothesis.finish_reason,
    }


@dataclass(frozen=True, slots=True)
class _Cancels:
    event: threading.Event

    def cancel(self) -> None:
        """Set the event."""
        self.event.set()
