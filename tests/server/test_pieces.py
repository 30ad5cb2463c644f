"""Joined deltas equal the unstreamed answer, for every format of tool calls and every split of the text.

Otherwise arguments of tools would be lost or sent twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from math import nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formatters.parsers.answers import ANSWERS, TOOLS
from slm_core.engine.prompts import EventParser
from slm_core.generation import Event
from slm_core.plugins import registry
from slm_core.server.pieces import Choice, PieceReader
from slm_core.types import Message

CASES = [(name, text, message) for name, cases in ANSWERS.items() for text, message in cases]


def joined(name: str, texts: Sequence[str], *, single_call: bool = False) -> Choice:
    """The joined pieces of an answer whose events have these texts."""
    parser = EventParser(registry().answer_format(name).parser(tools=TOOLS))
    reader, choice = PieceReader(0, single_call=single_call), Choice(0)
    for text in texts:
        choice.add(reader.read(parser.read(Event(1, text, nan))))
    rest = parser.end()
    if rest is not None:
        choice.add(reader.read(rest))
    return choice


def form(choice: Choice) -> object:
    """A choice without the random ids of its calls."""
    return choice.content, choice.reasoning, [(call.name, call.arguments) for call in choice.calls]


@pytest.mark.parametrize(("name", "text", "message"), CASES, ids=[f"{name}: {text[:30]}" for name, text, _ in CASES])
def test_pieces_join_to_the_message(name: str, text: str, message: Message) -> None:
    choice = joined(name, list(text))
    assert choice.content == message.content + "".join(call.text for call in message.malformed_calls)
    assert choice.reasoning == (message.reasoning or "")
    assert [call.name for call in choice.calls] == [call.name for call in message.tool_calls]
    assert [json.loads(call.arguments) for call in choice.calls] == [call.arguments for call in message.tool_calls]
    assert all(call.id for call in choice.calls)


@given(
    case=st.sampled_from(CASES),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    end=st.integers(0, 600),
)
@settings(max_examples=400, deadline=None)
def test_a_split_changes_nothing(case: tuple[str, str, Message], cuts: list[int], end: int) -> None:
    """Also if the answer is cut off at ``max_tokens``."""
    name, whole, _ = case
    text = whole[: max(1, end)]
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert form(joined(name, pieces)) == form(joined(name, [text]))


def test_an_answer_ends_after_its_first_call() -> None:
    text = ANSWERS["minimax"][0][0]
    choice = joined("minimax", list(text), single_call=True)
    assert [call.name for call in choice.calls] == ["get_weather"]
    assert json.loads(choice.calls[0].arguments) == {"city": "Paris"}


def test_a_malformed_call_that_never_began_is_content() -> None:
    assert joined("hermes", list("Yes<tool_call>nonsense</tool_call>")).content == "Yes<tool_call>nonsense</tool_call>"
