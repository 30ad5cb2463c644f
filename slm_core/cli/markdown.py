"""Markdown that is rendered while it streams.

Finished blocks (paragraphs, lists, code, tables) are printed for good and scroll away. The last block is drawn again
with each change, above a line of status, until the next block begins. Text of a model is untrusted: no control
character of it reaches the terminal, and links show their targets.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from slm_core.cli.terminal import printable

_REFRESH_S = 0.08
_PARSER = MarkdownIt().enable("strikethrough").enable("table")  # the syntax that rich renders


class Block:
    """Markdown that is rendered without the control characters of its text."""

    def __init__(self, text: str) -> None:
        # Entities such as "&#13;" become control characters when they are parsed: segments are filtered, too.
        self._markdown = Markdown(printable(text), code_theme="ansi_dark", hyperlinks=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._markdown, options):
            if not segment.control:
                yield Segment(printable(segment.text), segment.style)


class MarkdownStream:
    """Renders streamed Markdown on a terminal.

    Args:
        console: the terminal.
        status: returns the text of the line below.
        clock: seconds; the unfinished block is drawn at most 12 times a second.
    """

    def __init__(
        self, console: Console, status: Callable[[], str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._status = status
        self._clock = clock
        self._pending = ""
        self._separate = False
        self._drawn_at = float("-inf")
        self._live: Live | None = None

    def feed(self, text: str) -> None:
        """Append text; after ``close``, it begins a new block."""
        live = self._opened()
        self._pending += printable(text)
        finished = ""
        if "\n" in text:
            end = finished_length(self._pending)
            finished, self._pending = self._pending[:end], self._pending[end:]
        if not finished and self._clock() - self._drawn_at < _REFRESH_S:
            return
        live.update(_Tail(self._pending, self._status()))
        self._print(finished)
        live.refresh()
        self._drawn_at = self._clock()

    def close(self) -> None:
        """Print the last block, and remove the line of status. A second call does nothing."""
        rest, self._pending = self._pending, ""
        if self._live is None:
            return
        self._live.update(Text(""))
        self._print(rest)
        self._live.stop()
        self._live = None

    def _opened(self) -> Live:
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()
        return self._live

    def _print(self, blocks: str) -> None:
        if not blocks.strip():
            return
        if self._separate:
            self._console.print()
        self._separate = True
        self._console.print(Block(blocks))


class _Tail:
    """The end of an unfinished block, as much as fits above the line of status."""

    def __init__(self, text: str, status: str) -> None:
        self._text = text
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(console.height - 3, 1)
        lines = console.render_lines(Block(self._text), options.update(height=None), pad=False) if self._text else []
        for line in lines[-height:]:
            yield from line
            yield Segment.line()
        yield Text(" ".join(printable(self._status).split()), style="dim", no_wrap=True, overflow="ellipsis")


def finished_length(text: str) -> int:
    """The number of characters of finished blocks: text that follows cannot change how they are rendered.

    A block is finished when a complete line begins another block: the beginning of a line may still become a
    continuation (three backticks begin a code block; with a fourth word they are a paragraph).
    """
    complete = text[: text.rfind("\n") + 1]
    begins = [
        token.map[0] for token in _PARSER.parse(complete) if token.level == 0 and token.map and token.nesting >= 0
    ]
    if len(begins) < 2:
        return 0
    return sum(len(line) + 1 for line in complete.split("\n")[: begins[-1]])
