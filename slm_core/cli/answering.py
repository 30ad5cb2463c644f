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
from slm_core.cli.terminal import INTERRUPTED, note, out, stopping, write
from slm_core.errors import InvalidOption
from slm_core.generation import Answer, FinishReason, Generation
from slm_core.loading import LoadedModel
from slm_core.sampling import Sampling
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
    seed: o.Seed = None,
    max_tokens: o.MaxTokens = None,
    stop: o.Stops = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tell tokens and seconds on standard error.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Say something to a model, and stream its answer. Ctrl-C ends the answer."""
    if raw and (system is not None or thinking is not None or format is not None):
        raise InvalidOption("--raw takes the text as it is: --system, --thinking and --format do not go with it")
    text = _prompt(prompt)
    sampling = o.sampling_of(
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
        n_ctx = o.context_size(loaded, ctx)
        stream: ChatStream | Generation
        if raw:
            stream = _continue(loaded, text, n_ctx, sampling)
        else:
            stream = loaded.chat(system=system, n_ctx=n_ctx, sampling=sampling, thinking=thinking).stream(text)
        answer = show(stream, None if as_json else out())
        if as_json:
            print_json(_as_json(answer, loaded))
        if stats:
            note(summary(answer))
    if answer.finish_reason is FinishReason.CANCELLED:
        raise typer.Exit(INTERRUPTED)


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
        write(console, "\n")
    return stream.answer


def summary(answer: Answer) -> str:
    """Tokens and seconds of an answer, on one line."""
    used, took = answer.usage, answer.timings
    return (
        f"{used.prompt_tokens} prompt tokens ({used.cached_tokens} cached) in {took.prefill_s:.2f} s,"
        f" {used.completion_tokens} tokens at {answer.tokens_per_second:.0f}/s, {answer.finish_reason}"
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


def _continue(loaded: LoadedModel, text: str, n_ctx: int, sampling: Sampling) -> Generation:
    session = loaded.session(n_ctx=n_ctx, n_seq_max=1, sampling=sampling)
    session.append(text)
    return session.generate()


def _spelled(call: ToolCall) -> str:
    return f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"


def _as_json(answer: Answer, loaded: LoadedModel) -> dict[str, object]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [dataclasses.asdict(call) for call in answer.tool_calls],
        "finish_reason": answer.finish_reason,
        "usage": dataclasses.asdict(answer.usage),
        "timings": dataclasses.asdict(answer.timings),
        "model": loaded.info.path,
        "backend": loaded.info.backend,
    }
