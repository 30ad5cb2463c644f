"""Each call that makes a chat answer passes each of its options on."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest

import slm_core as slm
from slm_core.chat.steering import Steering
from slm_core.chat.talking import Talking
from slm_core.types import Message

NAMES = tuple(field.name for field in fields(Steering))


class _Begun:
    """In place of a stream: its answer is what the turn began with."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self.begun = begin()

    def run(self) -> Any:
        return self.begun

    async def arun(self) -> Any:
        return self.begun


class _Recorder(Talking):
    """A chat that answers with the messages and options that it gets, and the name of the way to answer."""

    def _begun(self, begin: Callable[[], Any]) -> Any:
        return _Begun(begin)

    def _answered(self, sent: Sequence[Message], steering: Steering) -> Any:
        return "answered", tuple(sent), steering

    def _proceed(self, steering: Steering) -> Any:
        return "proceed", (), steering

    def _regenerate(self, steering: Steering) -> Any:
        return "regenerate", (), steering


@pytest.mark.parametrize("name", ["stream", "send", "asend", "proceed", "regenerate"])
def test_every_option_is_passed_on(name: str) -> None:
    call, options = getattr(_Recorder(), name), {option: object() for option in NAMES}
    keywords = [p.name for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert sorted(keywords) == sorted(NAMES), f"{name} has other options than a turn"
    sent = () if name in ("proceed", "regenerate") else ("Hello",)
    result = call(*sent, **options)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    way, messages, steering = result.begun if isinstance(result, _Begun) else result
    assert way == (name if not sent else "answered")
    assert messages == tuple(slm.Message("user", text) for text in sent)
    for option, value in options.items():
        assert getattr(steering, option) is value, f"{name} passes another value as {option}"


def test_options_of_a_turn_go_over_those_of_the_chat() -> None:
    base = slm.Sampling(max_tokens=3, temperature=0.5, top_p=0.25, seed=7, stop=("a",))
    other = slm.Sampling(max_tokens=4, temperature=0.75, top_p=0.125, seed=8, stop=("b",))
    assert Steering().sampling_over(base) == base
    assert Steering(sampling=other).sampling_over(base) == other
    for name in ("max_tokens", "temperature", "top_p", "seed", "stop"):
        value = getattr(other, name)
        mixed = Steering(**{name: value}).sampling_over(base)
        assert mixed == base.override(**{name: value}) != base, f"{name} of the turn is not the option of its answers"
    use = Steering(tool_choice="none", strict_tools=True, tool_errors="raise", max_rounds=2).tool_use
    assert (use.choice, use.strict, use.errors, use.max_rounds) == ("none", True, "raise", 2)
