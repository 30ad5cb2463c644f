"""HTML for notebooks. Text is escaped unless it is ``Html``, so text of a model or a file cannot become markup.

Colours are translucent and text has the notebook's own colour, which suits light and dark notebooks. There are no
scripts, links, images and style sheets: inline styles only.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

FAINT = "rgba(128,128,128,0.35)"
"""The colour of borders and of empty parts."""
_CONTROLS = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},  # the pictures of control characters
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF), 0xFFFD),
}


class Html(str):
    """Markup. Its creator has escaped the text in it."""

    __slots__ = ()


def text_shown(text: str) -> str:
    """A text without characters that HTML cannot hold: control characters become visible, surrogates U+FFFD."""
    return text.translate(_CONTROLS)


def escaped(text: str) -> Html:
    """Text as markup; ``Html`` stays as it is."""
    return text if isinstance(text, Html) else Html(html.escape(text_shown(text), quote=True))


def joined(parts: Iterable[str]) -> Html:
    """Parts one after the other."""
    return Html("".join(map(escaped, parts)))


def element(tag: str, *children: str, style: str = "", title: str = "") -> Html:
    """An element around its children, which are escaped unless they are ``Html``.

    Args:
        tag: the name of the element.
        children: text or markup.
        style: CSS declarations, without text of a model or a user.
        title: the text that a pointer shows; "" for none.
    """
    attributes = "".join(f' {name}="{escaped(value)}"' for name, value in (("style", style), ("title", title)) if value)
    return Html(f"<{tag}{attributes}>{joined(children)}</{tag}>")


def quoted_text(text: str, style: str = "") -> Html:
    """Text of a model or a user: keeps its lines, and its writing direction ends with it."""
    return element("span", text, style=f"white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;{style}")


def card(title: str, *children: str) -> Html:
    """A framed block with a title. Its classes tell MathJax that dollar signs in it are no formulas."""
    heading = element("div", title, style="font-weight:600;margin-bottom:4px")
    style = f"border:1px solid {FAINT};border-radius:6px;padding:8px 12px;max-width:760px;text-align:left"
    opening = f'<div class="tex2jax_ignore mathjax_ignore" style="{style}">'
    return Html(f"{opening}{heading}{joined(children)}</div>")


def note(text: str) -> Html:
    """A small line below a block."""
    return element("div", text, style="font-size:85%;opacity:0.75;margin-top:4px")


def table(rows: Sequence[tuple[str, str]]) -> Html:
    """Names and values, two columns."""
    cell = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;border:0;background:none"
    lines = [
        element("tr", element("td", name, style=f"{cell};opacity:0.75"), element("td", quoted_text(value), style=cell))
        for name, value in rows
    ]
    return element("table", *lines, style="border-collapse:collapse;margin:0")
