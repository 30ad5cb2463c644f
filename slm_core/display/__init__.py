"""How objects show themselves: short lines for terminals, HTML for notebooks. The functions take plain values only."""

from slm_core.display.html import Html, element, joined, table
from slm_core.display.text import changed_fields, count, number_of_bytes, preview, signature

__all__ = [
    "Html",
    "changed_fields",
    "count",
    "element",
    "joined",
    "number_of_bytes",
    "preview",
    "signature",
    "table",
]
