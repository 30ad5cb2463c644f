"""``slm run``: answers one prompt."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

from slm_core.chat import ChatStream
from slm_core.cli import completions
from slm_core.cli import options as o
from slm_core.cli.completions import Request
from slm_core.cli.streaming import stream_answer, summary
from slm_core.cli.terminal import INTERRUPTED, PrefillBar, note, out, print_json
from slm_core.errors import InvalidOption
from slm_core.generation import Answer, BeamAnswer, Completion, FinishReason, Generation
from slm_core.loading import LoadedModel


@o.expand_groups
def run(
    *,
    model: o.ModelPath = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt; the default is standard input.")
    ] = None,
    system: o.System = None,
    thinking: o.Thinking = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat format.")] = False,
    engine: o.EngineOptions,
    format: o.Format = None,  # noqa: A002  # the name of the option
    ctx: o.ContextSize = None,
    sampling: o.SamplingOptions,
    n: o.Completions = 1,
    best_of: o.BestOf = None,
    beams: o.BeamWidth = None,
    stats: o.Stats = False,
    as_json: o.AsJson = False,
) -> None:
    """Send a prompt to a model, and stream its answer. Ctrl-C ends the answer."""
    if raw and (system is not None or thinking is not None or format is not None):
        raise InvalidOption("--raw takes the text as it is: --system, --thinking and --format do not go with it")
    text = _prompt(prompt)
    request_sampling = sampling.sampling()
    with engine.load(model, format) as loaded:
        request = Request(text, o.context_size(loaded, ctx), request_sampling, raw, system, thinking)
        if n > 1 or best_of is not None or beams is not None:
            cancelled = _answer_several(loaded, request, n, best_of, beams, stats=stats, as_json=as_json)
        else:
            cancelled = _answer_one(loaded, request, stats=stats, as_json=as_json)
    if cancelled:
        raise typer.Exit(INTERRUPTED)


def _answer_one(loaded: LoadedModel, request: Request, *, stats: bool, as_json: bool) -> bool:
    """Stream one answer; returns whether it was cancelled."""
    stream: ChatStream | Generation
    with PrefillBar() as bar:
        if request.raw:
            session = loaded.session(n_ctx=request.n_ctx, n_seq_max=1, sampling=request.sampling)
            session.append(request.text)
            stream = session.generate(progress=bar)
        else:
            chat = loaded.chat(
                system=request.system, n_ctx=request.n_ctx, sampling=request.sampling, thinking=request.thinking
            )
            stream = chat.stream(request.text, progress=bar)
        answer = stream_answer(stream, None if as_json else out())
    if as_json:
        print_json(_as_json(answer, loaded))
    if stats:
        note(summary(answer))
    return answer.finish_reason is FinishReason.CANCELLED


def _answer_several(
    loaded: LoadedModel, request: Request, n: int, best_of: int | None, beams: int | None, *, stats: bool, as_json: bool
) -> bool:
    """Show several answers when all are complete; returns whether they were cancelled."""
    if beams is not None and best_of is not None:
        raise InvalidOption("--beams and --best-of do not go together: the best of the beams are shown, as many as -n")
    answers: BeamAnswer | tuple[Completion, ...]
    if beams is None:
        answers = completions.sample_completions(loaded, request, n, best_of)
    else:
        answers = completions.beam_search(loaded, request, beams, n)
    if as_json:
        print_json(completions.as_json(loaded, request, answers))
    else:
        completions.show_all(loaded, request, answers, out())
    if stats and isinstance(answers, BeamAnswer):
        usage, timings = answers.usage, answers.timings
        note(f"{usage.prompt_tokens} prompt tokens in {timings.prefill_s:.2f} s, {timings.decode_s:.2f} s of search")
    elif stats and not isinstance(answers, BeamAnswer):
        for completion in answers:
            note(f"{completion.index + 1}: {summary(completion.answer)}")
    return completions.was_cancelled(answers)


def _prompt(text: str | None) -> str:
    if text is not None:
        return text
    if sys.stdin.isatty():
        raise InvalidOption("there is nothing to say: give --prompt TEXT, or standard input")
    return sys.stdin.read()


def _as_json(answer: Answer, loaded: LoadedModel) -> dict[str, object]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [dataclasses.asdict(call) for call in answer.tool_calls],
        "malformed_calls": [dataclasses.asdict(call) for call in answer.malformed_calls],
        "finish_reason": answer.finish_reason,
        **completions.usage_json(answer),
        "model": loaded.info.path,
        "backend": loaded.info.backend,
    }
