"""Shows answers: streaming text, plain or as rendered Markdown, and a line of statistics."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

from slm_core.chat import ChatStream
from slm_core.cli.terminal import note, stopping, write
from slm_core.generation import Answer, Event, Generation
from slm_core.types import ToolCall


class View(Protocol):
    """Shows one answer."""

    def show(self, event: Event) -> None:
        """Show the next event."""
        ...

    def close(self) -> None:
        """Release the terminal; also after an error. A second call does nothing."""
        ...

    def end(self, answer: Answer) -> None:
        """Show the rest of a whole answer: its tool calls, and the end of the last line."""
        ...


class PlainView:
    """An answer as plain text.

    Args:
        console: where the answer is written.
        results_are_notes: whether tool calls with their results are notes on standard error, not part of the answer.
        line_is_open: whether text of another writer precedes the answer on its line.
    """

    def __init__(self, console: Console, *, results_are_notes: bool = False, line_is_open: bool = False) -> None:
        self._console = console
        self._results_are_notes = results_are_notes
        self._line_is_open = line_is_open
        self._separator = ""

    def show(self, event: Event) -> None:
        """Write the text of an event, and the result of a tool."""
        if event.reasoning:
            write(self._console, event.reasoning, "dim italic")
            self._separator, self._line_is_open = "\n\n", True
        if event.text:
            write(self._console, self._separator + event.text)
            self._separator, self._line_is_open = "", True
        if event.result is not None:
            self._show_result(f"{call_text(event.result.call)} -> {event.result.content}")

    def _show_result(self, text: str) -> None:
        if self._results_are_notes:
            write(self._console, "\n" if self._line_is_open else "")
            note(text)
        else:
            self._write_line(text, "cyan")
            write(self._console, "\n")
        self._separator, self._line_is_open = "", False

    def _write_line(self, text: str, style: str) -> None:
        write(self._console, f"\n{text}" if self._line_is_open else text, style)
        self._line_is_open = True

    def close(self) -> None:
        """Do nothing: plain text keeps nothing of the terminal."""

    def end(self, answer: Answer) -> None:
        """Write the tool calls that are left to the caller, and the end of the line."""
        for call in answer.tool_calls:
            self._write_line(call_text(call), "cyan")
        for malformed in answer.malformed_calls:
            self._write_line(f"{malformed.text} ({malformed.reason})", "red")
        write(self._console, "\n")


class MarkdownView:
    """An answer as rendered Markdown on a terminal; reasoning and tool calls are plain text.

    Args:
        console: the terminal.
        status: returns the line below an unfinished answer, from the number of its tokens so far.
    """

    def __init__(self, console: Console, status: Callable[[int], str]) -> None:
        from slm_core.cli.markdown import MarkdownStream

        self._console = console
        self._plain = PlainView(console, line_is_open=True)
        self._n_tokens = 0
        self._stream = MarkdownStream(console, lambda: status(self._n_tokens))
        self._plain_line = False

    def show(self, event: Event) -> None:
        """Render the text of an event."""
        self._n_tokens += event.token is not None
        if event.reasoning:
            self._stream.close()
            write(self._console, event.reasoning, "dim italic")
            self._plain_line = True
        if event.text:
            if self._plain_line:
                write(self._console, "\n\n")
            self._plain_line = False
            self._stream.feed(event.text)
        if event.result is not None:
            self._stream.close()
            self._plain.show(event)

    def close(self) -> None:
        """Print the pending text, and remove the line of status."""
        self._stream.close()

    def end(self, answer: Answer) -> None:
        """Write the tool calls that are left to the caller."""
        if answer.tool_calls or answer.malformed_calls or self._plain_line:
            self._plain.end(answer)


def stream_answer(stream: ChatStream | Generation, view: View | None) -> Answer:
    """Show an answer while it streams (None: nowhere); Ctrl-C ends the answer, and its text so far stays."""
    with stopping(stream):
        try:
            for event in stream:
                if view is not None:
                    view.show(event)
        finally:
            if view is not None:
                view.close()
    if view is not None:
        view.end(stream.answer)
    return stream.answer


def summary(answer: Answer) -> str:
    """Tokens and seconds of an answer, on one line; with speculation, drafted and accepted tokens."""
    usage, timings = answer.usage, answer.timings
    first = "" if timings.first_token_s is None else f", the first after {timings.first_token_s:.2f} s"
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached) in {timings.prefill_s:.2f} s,"
        f" {usage.completion_tokens} tokens at {answer.tokens_per_second:.0f}/s{first},"
        f" {answer.finish_reason}{_drafts(answer)}"
    )


def _drafts(answer: Answer) -> str:
    drafts = answer.speculation
    if drafts is None:
        return ""
    off = f" (off: {drafts.reason})" if drafts.reason else ""
    return f", {drafts.drafted} tokens drafted, {drafts.accepted} accepted{off}"


def call_text(call: ToolCall) -> str:
    """A tool call as code."""
    return f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
