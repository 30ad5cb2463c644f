"""Free text before a marker, compared byte by byte with a plain definition; tool calls within free text."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable

import jsonschema
import numpy as np
import pytest

import slm_core as slm
from constraints.walking import VOCAB, accepts, walk
from scripted import CONTROLS, END, START
from slm_core.constraints import (
    AfterThinking,
    AnyJson,
    AnyOf,
    Choice,
    JsonSchema,
    Lark,
    NoToolCalls,
    Spec,
    ToolCalls,
    Triggered,
    compile,  # noqa: A004  (as in re.compile)
)
from slm_core.constraints.toolcalls import (
    HERMES_CALLS,
    JSON_CALLS,
    LLAMA3_CALLS,
    MISTRAL_CALLS,
    MISTRAL_NAMED_CALLS,
)
from slm_core.errors import ConstraintError
from slm_core.tokenization import GgufVocab
from slm_core.types import CallFormat

OPTIONS = ("yes", "yeah", "no<<ab", "é")


def is_text(data: bytes) -> bool:
    """Whether the bytes are a prefix of valid UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def may_begin_and_end(generated: bytes, marker: bytes) -> tuple[bool, bool]:
    """Whether a text with one of the options after ``marker`` may begin with these bytes, and may end with them."""
    before, separator, after = generated.partition(marker)
    if not separator:
        return is_text(before), is_text(before) and before.decode("utf-8", "replace").encode() == before
    options = [option.encode() for option in OPTIONS]
    return is_text(before + b"a") and any(option.startswith(after) for option in options), after in options


@pytest.mark.parametrize("marker", ["<<ab", "aab", "é", "\n"])
@pytest.mark.parametrize("required", [False, True])
def test_markers_in_random_text(marker: str, required: bool) -> None:
    spec, draw, data = Triggered(Choice(OPTIONS), marker, required), random.Random(1), marker.encode()
    likely = [*data, *data, *b"yesno<ab", 0xC3, 0xA9, 0xF0, 0x9F]
    for _ in range(12):
        rule, generated = compile(spec, VOCAB), b""
        for _ in range(25):
            expected = [may_begin_and_end(generated + bytes([byte]), data)[0] for byte in range(256)]
            np.testing.assert_array_equal(rule.allowed[:256], expected, err_msg=f"after {generated!r}")
            ends = may_begin_and_end(generated, data)[1] and (data in generated or not required)
            assert rule.is_complete == rule.allowed[END] == ends, f"after {generated!r}"
            assert rule.allowed[START] == (data not in generated and is_text(generated + b"a")), (
                "control tokens are allowed in free text"
            )
            choices = [byte for byte in likely if rule.allowed[byte]] or np.flatnonzero(rule.allowed[:256]).tolist()
            if not choices:
                break
            byte = draw.choice(choices)
            rule.advance(byte)
            generated += bytes([byte])


def test_cached_masks_equal_those_of_a_new_parser(vocab: Callable[[str], GgufVocab]) -> None:
    tokens, draw = vocab("gpt-2"), random.Random(2)
    texts = ["<tool_call", "<tool", "_call>", " < 3", "word", "\n", "é", "<", "🚀", "<tool_call><"]
    spec = Triggered(AnyJson(), "<tool_call>")
    for _ in range(20):
        ids = tokens.encode("".join(draw.choices(texts, k=6)), add_special=False, parse_special=False)
        rule = compile(spec, tokens)
        for token in ids:
            if not rule.allowed[token]:
                break
            rule.advance(token)
            fresh = compile(spec, tokens)
            fresh._free = None
            for taken in rule.tokens:
                fresh.advance(taken)
            np.testing.assert_array_equal(rule.allowed, fresh.allowed, err_msg=f"after {tokens.decode(rule.tokens)!r}")


def test_a_marker_may_be_a_control_token() -> None:
    end = 256 + CONTROLS.index("</think>")
    rule = compile(AfterThinking(Choice(["ok"]), "</think>"), VOCAB)
    assert rule.allowed[end] and not rule.is_complete
    for token in (*b"hm ", START, *b"</think"):
        rule.advance(token)
    assert rule.allowed[ord("x")]
    assert not rule.allowed[ord(">")], "the marker must not be spelled with letters"
    rule.advance(end)
    for byte in b"\n\n":
        rule.advance(byte)
    assert set(np.flatnonzero(rule.allowed).tolist()) == {*b"o \t\r\n"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            },
        },
    },
    {"name": "weather_now"},
]


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (
            HERMES_CALLS,
            [
                "hello",
                '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
                'a <tool_call>{"name":"weather_now","arguments":{}}</tool_call>\n<tool_call>{"name":"weather_now",'
                '"arguments":{}}</tool_call> b',
            ],
            [
                "<tool_call>",
                "<tool_call>hello</tool_call>",
                '<tool_call>{"name":"wheather","arguments":{}}</tool_call>',
                '<tool_call>{"name":"weather","arguments":{}}</tool_call>',
                '<tool_call>{"name":"weather","arguments":{"city":"Rome","days":0}}</tool_call>',
                '<tool_call>{"name":"weather_now","arguments":{"city":"Rome"}}</tool_call>',
                '<tool_call>{"name":"weather_now","arguments":{}}',
            ],
        ),
        (
            LLAMA3_CALLS,
            ["hello {", '{"name": "weather", "parameters": {"city": "Oslo"}}', ""],
            ['{"name": "weather"}', "{", '{"name": "weather", "parameters": {"city": "Oslo"}} and more', "[1]"],
        ),
        (JSON_CALLS, ['{"name": "weather_now", "arguments": {}}'], ['{"name": "weather_now", "parameters": {}}']),
        (
            MISTRAL_CALLS,
            [
                "hello",
                '[TOOL_CALLS][{"name": "weather_now", "arguments": {}}]',
                '[TOOL_CALLS] [{"name": "weather_now", "arguments": {}}, {"name": "weather_now", "arguments": {}}]',
            ],
            ["[TOOL_CALLS]", "[TOOL_CALLS][]", '[TOOL_CALLS]{"name": "weather_now", "arguments": {}}'],
        ),
        (
            MISTRAL_NAMED_CALLS,
            ['[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]weather_now[ARGS]{}'],
            ['[TOOL_CALLS]weather_now{"city": "Rome"}', "[TOOL_CALLS]weather[ARGS]{}"],
        ),
        (
            CallFormat("<c>", "</c>", style="named", before="f:", between="|", section=("<cs>", "</cs>"), repeats=True),
            [
                "hi",
                "so <cs><c>f:weather_now|{}</c></cs>",
                "<cs>\n<c>f:weather_now|{}</c>\n<c>f:weather_now|{}</c></cs>",
            ],
            ["<cs></cs>", "<cs><c>f:weather_now|{}</c>", "<cs><c>weather_now|{}</c></cs>"],
        ),
    ],
    ids=["hermes", "llama3", "json", "mistral", "mistral v11", "sections"],
)
def test_calls_of_each_format(form: CallFormat, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert accepts(ToolCalls(TOOLS, form), text), f"refused: {text}"
        is_call = text.startswith(form.section[0] or form.begin or "{") and text[-1] in ">]}"
        assert accepts(ToolCalls(TOOLS, form, required=True), text) == is_call
        opening = form.section[0] or form.begin
        is_free = opening not in text if opening else not text.startswith(("{", "["))
        assert accepts(NoToolCalls(form), text) == is_free, f"without calls: {text}"
    for text in wrong:
        assert not accepts(ToolCalls(TOOLS, form), text), f"accepted: {text}"
    either = AnyOf((ToolCalls(TOOLS, form, required=True), JsonSchema(PERSON)))
    for text in (*right, *wrong, '{"age": 36}', '{"age": 3.5}', ""):
        expected = accepts(ToolCalls(TOOLS, form, required=True), text) or text == '{"age": 36}'
        assert accepts(either, text) == expected, f"calls or a person: {text}"


def test_random_calls_are_parsed_by_the_formatter_and_valid() -> None:
    with slm.load(slm.demo_model_path(), backend="native") as model:
        formatter = model.formatter
        form, n_calls = formatter.call_format, 0
        for seed in range(60):
            text = walk(ToolCalls(TOOLS, form, required=seed % 2 == 0), seed, likely=b'<tool_call>"}]/', n_steps=800)
            if text is None:
                continue
            message = formatter.parse(text.decode(), tools=[tool.get("function", tool) for tool in TOOLS])
            assert not message.malformed_calls, text
            assert bool(message.tool_calls) == (b"<tool_call>" in text)
            for call in message.tool_calls:
                n_calls += 1
                assert call.name in ("weather", "weather_now")
                if call.name == "weather":
                    jsonschema.validate(dict(call.arguments), TOOLS[0]["function"]["parameters"])
        assert n_calls > 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Triggered(AnyJson(), ""), "marker is empty"),
        (lambda: Triggered("json", "x"), "accepted: a spec"),
        (lambda: AfterThinking(AnyJson(), 3), "accepted: a text"),
        (lambda: ToolCalls([], HERMES_CALLS), "at least one"),
        (lambda: ToolCalls([{"name": "a"}, {"name": "a"}], HERMES_CALLS), "different names"),
        (lambda: ToolCalls([{"parameters": {}}], HERMES_CALLS), "with a name"),
        (lambda: ToolCalls([{"name": "a"}], {"start": "x"}), "call format"),
        (lambda: ToolCalls([{"name": "a"}], CallFormat("", "x")), "no other text around"),
        (lambda: ToolCalls([{"name": "a"}], CallFormat("x", style="xml")), "accepted styles"),
        (lambda: Choice([]), "at least one text"),
        (lambda: AnyOf([]), "at least one spec"),
        (lambda: AnyOf([AnyJson(), "x"]), "at least one spec"),
        (lambda: AnyOf(AnyJson()), "at least one spec"),
        (lambda: Choice(["a", "a"]), "all different"),
        (lambda: Lark(7), "accepted: a text"),
        (lambda: Choice(["\ud800"]), "unpaired surrogate"),
    ],
)
def test_a_contradictory_spec_is_refused(make: Callable[[], Spec], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        make()


def test_any_of_has_a_limit() -> None:
    many = AnyOf([Choice(["a"])] * 1001)
    with pytest.raises(ConstraintError, match="1001 rules of a grammar"):
        compile(many, VOCAB)


def test_specs_survive_json() -> None:
    from slm_core.constraints import spec_from_dict

    calls, none = ToolCalls(TOOLS, MISTRAL_CALLS), NoToolCalls(MISTRAL_CALLS)
    for spec in (
        Triggered(calls, "x"),
        none,
        AfterThinking(Choice(["a"])),
        Lark('start: "a"'),
        AnyOf([none, AnyOf([calls])]),
    ):
        assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
