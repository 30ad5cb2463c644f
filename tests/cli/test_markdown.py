"""Streamed Markdown on an emulated terminal, compared with the same Markdown rendered at once."""

from __future__ import annotations

import io
import itertools
import random
import re
from collections.abc import Sequence

import pyte
import pyte.modes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Markdown

from slm_core.cli.markdown import MarkdownStream, finished_length
from slm_core.cli.streaming import MarkdownView
from slm_core.generation import Event

WIDTH, HEIGHT = 60, 12
DOCUMENT = (
    """\
# Title

A paragraph with **bold**, *emphasis*, `code` and [a link](https://example.org/x).
It has a second line.

Setext
------

1. one
2. two
   - nested
   - more

     with a paragraph

| a | b |
|---|--:|
| 1 | 2 |

> a quote
> of two lines

```python
"""
    + "".join(f"def function_{i}(): return {i}\n" for i in range(30))
    + """\
```

The end.
"""
)
FRAGMENTS = ["#", "# ", "-", "- ", "1. ", "```", "~~~", "> ", "|", "a|b", "---", "===", "    ", "*", "**", "x", "word ",
             "\n", "\n\n", "\n", "<div>", "`", "&#13;", "  \n", "\t"]  # fmt: skip


def emulated(chunks: Sequence[str]) -> list[str]:
    """The lines that a terminal shows at the end, with those that scrolled away; empty lines are left out."""
    screen = pyte.HistoryScreen(WIDTH, HEIGHT, history=10_000)
    screen.set_mode(pyte.modes.LNM)
    terminal = pyte.Stream(screen)
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=HEIGHT, legacy_windows=False)
    clock = itertools.count(step=0.05)  # every second chunk is drawn
    stream = MarkdownStream(console, lambda: "STATUS", clock=lambda: next(clock))
    for chunk in chunks:
        stream.feed(chunk)
    stream.close()
    terminal.feed(console.file.getvalue())  # type: ignore[attr-defined]
    assert not screen.cursor.hidden
    scrolled = ["".join(line[x].data for x in range(WIDTH)) for line in screen.history.top]
    return [line.rstrip() for line in (*scrolled, *screen.display) if line.strip()]


def rendered(text: str) -> list[str]:
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(Markdown(text, hyperlinks=False))
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(4))
def test_streamed_markdown_looks_as_if_it_were_rendered_at_once(seed: int) -> None:
    draw, rest, chunks = random.Random(seed), DOCUMENT, []
    while rest:
        n = draw.randint(1, (3, 20, 200, 2000)[seed])
        chunks.append(rest[:n])
        rest = rest[n:]
    assert emulated(chunks) == rendered(DOCUMENT)


def test_the_end_of_a_long_unfinished_block_is_shown_above_the_status() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=HEIGHT, color_system=None)
    stream = MarkdownStream(console, lambda: "STATUS")
    stream.feed("```\n" + "".join(f"line {i}\n" for i in range(99)))
    screen = pyte.Screen(WIDTH, HEIGHT)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(console.file.getvalue())  # type: ignore[attr-defined]
    shown = [line.strip() for line in screen.display if line.strip()]
    assert shown[-2:] == ["line 98", "STATUS"]
    assert screen.cursor.y < HEIGHT
    stream.close()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.integers(0, 40))
def test_text_that_follows_does_not_change_finished_blocks(text: str, n: int) -> None:
    html = MarkdownIt().enable("strikethrough").enable("table").render
    end = finished_length(text[:n])
    assert html(text[:end]) + html(text[end:]) == html(text)


def test_a_block_is_finished_when_the_next_begins() -> None:
    assert finished_length("one\n\ntwo\n") == len("one\n\n")
    assert finished_length("one\n```") == 0, "the line may become a paragraph: ```a```"
    assert finished_length("- a\n- b\n\n") == 0, "the list may go on"


HOSTILE = [
    "\x1b[2J\x1b]0;title\x07 \x9b31m text",
    "```\n\x1b[2J\n```\n\n    \x1b[2J\n",
    "a &#27;[2J b &#x9b;2J c &#13;d &#7;e",
    "[a\x1b[2J](http://x/\x1b[2J) ![i\x1b](\x1b)",
    "| \x1b[2J | b |\n|---|---|\n| \r\x08 | \x0b |\n",
    "<b \x1b[2J>\n\n# \x1b[1A\n",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_cannot_control_the_terminal(text: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=HEIGHT, legacy_windows=False)
    stream = MarkdownStream(console, lambda: f"status {text}")
    for character in text:
        stream.feed(character)
    stream.close()
    output = console.file.getvalue()  # type: ignore[attr-defined]
    ours = re.sub(r"\x1b\[([\d;]*m|2K|\d*A|\?25[hl])|\r(?=\x1b\[[12])", "", output)  # styles, and redrawing the block
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", ours), repr(ours)


def test_the_target_of_a_link_is_shown() -> None:
    assert "bank (https://example.org)" in " ".join(emulated(["[bank](https://example.org)"]))


def test_reasoning_and_text_of_a_view() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, height=HEIGHT, color_system=None)
    counted = []
    view = MarkdownView(console, lambda n: str(counted.append(n)))
    nan = float("nan")
    for event in (Event(1, "", nan, reasoning="hm"), Event(2, "**so**", nan), Event(3, "\n\nyes", nan)):
        view.show(event)
    view.close()
    screen = pyte.Screen(WIDTH, HEIGHT)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(console.file.getvalue())  # type: ignore[attr-defined]
    assert [line.strip() for line in screen.display if line.strip()] == ["hm", "so", "yes"]
    assert counted[0] == 2, "tokens of reasoning count"
