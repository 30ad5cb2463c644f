"""Damaged and costly constraints: schemas, grammars in two notations, and regular expressions."""

from __future__ import annotations

import json
import re
from typing import Any, TypeAlias

import numpy as np

from slm_core.constraints import Choice, Gbnf, JsonSchema, Lark, Regex, Spec, Triggered
from tests.hostile import json_mutations

Rng: TypeAlias = np.random.Generator

SCHEMAS: tuple[Any, ...] = (
    {"type": "integer", "minimum": -5, "maximum": 1000, "multipleOf": 3},
    {"type": "number", "minimum": 0.25, "exclusiveMaximum": 1e6, "multipleOf": 0.25},
    {"type": "string", "minLength": 2, "maxLength": 40, "pattern": "^[a-z]+(-[0-9]{2,4})?$"},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5, "prefixItems": [{"const": "a"}]},
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "tags": {"type": "array"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"anyOf": [{"enum": ["red", "green", 3, None]}, {"type": "object", "patternProperties": {"^x": {"type": "null"}}}]},
    {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
    {"allOf": [{"type": "object", "minProperties": 1}, {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}]},
)
_KEYWORDS = (
    *("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems"),
    *("maxItems", "minProperties", "maxProperties", "pattern", "format", "enum", "const", "required", "$ref", "anyOf"),
    *("allOf", "oneOf", "items", "prefixItems", "properties", "patternProperties", "additionalProperties", "type"),
)
_KEYWORD_VALUES = (
    *(2**31, 2**31 - 1, 2147483629, 99991, 1e-9, 0.1, 1e9, 10**9, 10**18, 123456789.123, 0, -1, 1 << 20, 65537),
    *("(a|aa)*b", "(a{1000}){1000}", ".{0,100000}", "[^a]{5000}", "(?i)\\w{500}", "((((a*)*)*)*)*", "\\p{L}{1,2000}"),
    *(
        "email",
        "uuid",
        "ipv6",
        "uri",
        "#",
        "#/$defs/node",
        "#/$defs",
        "object",
        "string",
        "integer",
        ["string", "null"],
    ),
    *(
        {"type": "string"},
        {"$ref": "#"},
        {"not": {}},
        [{"$ref": "#"}, {"$ref": "#"}],
        [f"option {i}" for i in range(300)],
    ),
)
GBNF = (
    'root ::= "yes" | "no" ws\nws ::= [ \\t\\n]*\n',
    'root ::= object\nobject ::= "{" ws pair ("," ws pair)* "}"\npair ::= string ":" ws value\n'
    'string ::= "\\"" [^"\\\\]{1,20} "\\""\nvalue ::= string | [0-9]{1,3} | object\nws ::= " "?\n',
    'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [a-z]+ | "(" expr ")"\n',
)
LARK = (
    'start: "a" item+\nitem: WORD | NUMBER\nWORD: /[a-z]{1,8}/\nNUMBER: /[0-9]+/\n%ignore / /\n',
    'start: object\nobject: "{" [pair ("," pair)*] "}"\npair: STRING ":" (object | STRING)\nSTRING: /"[^"]*"/\n',
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}\n',
    "start: free end\nfree[capture, max_tokens=5]: /(?s:.*)/\nend[lazy]: /.*END/\n",
)
REGEX = ("[a-z]+@[a-z]+\\.(com|org)", "(yes|no){1,3}", "\\d{4}-\\d{2}-\\d{2}", "(?s:.{0,50})x", "a*b?c+|[^x]{3}")
_PIECES = (
    *(
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "*",
        "+",
        "?",
        "|",
        "\\",
        "^",
        "&",
        "~",
        '"',
        "/",
        ":",
        "::=",
        "\n",
        "\0",
        "%",
        "@",
    ),
    *(
        "{1000}",
        "{0,100000}",
        "{1000000000}",
        "{2147483648}",
        "{5000,}",
        "(?i)",
        "\\w",
        "\\p{L}",
        ".",
        "[^a]",
        "(?s:.*)",
    ),
    *(
        " root ",
        " start ",
        " ws ",
        "%ignore /x*/\n",
        "%json {}",
        "[lazy]",
        "[max_tokens=0]",
        "<[0-9]>",
        "\ud800",
        "\u2028",
    ),
    *("%regex {}", "(((((", ")))))", "a" * 500, "\\x{110000}", "\\u{ffff}", "[\U0001f600-\U0001f64f]", "--", "%%"),
)
_NUMBER = re.compile(r"\d+")


def mutated(rng: Rng) -> Spec:
    """A spec to compile; raises ConstraintError if the constructor of the spec refuses it."""
    match int(rng.choice(6, p=[0.4, 0.2, 0.2, 0.14, 0.03, 0.03])):
        case 0:
            return JsonSchema(_schema(rng), compact=bool(rng.random() < 0.3))
        case 1:
            return Gbnf(_text(rng, GBNF[rng.integers(len(GBNF))]))
        case 2:
            return Lark(_text(rng, LARK[rng.integers(len(LARK))]))
        case 3:
            return Regex(_text(rng, REGEX[rng.integers(len(REGEX))]))
        case 4:
            return Choice([_text(rng, REGEX[0]) for _ in range(int(rng.choice([1, 2, 2000])))])
        case _:
            return Triggered(JsonSchema(_schema(rng)), _text(rng, "<call>"))


def _schema(rng: Rng) -> Any:
    """A schema, or its text, with contradictory or costly keywords."""
    schema = SCHEMAS[rng.integers(len(SCHEMAS))]
    if rng.random() < 0.1:
        divisors = [{"type": "integer", "multipleOf": int(2 ** rng.uniform(0, 34))} for _ in range(2)]
        schema = divisors[0] if rng.random() < 0.5 else {("allOf", "anyOf")[rng.integers(2)]: divisors}
    if rng.random() < 0.6:
        added = {_KEYWORDS[rng.integers(len(_KEYWORDS))]: _value(rng) for _ in range(1 + int(rng.integers(2)))}
        schema = {**schema, **added}
    if rng.random() < 0.5:
        schema = json_mutations.mutated(rng, schema, _KEYWORD_VALUES)
    return _text(rng, json.dumps(schema)) if rng.random() < 0.05 else schema


def _value(rng: Rng) -> Any:
    if rng.random() < 0.3:
        return int(rng.integers(1, 2 ** int(rng.integers(2, 62))))
    return _KEYWORD_VALUES[rng.integers(len(_KEYWORD_VALUES))]


def _text(rng: Rng, text: str) -> str:
    for _ in range(1 + int(rng.integers(3))):
        at = int(rng.integers(len(text) + 1))
        match int(rng.integers(7)):
            case 0 | 1:
                text = text[:at] + _PIECES[rng.integers(len(_PIECES))] + text[at:]
            case 2:
                text = text[:at] + text[at + int(rng.integers(1, 6)) :]
            case 3:
                text = text[:at] + text[int(rng.integers(len(text) + 1)) :] + text[at:]
            case 4:
                number = str(int(rng.choice([0, 1, 7, 1000, 50_000, 2**31, 10**12])))
                text = _NUMBER.sub(number, text, count=int(rng.integers(1, 3)))
            case 5:
                text = text[:at] + "(" * int(rng.choice([3, 60, 3000])) + text[at:]
            case _:
                text = text.replace(*(text[i : i + 2] or "a" for i in rng.integers(len(text) + 1, size=2).tolist()))
        text = text[:300_000]
    return text
