"""Specifications of constraints, without a vocabulary: frozen values that compare, hash and serialize."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from slm_core.constraints.schema import schema_text
from slm_core.errors import ConstraintError


class Spec:
    """The base of all specs; ``compile(spec, vocab)`` makes a constraint.

    Attributes:
        kind: its name in ``to_dict``.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, object]:
        """JSON values for ``spec_from_dict``."""
        values: dict[str, object] = {one.name: _serialized(getattr(self, one.name)) for one in fields(self)}  # type: ignore[arg-type]  # subclasses are dataclasses
        return {"kind": self.kind, **values}


@dataclass(frozen=True, slots=True)
class JsonSchema(Spec):
    """A JSON value that matches a schema.

    Object members are in the schema's order. Keywords that cannot be enforced are refused when the spec is compiled;
    ``constraints.schema.KEYWORDS`` lists the enforced keywords.

    Attributes:
        schema: a mapping, ``True`` (any value), JSON text, a pydantic model or a dataclass; stored as JSON text.
        compact: no white space; otherwise a space, or a new line and up to 20 characters of indentation.

    Raises:
        ConstraintError: the schema is not JSON.
    """

    kind = "json_schema"
    schema: Any
    compact: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", schema_text(self.schema))
        _check_flag(self, "compact")


@dataclass(frozen=True, slots=True)
class AnyJson(Spec):
    """Any JSON value.

    Attributes:
        compact: no white space.
    """

    kind = "any_json"
    compact: bool = False

    def __post_init__(self) -> None:
        _check_flag(self, "compact")


@dataclass(frozen=True, slots=True)
class Regex(Spec):
    """A text that matches a regular expression as a whole.

    Attributes:
        pattern: the expression in the syntax of Rust's ``regex`` crate: Unicode, no look-around, no back references.
    """

    kind = "regex"
    pattern: str

    def __post_init__(self) -> None:
        _check_text(self, "pattern")


@dataclass(frozen=True, slots=True)
class Lark(Spec):
    """A context-free grammar in llguidance's variant of Lark, with the start rule ``start``.

    Attributes:
        grammar: its text.
    """

    kind = "lark"
    grammar: str

    def __post_init__(self) -> None:
        _check_text(self, "grammar")


@dataclass(frozen=True, slots=True)
class Gbnf(Spec):
    """A context-free grammar in llama.cpp's notation.

    Attributes:
        grammar: its text.
        root: the start rule.
    """

    kind = "gbnf"
    grammar: str
    root: str = "root"

    def __post_init__(self) -> None:
        _check_text(self, "grammar")
        _check_text(self, "root")


@dataclass(frozen=True, slots=True)
class Choice(Spec):
    """One of several texts.

    Attributes:
        options: the texts: at least one, all different and not empty.
    """

    kind = "choice"
    options: Sequence[str]

    def __post_init__(self) -> None:
        alone = isinstance(self.options, str | Mapping) or not isinstance(self.options, Iterable)
        options = (self.options,) if alone else tuple(self.options)
        if not options or not all(isinstance(o, str) and o for o in options) or len(set(options)) < len(options):
            raise ConstraintError(f"options {options!r} (accepted: at least one text, all different and not empty)")
        object.__setattr__(self, "options", options)
        _check_text(self, "options")


@dataclass(frozen=True, slots=True)
class Triggered(Spec):
    """Free text until a marker, then the text of another spec, then the end.

    Free text may contain anything, including control tokens, and may be the whole answer.

    Attributes:
        spec: the spec of the text after the marker.
        marker: the text, or the spelling of a control token, that ends the free text.
        required: whether the marker must come.
    """

    kind = "triggered"
    spec: Spec
    marker: str
    required: bool = False

    def __post_init__(self) -> None:
        _check_spec(self)
        _check_text(self, "marker")
        _check_flag(self, "required")
        if not self.marker:
            raise ConstraintError("the marker is empty (accepted: a text)")


@dataclass(frozen=True, slots=True)
class AfterThinking(Spec):
    """Free reasoning text, then white space, then the text of another spec.

    For prompts after which the model reasons. The prompt or the answer may open the reasoning.

    Attributes:
        spec: the spec of the text after the reasoning.
        end: the text, or the spelling of a control token, that ends the reasoning.
    """

    kind = "after_thinking"
    spec: Spec
    end: str = "</think>"

    def __post_init__(self) -> None:
        _check_spec(self)
        _check_text(self, "end")
        if not self.end:
            raise ConstraintError("the end of the reasoning is empty (accepted: a text)")


@dataclass(frozen=True, slots=True)
class AnyOf(Spec):
    """The text of one of several specs.

    Attributes:
        specs: the specs: at least one.
    """

    kind = "any_of"
    specs: Sequence[Spec]

    def __post_init__(self) -> None:
        specs = tuple(self.specs) if isinstance(self.specs, Iterable) else ()
        if not specs or not all(isinstance(spec, Spec) for spec in specs):
            raise ConstraintError(f"{self.kind}: specs={self.specs!r} (accepted: at least one spec, in a list)")
        object.__setattr__(self, "specs", specs)


def _check_text(spec: Spec, name: str) -> None:
    value = getattr(spec, name)
    for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else (value,):
        if not isinstance(text, str):
            raise ConstraintError(f"{spec.kind}: {name}={text!r} (accepted: a text)")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConstraintError(f"{spec.kind}: {name} contains an unpaired surrogate, so it is not a text") from error


def _check_flag(spec: Spec, name: str) -> None:
    if not isinstance(getattr(spec, name), bool):
        raise ConstraintError(f"{spec.kind}: {name}={getattr(spec, name)!r} (accepted: True, False)")


def _check_spec(spec: Triggered | AfterThinking) -> None:
    if not isinstance(spec.spec, Spec):
        raise ConstraintError(f"{spec.kind}: spec={spec.spec!r} (accepted: a spec, such as JsonSchema(...))")


def _serialized(value: object) -> object:
    if isinstance(value, Spec):
        return value.to_dict()
    return [_serialized(each) for each in value] if isinstance(value, tuple) else value
