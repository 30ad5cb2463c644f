"""Draws docs/images/chat.svg: a real chat with the demo model, as a terminal shows it.

``python -m tools.chat_picture`` types the lines below; the picture is the screen after the last answer.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.terminal_emulator import WAIT_S, WIDTH, Terminal, terminal

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "chat.svg"
HEIGHT = 24
PASTE = "\x1b[200~My name is Ada.\nMy dog is called Rex.\x1b[201~"
LINES = (PASTE, "What is my dog called?", "/edit What is 12 + 30?", "/set temperature 0.7", "/stats")
_PROMPT = r"\n>\n(.*\n)*demo\.gguf .* tokens/s"


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture_of_chat(), encoding="utf-8")


def picture_of_chat() -> str:
    """The picture of a new chat, as SVG."""
    with terminal("chat", "--backend", "native", "--temperature", "0", "--no-history", height=HEIGHT) as tty:
        tty.wait_for(r"^>$")
        for line in LINES:
            _say(tty, line)
        return svg(tty.screen)


def _say(tty: Terminal, line: str) -> None:
    n_sent = tty.output.count("\x1b[?2004l")
    tty.type(line + "\r")
    deadline = time.monotonic() + WAIT_S
    while tty.output.count("\x1b[?2004l") == n_sent:  # bracketed paste ends when the line is sent
        tty.read_before(deadline, "the end of bracketed paste")
    tty.wait_for(_PROMPT)


def svg(screen: pyte.Screen) -> str:
    """The screen as SVG."""
    rows = [_row([screen.buffer[y][x] for x in range(WIDTH)]) for y in range(screen.lines)]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text("\n").join(rows), soft_wrap=True)
    return console.export_svg(title="slm chat", unique_id="chat")


def _row(cells: Sequence[Char]) -> Text:
    runs = groupby(cells, key=_style)
    return Text.assemble(*(("".join(cell.data for cell in run), style) for style, run in runs))


def _style(cell: Char) -> Style:
    return Style(
        color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold, italic=cell.italics, reverse=cell.reverse
    )


def _colour(name: str) -> str | None:
    """rich's name of a colour of pyte."""
    if name == "default":
        return None
    if len(name) == 6 and all(digit in "0123456789abcdef" for digit in name):
        return f"#{name}"
    name = name.replace("brown", "yellow")
    return name.replace("bright", "bright_")


if __name__ == "__main__":
    main()
