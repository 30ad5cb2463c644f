"""Shows answers: streaming text, and a line of statistics."""

from __future__ import annotations

import json

from rich.console import Console

from slm_core.chat import ChatStream
from slm_core.cli.terminal import stopping, write
from slm_core.generation import Answer, Generation
from slm_core.types import ToolCall


def stream_answer(stream: ChatStream | Generation, console: Console | None) -> Answer:
    """Write an answer, its reasoning and its tool calls to ``console`` (None: nowhere); Ctrl-C ends the answer."""
    with stopping(stream):
        reasoning = False
        for event in stream:
            if console is None:
                continue
            if event.reasoning:
                write(console, event.reasoning, "dim italic")
                reasoning = True
            if event.text:
                write(console, "\n\n" + event.text if reasoning else event.text)
                reasoning = False
    if console is not None:
        for call in stream.answer.tool_calls:
            write(console, f"\n{_call_text(call)}", "cyan")
        for malformed in stream.answer.malformed_calls:
            write(console, f"\n{malformed.text} ({malformed.reason})", "red")
        write(console, "\n")
    return stream.answer


def summary(answer: Answer) -> str:
    """Tokens and seconds of an answer, on one line."""
    usage, timings = answer.usage, answer.timings
    first = "" if timings.first_token_s is None else f", the first after {timings.first_token_s:.2f} s"
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached) in {timings.prefill_s:.2f} s,"
        f" {usage.completion_tokens} tokens at {answer.tokens_per_second:.0f}/s{first}, {answer.finish_reason}"
    )


def _call_text(call: ToolCall) -> str:
    return f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
