"""Builds a conversation: its messages, the facts that they reveal, and variations of sentences."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import phrases
import word_lists

SLOTS = ("name", *word_lists.PET_KINDS, "colour", "city", "number")  # also the order of keys in JSON answers
VALUES: dict[str, Sequence[str]] = {
    "name": word_lists.NAMES,
    "colour": word_lists.COLOURS,
    "city": word_lists.CITIES,
    "number": word_lists.NUMBERS,
    "pet": word_lists.PET_NAMES,
}
PARTNERS = {"name": "city", "city": "name", "colour": "number", "number": "colour"}


@dataclass
class Message:
    """One chat message, with labels for training and scoring.

    Attributes:
        facts: (slot, value) pairs that a reader of this message learns, in order.
        skill: the row of the result table; None for a message that is neither trained on nor scored.
        forced_think: the generation prompt ends with `<think>` (enable_thinking), so the model does not choose it.
        new_phrase: the question used a paraphrase that training never shows.
    """

    role: str
    content: str
    facts: tuple[tuple[str, str], ...] = ()
    skill: str | None = None
    reasoning: str = ""
    tool_call: dict[str, Any] | None = None
    forced_think: bool = False
    new_phrase: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The message as an application passes it to the chat template."""
        result: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            result["reasoning_content"] = self.reasoning
        if self.tool_call:
            result["tool_calls"] = [{"type": "function", "function": self.tool_call}]
        return result


def category(slot: str) -> str:
    """The key of a slot in the tables of `phrases`: every kind of pet shares one."""
    return "pet" if slot in word_lists.PET_KINDS else slot


def is_held_out(*parts: object, share: int = 100) -> bool:
    """Whether a combination belongs to evaluation; `share` is in thousandths."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % 1000 < share


class Dialogue:
    """Builds one conversation; the skills in `skills` append exchanges to it.

    Args:
        rng: source of all randomness.
        held_out: build an evaluation conversation: held-out combinations of facts, and half of the phrasings held out.
    """

    HELD_OUT_PHRASE_SHARE = 0.5

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self.messages: list[Message] = []
        self.tools: list[dict[str, Any]] = []
        self.think_always = False
        self.think_share = 0.0  # share of the turns that are generated with enable_thinking
        self.ever_told: set[str] = set()
        self.changed: set[str] = set()
        self._drawn: dict[str, str] = {}
        self._used_new_phrase = False

    # Facts that the visible messages reveal

    def known(self) -> dict[str, str]:
        """Facts that the visible messages reveal; the latest mention wins."""
        return dict(fact for message in self.messages for fact in message.facts)

    def draw(self, slot: str) -> str:
        """A value for a slot, so that its combination is on this conversation's side of the split."""
        partner = slot if category(slot) == "pet" else self._drawn.get(PARTNERS[slot], "")
        values = [value for value in VALUES[category(slot)] if value != self._drawn.get(slot)]
        if partner:
            on_this_side = [value for value in values if is_held_out(*sorted((partner, value))) == self.held_out]
            values = on_this_side or values  # a colour may have no held-out number at all
        self._drawn[slot] = self.rng.choice(values)
        return self._drawn[slot]

    # Sentences

    def pick(self, known: Sequence[str], held_out: Sequence[str]) -> str:
        """A paraphrase: from training's list, or in an evaluation conversation also from the held-out list."""
        if self.held_out and held_out and self.rng.random() < self.HELD_OUT_PHRASE_SHARE:
            self._used_new_phrase = True
            return self.rng.choice(held_out)
        return self.rng.choice(known)

    def phrase(self, template: str, plain: bool = True, **values: object) -> str:
        """Fill a template in and vary its surface: opener, closer, capital, end punctuation.

        `plain` allows all-lowercase text, which must not touch values such as names.
        """
        rng = self.rng
        opener = closer = ""
        if rng.random() < 0.25:
            opener = self.pick(phrases.OPENERS, phrases.HELD_OUT_OPENERS)
            if not template.startswith(("{", "I ", "I'", "Pip")) and rng.random() < 0.6:
                template = template[0].lower() + template[1:]
        elif not template.startswith(("{", "I ", "I'", "Pip")) and rng.random() < 0.1:
            template = template[0].lower() + template[1:]
        elif template[-1] in ".?!" and rng.random() < 0.08:
            closer = self.pick(phrases.CLOSERS, phrases.HELD_OUT_CLOSERS)
        elif template[-1] in ".?!" and rng.random() < 0.08:
            template = template[:-1]
        text = template.format(**values)
        if template.startswith("{") and not opener and rng.random() < 0.8:
            text = text[0].upper() + text[1:]
        text = opener + text + closer
        return text.lower() if plain and rng.random() < 0.05 else text

    # Messages

    def user(self, text: str, facts: Iterable[tuple[str, str]] = ()) -> None:
        """Append a user message that reveals `facts`."""
        facts = tuple(facts)
        known = self.known()
        for slot, value in facts:
            self.ever_told.add(slot)
            if known.get(slot, value) != value:
                self.changed.add(slot)
        self.messages.append(Message("user", text, facts))

    def assistant(
        self,
        text: str,
        skill: str,
        thought: str,
        facts: Iterable[tuple[str, str]] = (),
        tool_call: dict[str, Any] | None = None,
    ) -> None:
        """Append the answer to the message before it; `thought` is used only if this turn thinks."""
        forced = not self.think_always and self.rng.random() < self.think_share
        thinks = self.think_always or forced
        self.messages.append(
            Message(
                role="assistant",
                content=text,
                facts=tuple(facts),
                skill="think" if thinks else skill,
                reasoning=thought if thinks else "",
                tool_call=tool_call,
                forced_think=forced,
                new_phrase=self._used_new_phrase,
            )
        )
        self._used_new_phrase = False

    def tool(self, text: str) -> None:
        """Append a tool's result."""
        self.messages.append(Message("tool", text))

    def exchanges(self) -> int:
        """Number of user messages so far."""
        return sum(message.role == "user" for message in self.messages)


@dataclass
class Conversation:
    """A finished conversation: messages and the tool schemas that its system message shows."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
