"""The answer format is detected in unknown templates: each template here writes calls in another way."""

from __future__ import annotations

import pytest

from formatters.parsers.helpers import answer
from slm_core.errors import TemplateError
from slm_core.plugins import FormatterSource
from slm_core.types import CallFormat, Message, Role, ToolCall
from slm_formatters.template import TemplateFormatter

FRAME = """\
{%- for m in messages -%}
<|turn|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content %}THOUGHT{% endif -%}
{{ m.content }}
{%- if m.tool_calls %}CALLS{% endif -%}
<|stop|>
{% endfor -%}
{%- if tools %}{{ tools | length }} tools{% endif -%}
{%- if add_generation_prompt %}<|turn|>assistant
{% endif -%}"""
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}BODY{% endfor %}"
JSON_ARGUMENTS = "{{ f.arguments | tojson }}"
PAIRS = "{% for k, v in f.arguments.items() %}PAIR{% endfor %}"
TEXT = "{{ v if v is string else v | tojson }}"
PYTHON = "{% for k, v in f.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %}"
PYTHON_LIST = (
    "[{% for c in m.tool_calls %}{% set f = c.function %}{{ ', ' if not loop.first }}{{ f.name }}("
    + PYTHON
    + "){% endfor %}]"
)
LISTED = (
    "[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{"KEY": {{ c.function.name | tojson }}, "ARGS": {{ c.function.arguments | tojson }}}{% endfor %}]'
)

MANNERS = {
    "list between markers": "<|calls|>" + LISTED.replace("KEY", "name").replace("ARGS", "arguments") + "<|/calls|>",
    "list after a marker": "[CALLS]" + LISTED.replace("KEY", "name").replace("ARGS", "arguments"),
    "list without markers": LISTED.replace("KEY", "name").replace("ARGS", "parameters"),
    "keys of its own": "<act>" + LISTED.replace("KEY", "tool").replace("ARGS", "tool_input") + "</act>",
    "list in a code block": "Action: ```json\n"
    + LISTED.replace("KEY", "tool_name").replace("ARGS", "parameters")
    + "\n```",
    "calls as they were given": "<calls>{{ m.tool_calls | tojson }}</calls>",
    "one object a line": EACH.replace("BODY", '{"name": {{ f.name | tojson }}, "arguments": ' + JSON_ARGUMENTS + "}\n"),
    "objects between markers": EACH.replace(
        "BODY", '\n<fn>\n{"name": {{ f.name | tojson }}, "arguments": ' + JSON_ARGUMENTS + "}\n</fn>"
    ),
    "name apart from JSON": EACH.replace("BODY", "<|fn|>{{ f.name }}<|args|>" + JSON_ARGUMENTS + "<|end_fn|>"),
    "name apart from JSON, no end": EACH.replace("BODY", "[CALL]{{ f.name }}[WITH]" + JSON_ARGUMENTS),
    "name and id": EACH.replace("BODY", "<|fn|>{{ c.id }}<|of|>{{ f.name }}<|args|>" + JSON_ARGUMENTS + "<|end_fn|>"),
    "section of names and JSON": "<|fns|>"
    + EACH.replace("BODY", "<|fn|>{{ f.name }}\n" + JSON_ARGUMENTS + "<|end_fn|>")
    + "<|/fns|>",
    "JSON in parentheses": "<do>" + EACH.replace("BODY", "{{ f.name }}(" + JSON_ARGUMENTS + ")\n") + "</do>",
    "word before a list": " functools" + LISTED.replace("KEY", "name").replace("ARGS", "arguments"),
    "words for name and arguments": EACH.replace("BODY", "\nAction: {{ f.name }}\nAction Input: " + JSON_ARGUMENTS),
    "name and colon": EACH.replace("BODY", "\nCALL {{ f.name }}: " + JSON_ARGUMENTS + "\n"),
    "words before name and JSON": EACH.replace("BODY", "\n✿FUNCTION✿: {{ f.name }}\n✿ARGS✿: " + JSON_ARGUMENTS),
    "attributes": EACH.replace("BODY", '\n<call fn="{{ f.name }}">' + JSON_ARGUMENTS + "</call>"),
    "tagged values": EACH.replace(
        "BODY", "<call>{{ f.name }}\n" + PAIRS.replace("PAIR", "<k>{{ k }}</k>\n<v>" + TEXT + "</v>\n") + "</call>\n"
    ),
    "values on their own lines": EACH.replace(
        "BODY", "\n<fn={{ f.name }}>\n" + PAIRS.replace("PAIR", "<p={{ k }}>\n" + TEXT + "\n</p>\n") + "</fn>"
    ),
    "section of tagged values": "<calls>\n"
    + EACH.replace(
        "BODY", '<do name="{{ f.name }}">\n' + PAIRS.replace("PAIR", '<p name="{{ k }}">' + TEXT + "</p>\n") + "</do>\n"
    )
    + "</calls>",
    "values that say whether they are texts": EACH.replace(
        "BODY",
        '\n<do name="{{ f.name }}">\n'
        + PAIRS.replace("PAIR", "<p name=\"{{ k }}\" text=\"{{ 'yes' if v is string else 'no' }}\">" + TEXT + "</p>\n")
        + "</do>",
    ),
    "elements named by keys": EACH.replace(
        "BODY", '\n<do name="{{ f.name }}">' + PAIRS.replace("PAIR", "<{{ k }}>" + TEXT + "</{{ k }}>") + "</do>"
    ),
    "Python in a list": f"<|py|>{PYTHON_LIST}<|/py|>",
    "Python without markers": PYTHON_LIST,
    "Python, a call a line": "<calls>" + EACH.replace("BODY", "{{ f.name }}(" + PYTHON + ")\n") + "</calls>",
    "Python in a code block": "```tool_code\n" + EACH.replace("BODY", "{{ f.name }}(" + PYTHON + ")\n") + "```",
    "bare keys": EACH.replace(
        "BODY",
        "<|do|>{{ f.name }}{{ '{' }}"
        "{% for k, v in f.arguments.items() %}{{ ',' if not loop.first }}{{ k }}:"
        "{{ '<q>' ~ v ~ '<q>' if v is string else v | tojson }}{% endfor %}}<|done|>",
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"}},
            },
        },
    }
    for name in ("get_weather", "search")
]
CALLS = [
    ToolCall("get_weather", {"city": 'Saint-Étienne, "là" {}', "days": 3, "zip": "042000"}),
    ToolCall("search", {"city": "x = [1, 2]"}),
]


def formatter(manner: str = "", thought: str = "", **source: object) -> TemplateFormatter:
    template = FRAME.replace("CALLS", MANNERS.get(manner, manner)).replace("THOUGHT", thought)
    return TemplateFormatter(FormatterSource(template, **source))  # type: ignore[arg-type]


def written_answer(template_formatter: TemplateFormatter, message: Message) -> str:
    question = Message(Role.USER, "x")
    prompt, whole = (
        "".join(
            segment.text for segment in template_formatter.render(messages, tools=TOOLS, add_generation_prompt=opens)
        )
        for messages, opens in (([question], False), ([question, message], False))
    )
    start = prompt.removesuffix("2 tools")
    return whole.removeprefix(start).removeprefix("<|turn|>assistant\n").removesuffix("2 tools")


@pytest.mark.parametrize("manner", MANNERS)
def test_calls_are_parsed_back(manner: str) -> None:
    template_formatter = formatter(manner)
    for calls in (CALLS[:1], CALLS):
        text = written_answer(template_formatter, Message(Role.ASSISTANT, "", tool_calls=calls))
        message = template_formatter.parse(text, tools=TOOLS)
        assert message == answer("", None, *calls), f"{template_formatter.parser}: {text!r}"


@pytest.mark.parametrize("manner", MANNERS)
def test_calls_directly_after_a_word_are_parsed_back(manner: str) -> None:
    """Like "assistant:<call>", where only the prompt separates the word from the answer."""
    template = FRAME.replace("<|turn|>{{ m.role }}\n", "{{ m.role }}:").replace("<|turn|>assistant\n", "assistant:")
    template_formatter = TemplateFormatter(
        FormatterSource(template.replace("CALLS", MANNERS[manner]).replace("THOUGHT", ""))
    )
    for calls in (CALLS[:1], CALLS):
        segments = template_formatter.render(
            [Message(Role.ASSISTANT, "", tool_calls=calls)], add_generation_prompt=False
        )
        text = "".join(segment.text for segment in segments).removeprefix("assistant:")
        assert template_formatter.parse(text, tools=TOOLS) == answer("", None, *calls), (
            f"{template_formatter.parser}: {text!r}"
        )


@pytest.mark.parametrize("manner", [name for name in MANNERS if "without" not in name and "one object" not in name])
def test_content_before_calls_stays(manner: str) -> None:
    template_formatter = formatter(manner)
    text = written_answer(template_formatter, Message(Role.ASSISTANT, "Let me look.", tool_calls=CALLS))
    assert template_formatter.parse(text, tools=TOOLS) == answer("Let me look.", None, *CALLS), (
        f"{template_formatter.parser}: {text!r}"
    )


@pytest.mark.parametrize(
    ("manner", "text"),
    [
        ("word before a list", "Import functools, then call functools.reduce.\n"),
        ("words for name and arguments", "Action: take a break.\nAction!"),
        ("words before name and JSON", "Not a ✿FUNCTION✿: it is a word."),
    ],
)
def test_words_that_begin_calls_may_occur_in_sentences(manner: str, text: str) -> None:
    assert formatter(manner).parse(text) == answer(text)


THOUGHTS = {
    "tags": "<reason>{{ m.reasoning_content }}</reason>\n",
    "tokens": "<|begin_thought|>\n{{ m.reasoning_content }}\n<|end_thought|>",
    "words": "My thoughts: {{ m.reasoning_content }}\n[ANSWER FOLLOWS]\n",
}


@pytest.mark.parametrize("thought", THOUGHTS)
def test_reasoning_is_parsed_back(thought: str) -> None:
    template_formatter = formatter("objects between markers", THOUGHTS[thought])
    for content, calls in (("Yes.", []), ("", CALLS), ("Yes.\n\nNo.", CALLS)):
        message = Message(Role.ASSISTANT, content, reasoning="So <so>,\nthen.", tool_calls=calls)
        assert template_formatter.parse(written_answer(template_formatter, message), tools=TOOLS) == message


def test_reasoning_begun_by_the_prompt_is_parsed() -> None:
    template_formatter = TemplateFormatter(
        FormatterSource(
            FRAME.replace("THOUGHT", THOUGHTS["tags"])
            .replace("CALLS", "")
            .replace("<|turn|>assistant\n{% endif", "<|turn|>assistant\n<reason>{% endif")
        )
    )
    assert template_formatter.reasoning_end() == "</reason>"
    parser = template_formatter.stream_parser()
    parser.feed("hm</reason>Yes")
    assert parser.finish()[1] == template_formatter.parse("hm</reason>Yes") == answer("Yes", "hm")


def test_markers_determine_the_format_of_a_template_without_calls() -> None:
    template_formatter = TemplateFormatter(
        FormatterSource(
            "Write <function=NAME><parameter=K> in <tool_call></tool_call>."
            "</function></parameter>{{ messages[0].content }}"
        )
    )
    assert template_formatter.parser == "qwen3_coder"
    assert TemplateFormatter(FormatterSource("<tool_call></tool_call>{{ messages }}")).parser == "hermes"


def test_unknown_formats_are_content() -> None:
    template_formatter = TemplateFormatter(FormatterSource("{{ messages[0].content }}"))
    assert (template_formatter.parser, template_formatter.call_format) == ("none", None)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert template_formatter.parse(text) == answer(text)


def test_a_parser_can_be_chosen_by_name() -> None:
    template_formatter = formatter("list between markers", parser="mistral", reasoning=("<r>", "</r>"))
    assert template_formatter.parser == "mistral"
    assert template_formatter.parse('<r>hm</r>[TOOL_CALLS]f[ARGS]{"a": 1}') == answer("", "hm", ToolCall("f", {"a": 1}))
    with pytest.raises(TemplateError, match=r"unknown parser 'x' .*hermes.*mistral"):
        formatter("", parser="x").parse("")
    with pytest.raises(TemplateError, match="by headers, not by bounds"):
        formatter("", parser="harmony", reasoning=("<r>", "</r>")).parse("")
    with pytest.raises(TemplateError, match="accepted: two texts that are not empty"):
        formatter("", parser="hermes", reasoning=("<r>", "")).parse("")


CALL_FORMATS = {
    "objects between markers": CallFormat("<fn>", "</fn>", repeats=True),
    "list between markers": CallFormat("<|calls|>", "<|/calls|>", "array"),
    "keys of its own": CallFormat("<act>", "</act>", "array", "tool", "tool_input"),
    "list without markers": CallFormat("", "", "array", arguments_key="parameters"),
    "name apart from JSON": CallFormat("<|fn|>", "<|end_fn|>", "named", between="<|args|>", repeats=True),
    "calls as they were given": None,
    "tagged values": None,
    "Python in a list": None,
}


@pytest.mark.parametrize("manner", CALL_FORMATS)
def test_call_formats_describe_the_written_calls(manner: str) -> None:
    assert formatter(manner).call_format == CALL_FORMATS[manner]
