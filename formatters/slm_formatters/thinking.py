"""Detects the switch that turns reasoning on or off in a template: a variable, or a word.

Templates have no common switch. It is detected by rendering a short conversation: the first switch whose variable the
template reads, and that changes the result, is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Render: TypeAlias = Callable[[str, Mapping[str, object]], "str | None"]
"""Renders a user message with options and a generation prompt; None if the template refuses."""

_PROBE = "probe"
_PAIRS: tuple[tuple[str, object, object], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("reasoning", True, False),
    ("skip_thinking", False, True),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_option", "on", "off"),
    ("thinking_budget", -1, 0),
)
"""Variables with the values that turn reasoning on and off."""
_EFFORT_VARIABLES = ("reasoning_effort", "reasoning_strength")
_HIGH_EFFORTS, _LOW_EFFORTS = ("high", "medium"), ("none", "no_think", "minimal", "low")
_WORDS = ("/think", "/no_think")


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch that turns reasoning on, or off (or to the lowest level).

    Attributes:
        options: variables for the template.
        word: a text at the end of the last user message, for templates that search for it there and remove it.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    word: str = ""


def find_switches(options: frozenset[str], constants: frozenset[str], render: Render) -> tuple[Switch, Switch] | None:
    """The switches that turn reasoning on and off; None if the template has no switch.

    Args:
        options: the variables that the template reads.
        constants: the text constants in its expressions.
        render: renders a conversation with it.
    """
    for on, off in _candidates(options, constants):
        outcomes = [render(_PROBE + switch.word, switch.options) for switch in (on, off)]
        if None not in outcomes and outcomes[0] != outcomes[1] and not any(_leaks(text) for text in outcomes if text):
            return on, off
    return None


def _candidates(options: frozenset[str], constants: frozenset[str]) -> Iterator[tuple[Switch, Switch]]:
    for name, on, off in _PAIRS:
        if name in options:
            yield Switch({name: on}), Switch({name: off})
    for name in _EFFORT_VARIABLES:
        if name in options:
            high = next((effort for effort in _HIGH_EFFORTS if effort in constants), _HIGH_EFFORTS[0])
            low = next((effort for effort in _LOW_EFFORTS if effort in constants), _LOW_EFFORTS[-1])
            yield Switch({name: high}), Switch({name: low})
    if any(_WORDS[1] in constant for constant in constants):
        yield Switch(word=" " + _WORDS[0]), Switch(word=" " + _WORDS[1])


def _leaks(text: str) -> bool:
    """Whether the word is still in the rendered prompt, so that the model would see it."""
    return any(f"{_PROBE} {word}" in text for word in _WORDS)
