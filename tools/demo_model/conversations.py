"""Generates the synthetic conversations: system prompt, a mix of skills, and messages removed on the way.

Run as a script to print a few of them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

import phrases
import skills
import word_lists
from dialogue import Conversation, Dialogue, Message

SKILLS: dict[str, skills.Skill] = {
    "tell": skills.tell,
    "recall": skills.recall,
    "which": skills.which,
    "json": skills.json_facts,
    "arithmetic": skills.arithmetic,
    "spell": skills.spell,
    "repeat": skills.repeat,
    "weather": skills.weather,
    "chat": skills.chat,
}
# Relative weight of a skill within a mixed conversation.
MIX = {
    "tell": 4.0, "recall": 6.0, "which": 3.0, "json": 4.0, "arithmetic": 1.5, "spell": 1.5, "repeat": 1.5,
    "weather": 0.5, "chat": 1.5,
}  # fmt: skip
# Share of the conversations that practise one skill only; numbers and plain copying need it most.
DRILLS = {"arithmetic": 0.25, "repeat": 0.08, "json": 0.1, "spell": 0.03, "recall": 0.05}


def generate(
    rng: random.Random,
    held_out: bool = False,
    mix: Mapping[str, float] = MIX,
    drills: Mapping[str, float] | None = None,
) -> Conversation:
    """One conversation.

    Args:
        rng: source of all randomness.
        held_out: an evaluation conversation (held-out facts, operands and phrasings).
        mix: relative weight per skill.
        drills: share of conversations per skill that practise only that skill.
    """
    d = Dialogue(rng, held_out)
    _set_up(d)
    drill = _choose_drill(rng, drills or {})
    if drill:
        _practise(d, drill)
    else:
        _converse(d, mix)
    return Conversation(d.messages, d.tools)


def _converse(d: Dialogue, mix: Mapping[str, float]) -> None:
    """A mixed conversation; in every other one, messages are removed on the way."""
    rng = d.rng
    length = rng.choice((1, 1, 2, 3, 4, 5, 6, 7, 8))
    weights = {**mix, "weather": 8.0 if d.tools else mix["weather"]}
    removal_at = rng.randint(1, length) if length > 1 and rng.random() < 0.5 else 0
    if length > 1 and rng.random() < 0.75:
        skills.tell(d)
    while d.exchanges() < length:
        _one_of(d, weights)
        if removal_at and d.exchanges() >= removal_at:
            removal_at = 0
            _remove(d)
            for _ in range(rng.randint(1, 3)):
                rng.choice((skills.recall, skills.recall, skills.which, skills.json_facts))(d)


def _practise(d: Dialogue, drill: str) -> None:
    if drill in ("recall", "which", "json"):
        skills.tell(d)
    for _ in range(d.rng.randint(3, 9)):
        SKILLS[drill](d)


def _one_of(d: Dialogue, weights: Mapping[str, float]) -> None:
    SKILLS[d.rng.choices(list(weights), list(weights.values()))[0]](d)


def _choose_drill(rng: random.Random, drills: Mapping[str, float]) -> str:
    point = rng.random()
    for name, share in drills.items():
        if point < share:
            return name
        point -= share
    return ""


def _set_up(d: Dialogue) -> None:
    """Choose the system prompt, whether there are tools, and who decides about thinking."""
    rng = d.rng
    kind = rng.random()
    if kind < 0.15:
        d.think_always = True
        prompt = d.pick((_think_prompt(rng),), phrases.HELD_OUT_SYSTEM_THINK)
        if rng.random() < 0.4:
            prompt = f"{_plain_system_prompt(d)} {prompt}"
        d.messages.append(Message("system", prompt))
        return
    if kind < 0.27:
        d.think_share = rng.choice((0.3, 0.6, 1.0))
    with_tools = rng.random() < 0.2
    if with_tools:
        d.tools = _tool_schemas(rng)
    if rng.random() < 0.65:
        use_tool_prompt = with_tools and rng.random() < 0.4
        prompt = rng.choice(phrases.SYSTEM_TOOLS) if use_tool_prompt else _system_prompt(d)
        d.messages.append(Message("system", prompt))


def _system_prompt(d: Dialogue) -> str:
    """A prompt that does not ask for a thought, sometimes in words close to one that does."""
    if d.rng.random() < 0.12:
        return d.rng.choice(phrases.SYSTEM_NO_THINK)
    return _plain_system_prompt(d)


def _plain_system_prompt(d: Dialogue) -> str:
    template = d.pick(phrases.SYSTEM, phrases.HELD_OUT_SYSTEM)
    adjectives = word_lists.ADJECTIVES + (word_lists.HELD_OUT_ADJECTIVES if d.held_out else ())
    x, y = d.rng.sample(adjectives, 2)
    prompt = template.format(x=x, y=y)
    return prompt.rstrip(".") if d.rng.random() < 0.1 else prompt


def _think_prompt(rng: random.Random) -> str:
    """A composed prompt that asks for a thought; never one of the held-out prompts."""
    while True:
        parts = (phrases.THINK_STARTS, phrases.THINK_VERBS, phrases.THINK_ENDS)
        prompt = "".join(rng.choice(part) for part in parts)
        prompt = prompt[0].upper() + prompt[1:]
        if prompt not in phrases.HELD_OUT_SYSTEM_THINK:
            return prompt


def _remove(d: Dialogue) -> None:
    """Remove messages as an application does that forgets: one message, one exchange, or the start.

    What the model said before no longer follows from what is visible, so it is not trained on or scored.
    """
    rng, messages = d.rng, d.messages
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    telling = [index for index in users if messages[index].facts]
    how = rng.random()
    start = rng.choice(telling) if telling and rng.random() < 0.8 else rng.choice(users)
    end = next((index for index in users if index > start), len(messages))
    if how < 0.45:
        del messages[start]
    elif how < 0.75:
        del messages[start:end]
    elif how < 0.9:
        del messages[1 if messages[0].role == "system" and rng.random() < 0.6 else 0 : end]
    elif end - start == 2:
        del messages[start + 1]
    if messages and messages[0].role != "system":
        d.think_always = False
    for message in messages:
        message.skill = None


def _tool_schemas(rng: random.Random) -> list[dict[str, Any]]:
    """The get_weather schema in small variations, sometimes with a second tool."""
    city: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.4:
        city["description"] = rng.choice(("The city", "The name of the city", "City name", "Name of a city"))
    parameters: dict[str, Any] = {"type": "object", "properties": {"city": city}}
    if rng.random() < 0.85:
        parameters["required"] = ["city"]
    function: dict[str, Any] = {"name": "get_weather"}
    if rng.random() < 0.75:
        function["description"] = rng.choice(
            (
                "Get the weather in a city",
                "Get the current weather in a city.",
                "Get the weather of a city.",
                "The current weather in a city.",
                "Weather of a city",
            )
        )
    function["parameters"] = parameters
    tools = [{"type": "function", "function": function}]
    if rng.random() < 0.15:
        time_parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
        clock = {"name": "get_time", "description": "Get the time in a city", "parameters": time_parameters}
        tools.insert(rng.randint(0, 1), {"type": "function", "function": clock})
    return tools


def main() -> None:
    """Print generated conversations."""
    from rendering import render

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true", help="evaluation conversations")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.count):
        print(render(generate(rng, args.held_out, drills=None if args.held_out else DRILLS)))
        print("=" * 40)


if __name__ == "__main__":
    main()
