"""JSON schemas: random schemas, whose answers jsonschema validates, refused schemas and hostile schemas."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import slm_core as slm
from constraints.walking import VOCAB, accepts, walk
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.constraints import JsonSchema, compile  # noqa: A004
from slm_core.errors import ConstraintError
from slm_core.generation import FinishReason
from slm_core.model import Model
from slm_core.sampling import Sampling

N_SCHEMAS = 300
SMALL = settings(
    max_examples=N_SCHEMAS,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
NAMES = st.sampled_from(["a", "b", "c d", "é", 'q"', "\\"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.floats(-9, 9).map(lambda x: round(x, 2))
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
PATTERNS = ["^a+$", "b", "[0-9]{2}", "^x|y$", r"^\d{3}-\d{2}$", r"\w+", "^[^a]*$", "^é", '"', "^$", "a.b"]
FORMATS = ["date", "date-time", "time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration"]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]


def optional(**keywords: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({}, optional=keywords)


def with_type(name: str, **keywords: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return optional(**keywords).map(lambda rest: {"type": name, **rest})


def schemas(depth: int) -> st.SearchStrategy[object]:
    """Schemas with all enforced keywords, many of them contradictory."""
    bound = st.integers(-50, 50) | st.floats(-5, 5).map(lambda x: round(x, 2))
    bounds = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bound)
    count = st.integers(0, 3)
    leaves = [
        with_type(
            "string", minLength=st.integers(0, 3), maxLength=st.integers(2, 9), pattern=st.sampled_from(PATTERNS)
        ),
        with_type("string", format=st.sampled_from(FORMATS)),
        with_type("integer", **bounds, multipleOf=st.sampled_from([1, 2, 7])),
        with_type("number", **bounds, multipleOf=st.sampled_from([1, 0.5, 0.01])),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}, True, {"$ref": "#/$defs/shared"}]),
        st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
        VALUES.map(lambda value: {"const": value}),
        optional(type=st.lists(st.sampled_from(TYPES), unique=True, min_size=1), minimum=bound, maxLength=st.just(3)),
    ]
    if not depth:
        return st.one_of(leaves)
    inner = st.deferred(lambda: schemas(depth - 1))
    few = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    members = {"properties": named, "required": st.lists(NAMES, unique=True, max_size=3)}
    rest = {"additionalProperties": st.booleans() | inner, "minProperties": count, "maxProperties": count}
    return st.one_of(
        *leaves,
        with_type("object", **members, **rest),
        with_type("object", **members, patternProperties=st.dictionaries(st.sampled_from(["^p", "[0-9]$"]), inner)),
        with_type("array", items=inner, prefixItems=few, minItems=count, maxItems=count),
        *(few.map(lambda branches, keyword=keyword: {keyword: branches}) for keyword in ("anyOf", "oneOf", "allOf")),
    )


ROOTS = schemas(2).map(
    lambda schema: {
        "$defs": {"shared": {"type": "object", "properties": {"again": {"$ref": "#/$defs/shared"}}}},
        **(schema if isinstance(schema, dict) else {"allOf": [schema]}),
    }
)


def check(schema: dict[str, object], text: str) -> None:
    """Fail if a text is not JSON or not valid."""
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    error = next(checker.iter_errors(json.loads(text)), None)
    if error is not None and error.validator == "format" and "0000-" in error.message:
        return  # RFC 3339 has a year 0, and datetime has none
    assert error is None, f"{text} was generated under {json.dumps(schema)}: {error.message}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = make_tiny_model("llama", "f32").write(tmp_path_factory.mktemp("models") / "tiny.gguf")
    with slm.load(path, backend="native") as model:
        yield model


def test_answers_of_a_random_model_under_random_schemas_validate(tiny: Model) -> None:
    """Every finished answer is valid; a bias towards closing tokens makes most answers finish."""
    counts = dict.fromkeys(("finished", "unfinished", "refused"), 0)
    closing = [i for i in range(tiny.vocab.size) if tiny.vocab.token_bytes(i) in (b'"', b"}", b"]", b":", b",", b"0")]
    bias = dict.fromkeys([*closing, *tiny.vocab.eog_ids], 4.0)
    session = tiny.session(n_ctx=512)
    session.append("JSON: ")
    start, seeds = session.mark(), iter(range(N_SCHEMAS))

    @SMALL
    @given(ROOTS)
    def play(schema: dict[str, object]) -> None:
        sampling = Sampling(temperature=1.0, seed=next(seeds), max_tokens=200, logit_bias=bias)
        try:
            answer = session.generate(sampling, constraint=JsonSchema(schema, compact=True)).run()
        except ConstraintError:
            counts["refused"] += 1
            return
        finally:
            session.rollback(start)
        ended = answer.finish_reason in (FinishReason.STOP, FinishReason.CONSTRAINT)
        counts["finished" if ended else "unfinished"] += 1
        if ended:
            check(schema, answer.text)

    play()
    assert counts["finished"] > N_SCHEMAS // 2, f"of {N_SCHEMAS} schemas: {counts}"


def test_random_bytes_under_random_schemas_validate() -> None:
    """Random bytes with white space, three times for each schema."""

    @SMALL
    @given(ROOTS)
    def play(schema: dict[str, object]) -> None:
        for seed in range(3):
            try:
                answer = walk(JsonSchema(schema), seed, likely=b'"}],:')
            except ConstraintError:
                return
            if answer is not None:
                check(schema, answer.decode())

    play()


def test_valid_values_are_accepted() -> None:
    """Values that jsonschema validates are accepted, in the supported notation and order of members."""
    counts = {"taken": 0}

    @settings(SMALL, max_examples=500)
    @given(st.data())
    def play(data: st.DataObject) -> None:
        schema, value = data.draw(schemas(1).filter(lambda one: isinstance(one, dict))), data.draw(VALUES)
        schema = json.loads(json.dumps(schema).replace('{"$ref": "#/$defs/shared"}', "{}"))
        fits = jsonschema.Draft202012Validator(schema).is_valid(value)
        text = json.dumps(value, ensure_ascii=False)
        # Unsupported on purpose: some notations of numbers, control characters, members in any order.
        unsaid = any(word in text for word in ("e", "-0", ".0", "\\u", "{", "\x7f")) or "format" in str(schema)
        if unsaid or not fits:
            return
        try:
            assert accepts(JsonSchema(schema), text), f"{text} is refused under {json.dumps(schema)}"
        except ConstraintError:
            return
        counts["taken"] += 1

    play()
    assert counts["taken"] > 20, counts  # the examples differ between versions of hypothesis


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_bounds_are_exact_decimals(kind: str) -> None:
    @settings(SMALL, max_examples=200)
    @given(st.data())
    def play(data: st.DataObject) -> None:
        bound = st.sampled_from([0, 1, -1, 2, 10, 0.5, 1.5, -0.5, 0.1, 0.01, -0.25, 100, 1.25])
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        schema = {"type": kind, **data.draw(optional(**dict.fromkeys(names, bound)))}
        near = [Decimal(repr(schema[name])) for name in names if name in schema] or [Decimal(0)]
        number = data.draw(st.sampled_from(near)) + Decimal(
            data.draw(st.sampled_from(["0", "0.1", "-0.01", "1", "-1"]))
        )
        try:
            accepted = accepts(JsonSchema(schema), str(number))
        except ConstraintError:
            return
        if accepted:
            check(schema, str(number))

    play()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, r"\$\.not: the keyword cannot be enforced"),
        ({"properties": {"a": {"uniqueItems": True}}}, r"\$\.properties\.a\.uniqueItems"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({"x-guidance": {"lenient": True}, "type": "string"}, "x-guidance"),
        ({"items": [{"type": "integer"}]}, r"\$\.items is"),
        ({"exclusiveMinimum": True, "minimum": 1}, "accepted: a number"),
        ({"type": "string", "format": "isbn"}, "isbn"),
        ({"$ref": "http://example.org/schema"}, "accepted: a JSON pointer"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"enum": []}, "[Uu]nsatisfiable"),
        ({"const": "a\x01"}, "control character"),
        ({"minLength": 3, "maxLength": 1, "type": "string"}, "[Uu]nsatisfiable"),
        (False, "[Uu]nsatisfiable"),
        (functools.reduce(lambda inner, _: {"items": inner}, range(80), {}), "nests deeper than 64"),
        ([], "accepted: a JSON schema"),
        ({"const": float("nan")}, "is not JSON"),
        ({"const": {1, 2}}, "is not a JSON value"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(schema: object, message: str) -> None:
    with pytest.raises(ConstraintError, match=message) as caught:
        compile(JsonSchema(schema), VOCAB)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_a_schema_may_be_text_or_a_pydantic_model() -> None:
    class Point(BaseModel):
        x: int
        y: int = 0

    assert JsonSchema(Point) == JsonSchema(Point.model_json_schema())
    assert accepts(JsonSchema(Point), '{"x": 1, "y": 2}')
    assert accepts(JsonSchema('{"type": "null"}'), "null")
    with pytest.raises(ConstraintError) as caught:
        JsonSchema('{\n  "type" "null"}')
    assert (caught.value.line, caught.value.column) == (2, 10)


def test_a_name_cannot_be_hidden_by_escapes() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(JsonSchema(schema), '{"b": "x"}')
    assert not accepts(JsonSchema(schema), r'{"b": 1, "\u0061": "x"}')


def chain(n: int, **rest: object) -> dict[str, object]:
    links = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}, **rest} for i in range(n)}
    return {"$defs": {**links, f"a{n}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


HOSTILE: dict[str, Callable[[], object]] = {
    "a long chain of references": lambda: chain(5000),
    "a chain within bounds": lambda: chain(100),
    "references that double": lambda: chain(30, prefixItems=[{"$ref": f"#/$defs/a{i}"} for i in range(30)]),
    "a reference to itself": lambda: {"$ref": "#"},
    "allOf itself": lambda: {
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}},
        "$ref": "#/$defs/a",
    },
    "counts beyond reason": lambda: {
        "type": "array",
        "minItems": 10**9,
        "items": {"type": "string", "minLength": 10**9},
    },
    "patterns of counts": lambda: {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    "patterns at odds": lambda: {"allOf": [{"type": "string", "pattern": f"^(.*a){{{i}}}"} for i in range(1, 20)]},
    "many branches": lambda: {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(1, 40)]},
    "many members": lambda: {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(8000)}},
    "many values": lambda: {"enum": [f"value {i}" for i in range(9000)]},
    "numbers without end": lambda: {"type": "number", "minimum": 1e-300, "maximum": 1e300},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_bounded(name: str) -> None:
    """Compiled and started, or refused, within seconds, in this process, so that a crash fails the test."""
    started = time.monotonic()
    try:
        rule = compile(JsonSchema(HOSTILE[name]()), VOCAB)
        for _ in range(20):
            rule.advance(int(rule.allowed.nonzero()[0][-1]))
    except ConstraintError as error:
        assert "\n" not in str(error)
    except slm.SlmError as error:
        assert "not complete" in str(error), "only the last token, EOG, may be allowed"
    assert time.monotonic() - started < 20, "the bound is several times the time on two busy cores"
