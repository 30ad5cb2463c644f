"""The conversion of a call's arguments for functions, and of their results for the model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from slm_core.chat.toolbox import Toolbox
from slm_core.types import ToolCall


class Person(BaseModel):
    name: str
    age: int


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    colour: Colour


def test_arguments_are_converted_to_their_annotations() -> None:
    arguments: dict[str, object] = {}

    def take(
        colour: Colour,
        size: Literal[1, "big"],
        weight: float,
        n: int,
        pair: tuple[int, str],
        tags: list[str],
        points: list[dict[str, float]],
        table: dict[str, float],
        either: int | str | None = None,
        flag: bool = False,
        plain: dict = {},  # noqa: B006
        items: list = [],  # noqa: B006
        loose: tuple = (),
    ) -> None:
        """Take.

        Args:
            colour: x
            size: x
            weight: x
            n: x
            pair: x
            tags: x
            points: x
            table: x
            either: x
            flag: x
            plain: x
            items: x
            loose: x
        """
        arguments.update(locals())

    good = {
        "colour": "blue", "size": "big", "weight": 2, "n": 3.0, "pair": [1, "a"], "tags": ["a", "b", "c"],
        "table": {"k": 1}, "points": [{"x": 1}, {"y": 2.5}],
        "either": "7", "flag": True, "plain": {"a": [1]}, "items": [1, "a"], "loose": [1, "a"],
    }  # fmt: skip
    box = Toolbox([take])
    assert box.run(ToolCall("take", good)).error is None
    expected = {**good, "colour": Colour.BLUE, "weight": 2.0, "n": 3, "pair": (1, "a"), "table": {"k": 1.0}}
    expected |= {"points": [{"x": 1.0}, {"y": 2.5}], "loose": (1, "a")}
    assert {k: v for k, v in arguments.items() if k in expected} == expected
    assert [type(arguments[k]) for k in ("weight", "n", "pair", "items", "loose")] == [float, int, tuple, list, tuple]
    bad = {
        "colour": "green", "size": True, "weight": "2", "n": 3.5, "pair": [1], "tags": "a", "table": {"k": "v"},
        "either": 1.5, "flag": 1, "plain": [],
    }  # fmt: skip
    for name, value in bad.items():
        content = box.run(ToolCall("take", {**good, name: value})).content
        assert content.startswith(f"Error: the argument '{name}"), content
    inside = {"tags": ["a", 2], "pair": ["a", 1], "points": [{"x": 1}, {"x": "1"}]}
    paths = {"tags": "tags[1]", "pair": "pair[0]", "points": "points[1].x"}
    for name, value in [*inside.items(), ("pair", [1, "a", 2])]:
        path = paths[name] if len(value) == 2 else name
        content = box.run(ToolCall("take", {**good, name: value})).content
        assert content.startswith(f"Error: the argument '{path}' is"), content
    for value in (None, 7, "7"):
        assert box.run(ToolCall("take", {**good, "either": value})).error is None
        assert arguments["either"] == value
    for n, content in ((True, "Error"), (10**400, "null")):
        assert box.run(ToolCall("take", {**good, "n": n})).content.startswith(content)
    assert box.run(ToolCall("take", {**good, "weight": 10**400})).content.startswith("Error: the argument 'weight'")


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        ({"é": [1, True]}, '{"é": [1, true]}'),
        (Point(1, Colour.RED), '{"x": 1, "colour": "red"}'),
        ([Person(name="Ada", age=3)], '[{"name": "Ada", "age": 3}]'),
        (object(), "Error: TypeError: a tool returned a object (accepted: text, or what has a JSON form)"),
        (float("nan"), "Error: ValueError: "),
    ],
)
def test_results_become_text(result: object, content: str) -> None:
    def give() -> Any:
        """Give."""
        return result

    actual = Toolbox([give]).run(ToolCall("give", {})).content
    assert actual == content or actual.startswith(content + "Out of range")
