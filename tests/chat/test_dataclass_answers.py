"""Dataclasses as types of answers: their schemas accept what the class can hold, and answers become objects."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import jsonschema
import pytest

import slm_core as slm
from slm_core.chat.schema import Schema
from slm_core.constraints import JsonSchema


class Colour(Enum):
    RED = "red"
    GREEN = "green"


@dataclass
class Address:
    city: str
    zip: int | None = None


@dataclass
class Person:
    name: str
    height: float
    colour: Colour
    kind: Literal["cat", "dog"]
    address: Address
    places: list[Address] = field(default_factory=list)
    at: tuple[int, str] = (0, "")
    notes: dict[str, bool] = field(default_factory=dict)
    any: Any = None
    hidden: int = field(default=3, init=False)


@dataclass
class Loop:
    inner: Loop | None = None


@dataclass
class Odd:
    nested: list[complex]


@dataclass
class Picky:
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("n is negative")


LEAST = {"name": "Ada", "height": 2, "colour": "red", "kind": "cat", "address": {"city": "Rome"}}
WHOLE = {
    **LEAST,
    "places": [{"city": "Oslo", "zip": 5}, {"city": "Bonn", "zip": None}],
    "at": [1, "x"],
    "notes": {"a": True},
    "any": [1, {"x": 2}],
}
WRONG = [
    {"name": 5},
    {"height": "tall"},
    {"colour": "blue"},
    {"kind": "cow"},
    {"address": {}},
    {"at": [1]},
    {"at": [1, "x", 2]},
    {"notes": {"a": 1}},
    {"places": [5]},
    {"hidden": 4},
    {"age": 3},
]


def test_the_schema_accepts_what_the_class_can_hold_and_nothing_else() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(JsonSchema(Person).schema))
    assert validator.is_valid(LEAST) and validator.is_valid(WHOLE)
    for wrong in WRONG:
        assert not validator.is_valid({**LEAST, **wrong}), wrong
    for name in LEAST:
        assert not validator.is_valid({key: value for key, value in LEAST.items() if key != name}), name


def test_a_value_becomes_an_object() -> None:
    read = Schema(Person).read(json.dumps(WHOLE))
    places = [Address("Oslo", 5), Address("Bonn", None)]
    address = Address("Rome")
    assert read == Person("Ada", 2.0, Colour.RED, "cat", address, places, (1, "x"), {"a": True}, [1, {"x": 2}])


def test_an_extraction_is_an_object_of_the_dataclass() -> None:
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as model:
        chat = model.chat(n_ctx=512, sampling=slm.Sampling(temperature=0))
        chat.send("My name is Ada.")

        @dataclass
        class Name:
            name: str

        extraction = chat.oracle().extract(Name)
        assert isinstance(extraction.value, Name)
        assert json.loads(extraction.text) == {"name": extraction.value.name}


def test_a_class_that_refuses_the_value() -> None:
    with pytest.raises(slm.OracleError, match="does not fit Picky: n is negative"):
        Schema(Picky).read('{"n": -1}')


@pytest.mark.parametrize(
    ("cls", "message"),
    [(Loop, r"Loop\.inner: Loop contains itself"), (Odd, r"Odd\.nested\[\]: .*complex.* has no JSON schema")],
)
def test_a_field_without_a_schema_is_named_with_its_path(cls: type, message: str) -> None:
    with pytest.raises(slm.ConstraintError, match=message):
        JsonSchema(cls)
