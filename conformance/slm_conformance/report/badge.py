"""The report as a badge for a README: an SVG image of one line."""

from __future__ import annotations

from collections import Counter
from html import escape

from slm_conformance.report.record import PLURALS, Report
from slm_conformance.suite.meta import Verdict

_TITLE = "conformance"
_CHAR_WIDTH = 6.6  # average width of a character at 11 px; the text is scaled if the font differs
_PADDING = 10
_GREEN, _AMBER, _RED = "#2f7d32", "#8a6100", "#b3261e"


def svg_badge(report: Report) -> str:
    """An SVG document: green if all declared scenarios hold, red if any fails, amber otherwise."""
    counts = report.total()
    message = ", ".join(f"{counts[verdict]} {word}" for verdict, word in PLURALS.items() if counts[verdict])
    message = message or "nothing run"
    left, right = _width(_TITLE), _width(message)
    label = escape(f"{_TITLE}: {message}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{label}">'
        f"<title>{label}</title>"
        f'<rect width="{left + right}" height="20" rx="3" fill="{_colour(counts)}"/>'
        f'<path d="M3 0h{left - 3}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#444"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{_text(_TITLE, 0, left)}{_text(message, left, right)}</g></svg>\n"
    )


def _colour(counts: Counter[Verdict]) -> str:
    if counts[Verdict.FAILS]:
        return _RED
    is_open = counts[Verdict.EXPECTED] or counts[Verdict.NOT_RUN] or not counts[Verdict.HOLDS]
    return _AMBER if is_open else _GREEN


def _width(text: str) -> int:
    return round(len(text) * _CHAR_WIDTH) + 2 * _PADDING


def _text(text: str, x: int, width: int) -> str:
    return f'<text x="{x + _PADDING}" y="14" textLength="{width - 2 * _PADDING}">{escape(text)}</text>'
