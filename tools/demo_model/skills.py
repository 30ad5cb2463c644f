"""The skills: each function appends one exchange (or one tool round) to a dialogue.

An answer is a function of the visible messages alone, so a greedy answer can be compared for equality.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import phrases
import word_lists
from dialogue import SLOTS, Dialogue, category, is_held_out

Skill = Callable[[Dialogue], None]


def tell(d: Dialogue) -> None:
    """The user tells one to three facts; the answer acknowledges them without repeating them."""
    rng, known = d.rng, d.known()
    new = [slot for slot in _likely_slots(d) if slot not in known]
    if known and (rng.random() < 0.3 or not new):
        slots = [rng.choice(list(known))]
    else:
        slots = rng.sample(new, min(len(new), rng.choice((1, 1, 1, 1, 2, 2, 3))))
    facts = [(slot, d.draw(slot)) for slot in slots]
    text = _joined(d, [_statement(d, slot, value, slot in known) for slot, value in facts])
    if rng.random() < 0.12:
        asked = rng.choice(slots)
        d.user(f"{text} {_question(d, asked)}", facts)
        _answer(d, asked, "recall")
        return
    d.user(text, facts)
    reply = phrases.ACKNOWLEDGE_MANY if len(facts) > 1 else phrases.ACKNOWLEDGE[category(slots[0])]
    d.assistant(reply, "acknowledge", "The user tells me something.")


def recall(d: Dialogue) -> None:
    """The user asks for a fact, which may be unknown."""
    slot = _slot_to_ask(d)
    d.user(_question(d, slot))
    _answer(d, slot, "recall")


def which(d: Dialogue) -> None:
    """The user offers two values and asks which of them is the fact."""
    slot = _slot_to_ask(d)
    group = category(slot)
    value = d.known().get(slot) or d.draw(slot)
    other = value
    while other == value:
        other = d.draw(slot)
    a, b = d.rng.sample((value, other), 2)
    if d.rng.random() < 0.3:
        template = d.rng.choice(phrases.WHICH_DIRECT[group])
    else:
        template = d.pick(phrases.WHICH_FRAMES, phrases.HELD_OUT_WHICH_FRAMES)
    noun = d.rng.choice(phrases.NOUN_PHRASES[group]).format(k=slot)
    d.user(d.phrase(template, plain=False, np=noun, a=a, b=b, k=slot))
    _answer(d, slot, "which")


def json_facts(d: Dialogue) -> None:
    """The user wants facts as JSON: all known facts, or named keys with null for unknown facts."""
    rng, known = d.rng, d.known()
    verb = rng.choice(phrases.JSON_VERBS)
    if rng.random() < 0.5:
        keys = [slot for slot in SLOTS if slot in known]
        form = f"{verb} {rng.choice(phrases.JSON_FACTS)} {rng.choice(phrases.JSON_FORMS)}."
        text = d.phrase(d.pick((form,), phrases.HELD_OUT_JSON_ALL))
    else:
        pool = list(dict.fromkeys([*known, *rng.sample(_likely_slots(d), 3)]))
        keys = rng.sample(pool, rng.randint(1, min(4, len(pool))))
        listed = " and ".join(keys) if len(keys) == 2 and rng.random() < 0.5 else ", ".join(keys)
        text = d.phrase(d.pick(phrases.JSON_KEYS, phrases.HELD_OUT_JSON_KEYS), verb=verb, keys=listed)
    facts = {key: known.get(key) for key in keys}
    shown = {key: int(value) if key == "number" and value else value for key, value in facts.items()}
    d.user(text)
    revealed = [(key, value) for key, value in facts.items() if value]
    d.assistant(json.dumps(shown), "json", "The user wants JSON.", revealed)


def arithmetic(d: Dialogue) -> None:
    """Addition or subtraction of one- or two-digit numbers; differences are never negative."""
    subtract, a, b = _operands(d)
    operator = "-" if subtract else "+"
    templates: tuple[str, ...] = phrases.ARITHMETIC
    if d.rng.random() < 0.15:
        templates = phrases.SUBTRACTION if subtract else phrases.ADDITION
    template = d.pick(templates, phrases.HELD_OUT_ARITHMETIC)
    d.user(d.phrase(template, a=a, b=b, o=operator, w="minus" if subtract else "plus"))
    digits = 2 if max(a, b) > 9 else 1
    skill = f"{'subtract' if subtract else 'add'}_{digits}_digit"
    result = a - b if subtract else a + b
    d.assistant(f"{a} {operator} {b} = {result}", skill, _steps(subtract, a, b))


def spell(d: Dialogue) -> None:
    """Spell a word with dashes."""
    word = d.rng.choice(word_lists.WORDS)
    d.user(d.phrase(d.pick(phrases.SPELL, phrases.HELD_OUT_SPELL), w=word))
    d.assistant("-".join(word), "spell", f"Spell {word}.")


def repeat(d: Dialogue) -> None:
    """Repeat one to six words; copying names and cities too is what the recall of facts is built on."""
    pool = word_lists.WORDS if d.rng.random() < 0.5 else word_lists.WORDS_AND_VALUES
    words = " ".join(d.rng.sample(pool, d.rng.choice((1, 1, 1, 2, 2, 3, 4, 6))))
    d.user(d.phrase(d.pick(phrases.REPEAT, phrases.HELD_OUT_REPEAT), plain=False, w=words))
    d.assistant(words, "repeat", f"Repeat {words}.")


def chat(d: Dialogue) -> None:
    """Small talk: greetings, thanks, who the model is."""
    answer = d.rng.choice(list(phrases.CHAT))
    d.user(d.phrase(d.pick(phrases.CHAT[answer], phrases.HELD_OUT_CHAT[answer])))
    d.assistant(answer, "chat", "Small talk.")


def weather(d: Dialogue) -> None:
    """Ask for the weather: a tool round where a tool is offered, else the answer that there is none."""
    city = d.rng.choice(word_lists.CITIES)
    d.user(d.phrase(d.pick(phrases.WEATHER, phrases.HELD_OUT_WEATHER), plain=False, c=city))
    if not d.tools:
        d.assistant(phrases.WEATHER_WITHOUT_TOOL, "no_tool", "I have no weather tool.")
        return
    call = {"name": "get_weather", "arguments": {"city": city}}
    d.assistant("", "tool_call", "I need the weather tool.", tool_call=call)
    condition = d.rng.choice(word_lists.CONDITIONS)
    degrees = d.rng.randint(-9, 39)
    d.tool(_tool_result(d, city, condition, degrees))
    d.assistant(f"It is {condition} in {city}, {degrees} degrees.", "tool_answer", "The tool answered.")


def _likely_slots(d: Dialogue) -> list[str]:
    """All slots but most kinds of pet, so that a conversation is not only about pets."""
    kinds = set(d.rng.sample(word_lists.PET_KINDS, 2)) | {slot for slot in d.ever_told if category(slot) == "pet"}
    return [slot for slot in SLOTS if category(slot) != "pet" or slot in kinds]


def _slot_to_ask(d: Dialogue) -> str:
    """A slot worth asking for: known, forgotten, or never told."""
    known = list(d.known())
    forgotten = sorted(d.ever_told.difference(known))
    if forgotten and d.rng.random() < 0.45:
        return d.rng.choice(forgotten)
    if known and d.rng.random() < 0.6:
        return d.rng.choice(known)
    unknown = [slot for slot in _likely_slots(d) if slot not in known]
    return d.rng.choice(unknown or [slot for slot in SLOTS if slot not in known])


def _statement(d: Dialogue, slot: str, value: str, is_change: bool) -> str:
    group = category(slot)
    template = d.pick(phrases.TELL[group], phrases.HELD_OUT_TELL[group])
    if is_change and d.rng.random() < 0.4:
        return d.rng.choice(phrases.CHANGE_OPENERS) + template.format(k=slot, v=value)
    return d.phrase(template, plain=False, k=slot, v=value)


def _joined(d: Dialogue, sentences: list[str]) -> str:
    """Sentences in a row, or joined by "and"."""
    text = sentences[0]
    for sentence in sentences[1:]:
        first, _, rest = sentence.partition(" ")
        if first in ("I", "I'm", "My", "The", "We", "Our") and d.rng.random() < 0.4:
            text = f"{text.rstrip('.!?')} and {first if first[0] == 'I' else first.lower()} {rest}"
        else:
            text = f"{text} {sentence}"
    return text


def _question(d: Dialogue, slot: str) -> str:
    group = category(slot)
    if d.rng.random() < 0.45:
        return d.phrase(d.pick(phrases.ASK_DIRECT[group], phrases.HELD_OUT_ASK_DIRECT[group]), k=slot)
    noun = d.rng.choice(phrases.NOUN_PHRASES[group]).format(k=slot)
    return d.phrase(d.pick(phrases.ASK_FRAMES, phrases.HELD_OUT_ASK_FRAMES), np=noun)


def _answer(d: Dialogue, slot: str, skill: str) -> None:
    group, value = category(slot), d.known().get(slot)
    if value is None:
        reason = "forgotten" if slot in d.ever_told else "not_told"
        d.assistant(phrases.UNKNOWN[group].format(k=slot), reason, "The user did not tell me that.")
        return
    if skill == "recall" and slot in d.changed:
        skill = "recall_changed"
    d.assistant(
        phrases.KNOWN[group].format(k=slot, v=value), skill, f"The user told me: {slot} {value}.", [(slot, value)]
    )


def _operands(d: Dialogue) -> tuple[bool, int, int]:
    """(subtract, a, b); two-digit pairs are split by hash, the small table of one-digit pairs is not."""
    rng = d.rng
    subtract = rng.random() < 0.55
    largest = 99 if rng.random() < 0.85 else 9
    while True:
        a, b = rng.randint(0, largest), rng.randint(0, largest)
        if largest == 99 and rng.random() < 0.2:
            b = rng.randint(0, 9)
        if subtract and b > a:
            a, b = b, a
        if largest == 9 or is_held_out(subtract, a, b) == d.held_out:
            return subtract, a, b


def _steps(subtract: bool, a: int, b: int) -> str:
    """The column-by-column calculation, for the think block."""
    if max(a, b) <= 9:
        return f"{a} - {b} = {a - b}." if subtract else f"{a} + {b} = {a + b}."
    (a_tens, a_ones), (b_tens, b_ones) = divmod(a, 10), divmod(b, 10)
    if not subtract:
        ones = a_ones + b_ones
        carry = " + 1" if ones > 9 else ""
        return f"{a_ones} + {b_ones} = {ones}, {a_tens} + {b_tens}{carry} = {a_tens + b_tens + ones // 10}."
    borrow = a_ones < b_ones
    top, high = a_ones + 10 * borrow, a_tens - borrow
    return f"{top} - {b_ones} = {top - b_ones}, {high} - {b_tens} = {high - b_tens}."


def _tool_result(d: Dialogue, city: str, condition: str, degrees: int) -> str:
    """What weather tools return: objects with differing keys, or a line of text."""
    shape = d.rng.random()
    if shape < 0.2:
        return f"{condition}, {degrees} degrees"
    condition_key = d.rng.choice(("weather", "weather", "condition", "conditions", "sky", "description"))
    degrees_key = d.rng.choice(("temperature", "temperature", "temp", "temp_c", "temperature_c", "degrees", "celsius"))
    fields: list[tuple[str, object]] = [(condition_key, condition), (degrees_key, degrees)]
    d.rng.shuffle(fields)
    if d.rng.random() < 0.7:
        fields.insert(0, ("city", city))
    return json.dumps(dict(fields))
