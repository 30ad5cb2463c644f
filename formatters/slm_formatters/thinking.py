"""Asking for reasoning or for none: which variable, or which word, a template understands.

Templates have no common switch. What one understands is found out by rendering: of the switches whose variable it
reads, the first one counts that makes a difference to a short conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Render: TypeAlias = Callable[[str, Mapping[str, object]], "str | None"]
"""Renders a user's message under some options, with a generation prompt; None where the template refuses."""

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
"""Variables with a value that asks for reasoning, and one that asks for none."""
_DEGREES = ("reasoning_effort", "reasoning_strength")
_MUCH, _LITTLE = ("high", "medium"), ("none", "no_think", "minimal", "low")
_WORDS = ("/think", "/no_think")


@dataclass(frozen=True, slots=True)
class Switch:
    """What asks a template for reasoning, or for none (or for as little as it knows).

    Attributes:
        options: variables for the template.
        word: what the last message of the user gets at its end, for templates that look for it there and take it out.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    word: str = ""


def find_switches(options: frozenset[str], constants: frozenset[str], render: Render) -> tuple[Switch, Switch] | None:
    """The switches that ask for reasoning and for none; None where the template understands nothing.

    Args:
        options: the variables that the template reads.
        constants: the texts that it mentions.
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
    for name in _DEGREES:
        if name in options:
            much = next((degree for degree in _MUCH if degree in constants), _MUCH[0])
            little = next((degree for degree in _LITTLE if degree in constants), _LITTLE[-1])
            yield Switch({name: much}), Switch({name: little})
    if any(_WORDS[1] in constant for constant in constants):
        yield Switch(word=" " + _WORDS[0]), Switch(word=" " + _WORDS[1])


def _leaks(text: str) -> bool:
    """Whether a word for the template went on to the model as part of what the user said."""
    return any(f"{_PROBE} {word}" in text for word in _WORDS)
