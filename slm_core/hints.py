"""Hints in error messages: the accepted name that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_CLOSE = 0.6


def did_you_mean(name: object, accepted: Iterable[str]) -> str:
    """The end of a message: "; did you mean 'x'?", or "" if no accepted name is close.

    Upper case and punctuation do not count: "llama.cpp" is close to "llamacpp".
    """
    names = {_folded(each): each for each in accepted}
    close = get_close_matches(_folded(str(name)), names, n=1, cutoff=_CLOSE)
    return f"; did you mean '{names[close[0]]}'?" if close else ""


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()) or name
