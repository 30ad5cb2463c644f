"""The blocks of which HTML for notebooks is made: chat bubbles, maps of the KV cache, texts coloured by probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slm_core.display.html import FAINT, Html, element, joined, note, quoted_text

COLOURS = {
    "own": "rgba(59,130,246,0.75)",
    "shared": "rgba(16,185,129,0.75)",
    "cached": "rgba(245,158,11,0.75)",
    "free": FAINT,
    "answered": "rgba(16,185,129,0.75)",
    "to do": FAINT,
}
"""How a position of a KV cache is used, or the state of a request, and its colour."""
_BUBBLES = {"user": "rgba(59,130,246,0.18)", "tool": "rgba(245,158,11,0.15)", "system": "rgba(128,128,128,0.10)"}
_ANSWER = "rgba(16,185,129,0.15)"


@dataclass(frozen=True, slots=True)
class Bubble:
    """A message as it is shown.

    Attributes:
        role: its author.
        text: its content.
        reasoning: the reasoning before it; "" for none.
        calls: its tool calls, one line each.
        number: its number in the chat; None for none.
        computed: whether the KV cache contains it; None if unknown.
    """

    role: str
    text: str
    reasoning: str = ""
    calls: Sequence[str] = ()
    number: int | None = None
    computed: bool | None = None


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """A token of a text, and its probability.

    Attributes:
        text: the token's text.
        logprob: the natural logarithm of its probability; nan if unknown.
        alternatives: likely tokens at its place: text and natural logarithm.
    """

    text: str
    logprob: float
    alternatives: Sequence[tuple[str, float]] = ()


def bubble(message: Bubble) -> Html:
    """A message in a coloured block: users to the right. A dashed border: the next answer computes it."""
    colour = _BUBBLES.get(message.role, _ANSWER)
    border = f"1px dashed {COLOURS['cached']}" if message.computed is False else "1px solid transparent"
    side = "margin-left:15%" if message.role == "user" else "margin-right:15%"
    label = message.role if message.number is None else f"{message.number} {message.role}"
    if message.computed is False:
        label += " · not computed yet"
    parts = [element("div", label, style="font-size:75%;opacity:0.7")]
    if message.reasoning:
        parts.append(element("div", quoted_text(message.reasoning), style="font-style:italic;opacity:0.75"))
    if message.text:
        parts.append(element("div", quoted_text(message.text)))
    parts += [element("div", quoted_text(call, "font-family:monospace;font-size:90%")) for call in message.calls]
    return element(
        "div",
        *parts,
        style=f"background:{colour};border:{border};border-radius:10px;padding:5px 10px;margin:4px 0;{side}",
    )


def usage_bar(parts: Sequence[tuple[str, int]]) -> Html:
    """A bar of positions or requests, and its legend.

    Args:
        parts: uses of ``COLOURS``, and the number of positions or requests of each.
    """
    total = max(1, sum(n for _, n in parts))
    pieces = [
        element(
            "div",
            style=f"display:inline-block;height:12px;width:{100 * n / total:.2f}%;background:{COLOURS[use]}",
            title=f"{n:,} {use}",
        )
        for use, n in parts
        if n
    ]
    bar = element("div", *pieces, style="width:100%;line-height:0;margin:4px 0;white-space:nowrap;font-size:0")
    return joined([bar, legend(parts)])


def legend(parts: Sequence[tuple[str, int]]) -> Html:
    """The colours of uses, and the number of positions or requests of each."""
    pieces = []
    for use, n in parts:
        square = element(
            "span", style=f"display:inline-block;width:10px;height:10px;margin-right:4px;background:{COLOURS[use]}"
        )
        pieces.append(element("span", square, f"{n:,} {use}", style="margin-right:14px"))
    return element("div", *pieces, style="font-size:85%")


def cell_map(cells: Sequence[tuple[str, int, int]]) -> Html:
    """A map of the cells of a KV cache.

    Args:
        cells: squares in order: the use of most cells, the first cell, and the number of cells.
    """
    squares = []
    for use, first, n in cells:
        where = f"cell {first:,}" if n == 1 else f"cells {first:,} to {first + n - 1:,}"
        squares.append(
            element(
                "span",
                style=f"display:inline-block;width:9px;height:9px;margin:0 2px 2px 0;background:{COLOURS[use]}",
                title=f"{where}: {use}",
            )
        )
    return element("div", *squares, style="line-height:0;max-width:704px;margin:4px 0")


def number_grid(rows: Sequence[Sequence[float]]) -> Html:
    """Numbers from -1 to 1 in a grid, blue above 0 and orange below."""
    lines = []
    for row in rows:
        cells = [
            element(
                "td", f"{value:.2f}", style=f"padding:2px 6px;border:0;text-align:right;background:{_signed(value)}"
            )
            for value in row
        ]
        lines.append(element("tr", *cells))
    return element("table", *lines, style="border-collapse:collapse;margin:0")


def coloured_tokens(tokens: Sequence[TokenProbability]) -> Html:
    """A text, each token coloured by its probability, from green (certain) to red; a pointer shows alternatives."""
    pieces = [
        element(
            "span",
            token.text,
            style="" if math.isnan(token.logprob) else f"background:{_colour(token.logprob)};border-radius:2px",
            title=_alternatives(token),
        )
        for token in tokens
    ]
    text = element("div", *pieces, style="white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate")
    return joined([text, note("green: the model was certain; red: it was not. A pointer shows the alternatives.")])


def percent(logprob: float) -> str:
    """A probability as a percentage."""
    return f"{100 * math.exp(min(0.0, logprob)):.1f} %"


def _colour(logprob: float) -> str:
    return f"hsla({120 * math.exp(min(0.0, logprob)):.0f},80%,45%,0.35)"


def _signed(value: float) -> str:
    red, green, blue = (59, 130, 246) if value >= 0 else (245, 158, 11)
    return f"rgba({red},{green},{blue},{0.7 * min(1.0, abs(value)):.2f})"


def _alternatives(token: TokenProbability) -> str:
    lines = [] if math.isnan(token.logprob) else [f"{token.text!r}: {percent(token.logprob)}"]
    return "\n".join([*lines, *(f"  {text!r}: {percent(logprob)}" for text, logprob in token.alternatives)])
