"""``slm run``: one question, one answer; and how answers are shown while they stream."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from slm_core.chat import ChatStream
from slm_core.cli import options as o
from slm_core.cli import several
from slm_core.cli.several import Asked
from slm_core.cli.terminal import INTERRUPTED, PrefillBar, note, out, stopping, write
from slm_core.errors import InvalidOption
from slm_core.generation import Answer, BeamAnswer, Completion, FinishReason, Generation
from slm_core.loading import LoadedModel
from slm_core.types import ToolCall


def run(
    model: o.ModelPath = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to say; standard input if left out.")
    ] = None,
    system: o.System = None,
    thinking: o.Thinking = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat format.")] = False,
    backend: o.BackendName = None,
    device: o.Device = "auto",
    threads: o.Threads = None,
    option: o.BackendOptions = None,
    format: o.Format = None,  # noqa: A002  # the name of the option
    ctx: o.ContextSize = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repeat_penalty: o.RepeatPenalty = None,
    preset: o.Preset = None,
    sampling_option: o.SamplingOptions = None,
    seed: o.Seed = None,
    max_tokens: o.MaxTokens = None,
    stop: o.Stops = None,
    n: o.Completions = 1,
    best_of: o.BestOf = None,
    beams: o.BeamWidth = None,
    stats: o.Stats = False,
    as_json: o.AsJson = False,
) -> None:
    """Say something to a model, and stream its answer. Ctrl-C ends the answer."""
    if raw and (system is not None or thinking is not None or format is not None):
        raise InvalidOption("--raw takes the text as it is: --system, --thinking and --format do not go with it")
    text = _prompt(prompt)
    sampling = o.sampling_of(
        preset,
        sampling_option,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop,
    )
    with o.Loading(model, backend, device, threads, option or (), format).load() as loaded:
        asked = Asked(text, o.context_size(loaded, ctx), sampling, raw, system, thinking)
        if n > 1 or best_of is not None or beams is not None:
            cancelled = _several(loaded, asked, n, best_of, beams, stats=stats, as_json=as_json)
        else:
            cancelled = _one(loaded, asked, stats=stats, as_json=as_json)
    if cancelled:
        raise typer.Exit(INTERRUPTED)


def _one(loaded: LoadedModel, asked: Asked, *, stats: bool, as_json: bool) -> bool:
    """Stream one answer; returns whether it was cancelled."""
    stream: ChatStream | Generation
    with PrefillBar() as bar:
        if asked.raw:
            session = loaded.session(n_ctx=asked.n_ctx, n_seq_max=1, sampling=asked.sampling)
            session.append(asked.text)
            stream = session.generate(progress=bar)
        else:
            chat = loaded.chat(system=asked.system, n_ctx=asked.n_ctx, sampling=asked.sampling, thinking=asked.thinking)
            stream = chat.stream(asked.text, progress=bar)
        answer = show(stream, None if as_json else out())
    if as_json:
        print_json(_as_json(answer, loaded))
    if stats:
        note(summary(answer))
    return answer.finish_reason is FinishReason.CANCELLED


def _several(
    loaded: LoadedModel, asked: Asked, n: int, best_of: int | None, beams: int | None, *, stats: bool, as_json: bool
) -> bool:
    """Show several answers when all are there; returns whether they were cancelled."""
    if beams is not None and best_of is not None:
        raise InvalidOption("--beams and --best-of do not go together: the best of the beams are shown, as many as -n")
    answers: BeamAnswer | tuple[Completion, ...]
    if beams is None:
        answers = several.completions(loaded, asked, n, best_of)
    else:
        answers = several.beam_search(loaded, asked, beams, n)
    if as_json:
        print_json(several.as_json(loaded, asked, answers))
    else:
        several.show_all(loaded, asked, answers, out())
    if stats and isinstance(answers, BeamAnswer):
        used, took = answers.usage, answers.timings
        note(f"{used.prompt_tokens} prompt tokens in {took.prefill_s:.2f} s, {took.decode_s:.2f} s of search")
    elif stats and not isinstance(answers, BeamAnswer):
        for completion in answers:
            note(f"{completion.index + 1}: {summary(completion.answer)}")
    return several.was_cancelled(answers)


def show(stream: ChatStream | Generation, console: Console | None) -> Answer:
    """Write an answer to ``console``, if any, as it streams, reasoning and tool calls included; Ctrl-C ends it."""
    with stopping(stream):
        thought = False
        for event in stream:
            if console is None:
                continue
            if event.reasoning:
                write(console, event.reasoning, "dim italic")
                thought = True
            if event.text:
                write(console, "\n\n" + event.text if thought else event.text)
                thought = False
    if console is not None:
        for call in stream.answer.tool_calls:
            write(console, f"\n{_spelled(call)}", "cyan")
        for malformed in stream.answer.malformed_calls:
            write(console, f"\n{malformed.text} ({malformed.reason})", "red")
        write(console, "\n")
    return stream.answer


def summary(answer: Answer) -> str:
    """Tokens and seconds of an answer, on one line."""
    used, took = answer.usage, answer.timings
    first = "" if took.first_token_s is None else f", the first after {took.first_token_s:.2f} s"
    return (
        f"{used.prompt_tokens} prompt tokens ({used.cached_tokens} cached) in {took.prefill_s:.2f} s,"
        f" {used.completion_tokens} tokens at {answer.tokens_per_second:.0f}/s{first}, {answer.finish_reason}"
    )


def print_json(value: object) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def _prompt(given: str | None) -> str:
    if given is not None:
        return given
    if sys.stdin.isatty():
        raise InvalidOption("there is nothing to say: give --prompt TEXT, or standard input")
    return sys.stdin.read()


def _spelled(call: ToolCall) -> str:
    return f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"


def _as_json(answer: Answer, loaded: LoadedModel) -> dict[str, object]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [dataclasses.asdict(call) for call in answer.tool_calls],
        "malformed_calls": [dataclasses.asdict(call) for call in answer.malformed_calls],
        "finish_reason": answer.finish_reason,
        **several.measured(answer),
        "model": loaded.info.path,
        "backend": loaded.info.backend,
    }
