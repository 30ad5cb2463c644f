"""Tools from Python functions, compared with the schemas of transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum, IntEnum
from typing import Any, Literal, Optional, Union

import pytest
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema

from slm_core.errors import InvalidOption
from slm_core.toolschema import tool_schema, tool_schemas


class Colour(Enum):
    RED = "red"
    NONE = None
    THREE = 3


class Level(IntEnum):
    LOW = 1
    HIGH = 2


def plain(city: str, days: int, exact: bool, factor: float) -> str:
    """Get the weather.

    Args:
        city: Name of the city
        days: How many days
        exact: Whether to be exact
        factor: A factor
    """
    return city + str(days) + str(exact) + str(factor)


def defaults(city: str = "Rome", days: Optional[int] = None, unit: str | None = "c") -> None:  # noqa: UP045
    """Get the weather.

    It is a forecast, over
    several lines.

    Args:
        city: Name of the city: a long one,
            which goes on here.
          Note: this is deeper
        days (int, optional): How many
        unit: Unit  (choices: ["c", " f "])

    Returns:
        Nothing at all,
        in two lines.

    Raises:
        ValueError: never
    """


def containers(
    names: list[str],
    anything: list,  # type: ignore[type-arg]
    pair: tuple[int, str],
    table: dict[str, list[float]],
    loose: dict,  # type: ignore[type-arg]
    whatever: Any,
    nothing: None,
    untyped: tuple,  # type: ignore[type-arg]
) -> list[dict[str, int]]:
    """Use containers. Args: are described here, too.

    Args:
        names: n
        anything: a
        pair: p
        table: t
        loose: l
        whatever: w
        nothing: o
        untyped: u
    Returns: on the same line
    """
    return []


def unions(
    a: Union[int, str],  # noqa: UP007
    b: int | list[int] | None,
    c: list[int] | tuple[int, int],
    d: Literal["x", "y", 3, None],  # noqa: PYI061  # the spelling is under test
    e: Literal[1],
    f: Colour,
    g: Level | str,
    h: list | tuple,  # type: ignore[type-arg]
    i: Optional[dict[str, int | None]] = None,  # noqa: UP045
) -> Union[int, None]:  # noqa: UP007
    """Unions.

    Args:
        a: a
        b: b
        c: c
        d: d (Choices: [1, "two", null])
        e: e

        f: f
        g: g
        h: h
        i: i
    """
    return None


def foreign_result(x: int) -> Callable[[], int]:
    """What it returns has no schema.

    Args:
        x: an x

    Returns:
        A function.
    """
    return lambda: x


def nothing() -> int:
    """No arguments, one line."""
    return 1


async def waiting(x: int) -> str:
    """Wait.

    Args:
        x: seconds

    Returns:
        The time.
    """
    return str(x)


class Methods:
    def bound(self, x: int) -> None:
        """Bind.

        Args:
            x: an x
        """

    @classmethod
    def of_class(cls, x: int) -> None:
        """Be of a class.

        Args:
            x: an x
        """


FUNCTIONS = [
    *(plain, defaults, containers, unions, foreign_result, nothing, waiting),
    *(Methods().bound, Methods.bound, Methods.of_class),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_the_schema_equals_that_of_transformers(function: Callable[..., object]) -> None:
    schema = tool_schema(function)
    assert schema == get_json_schema(function)
    assert str(schema) == str(get_json_schema(function)), "templates depend on the order of keys"


def undocumented(x: int) -> None: ...


def undescribed(x: int) -> None:
    """Do it."""


def unannotated(x) -> None:  # type: ignore[no-untyped-def]
    """Do it.

    Args:
        x: an x
    """


def foreign(x: Methods) -> None:
    """Do it.

    Args:
        x: an x
    """


def single(x: tuple[int]) -> None:
    """Do it.

    Args:
        x: an x
    """


def endless(x: tuple[int, ...]) -> None:
    """Do it.

    Args:
        x: an x
    """


def unspelled(x: Literal[b"a"]) -> None:
    """Do it.

    Args:
        x: an x
    """


def bad_choices(x: str) -> None:
    """Do it.

    Args:
        x: an x (choices: [a, b])
    """


@pytest.mark.parametrize(
    "function", [undocumented, undescribed, unannotated, foreign, single, endless, unspelled, bad_choices]
)
def test_functions_that_transformers_refuses_are_refused_in_one_line(function: Callable[..., object]) -> None:
    with pytest.raises(Exception):  # noqa: B017  # each raises another type
        get_json_schema(function)
    with pytest.raises(InvalidOption, match=rf"^the function {function.__name__} cannot be a tool: ") as caught:
        tool_schema(function)
    assert "\n" not in str(caught.value)


def positional(x: int, /) -> int:
    """Do it.

    Args:
        x: an x
    """
    return x


def variable(*x: int) -> int:
    """Do it.

    Args:
        x: an x
    """
    return len(x)


def keywords(**x: int) -> int:
    """Do it.

    Args:
        x: an x
    """
    return len(x)


def generator() -> Iterator[int]:
    """Do it."""
    yield 1


async def async_generator() -> AsyncIterator[int]:
    """Do it."""
    yield 1


@pytest.mark.parametrize("function", [positional, variable, keywords, generator, async_generator])
def test_functions_that_no_call_can_pass_its_arguments_or_take_a_value_from_are_refused(
    function: Callable[..., object],
) -> None:
    """A call passes arguments by name; the model would read a TypeError that only the program can fix."""
    with pytest.raises(InvalidOption, match=rf"^the function {function.__name__} cannot be a tool: "):
        tool_schema(function)


class Search(BaseModel):
    """Search the web."""

    query: str = Field(description="what to look for")
    limit: int = 10


def test_a_pydantic_model_becomes_a_tool_with_its_fields_as_arguments() -> None:
    assert tool_schema(Search) == {
        "type": "function",
        "function": {
            "name": "Search",
            "description": "Search the web.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "title": "Query", "description": "what to look for"},
                    "limit": {"type": "integer", "title": "Limit", "default": 10},
                },
                "required": ["query"],
            },
        },
    }


def test_schemas_are_passed_on_and_other_values_refused() -> None:
    schema = {"type": "function", "function": {"name": "f"}}
    assert tool_schemas([schema]) == [schema]
    with pytest.raises(InvalidOption, match="a tool cannot be a str"):
        tool_schema("f")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="the class Methods cannot be a tool"):
        tool_schema(Methods)
