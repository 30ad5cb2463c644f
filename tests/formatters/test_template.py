"""The formatter around a template: messages, options, reasoning."""

from __future__ import annotations

import tracemalloc
from datetime import datetime

import pytest

from slm_core.errors import TemplateError
from slm_core.hookspecs import Entry
from slm_core.plugins import FormatterSource, Registry
from slm_core.types import Message, Role, Segment, ToolCall
from slm_formatters import plugin
from slm_formatters.template import TemplateFormatter

ECHO = """\
{{- bos_token -}}
{%- for m in messages -%}
<{{ m.role }}{{ ' ' + m.name if m.name }}{{ ' ' + m.tool_call_id if m.tool_call_id }}>
{{- m.reasoning_content or '' }}|{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor -%}
{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- if add_generation_prompt %}<go>{{ '<think>\\n' if enable_thinking }}{% endif -%}
{{- date }}"""
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def formatter(template: str = ECHO) -> TemplateFormatter:
    return TemplateFormatter(FormatterSource(template=template, bos_token="<s>", eos_token="</s>"))


def text(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def test_the_template_receives_all_fields_of_messages() -> None:
    call = ToolCall("get_weather", {"city": "Rome"}, id="c1")
    messages = [
        Message(Role.SYSTEM, "Be terse."),
        Message(Role.ASSISTANT, "", reasoning="hm", tool_calls=[call]),
        Message(Role.TOOL, "21", name="get_weather", tool_call_id="c1"),
    ]
    expected = '<s><system>|Be terse.<assistant>hm|c1get_weather{"city": "Rome"}<tool get_weather c1>|21<go>'
    assert text(formatter().render(messages)) == expected
    assert text(formatter().render(messages[:1], add_generation_prompt=False)) == "<s><system>|Be terse."
    assert text(formatter().render([], tools=[WEATHER])).startswith('<s>[{"type": "function", "function":')


def test_segments_separate_content_from_control_text() -> None:
    segments = formatter().render([Message(Role.USER, "</s>hi")], add_generation_prompt=False)
    assert segments == [Segment("<s><user>|", control=True), Segment("</s>hi", control=False)]


def test_template_options_work_or_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert text(formatter().render([], date="today")).endswith("<go>today")
    assert not caplog.text
    with_tools = formatter()
    for _ in range(3):
        assert text(with_tools.render([], dates="today")).endswith("<go>")
    assert caplog.text.count("does not read 'dates' (it reads: date, enable_thinking)") == 1
    without_tools = formatter("{{ messages }}")
    assert text(without_tools.render([], tools=[WEATHER])) == "[]"
    assert "does not read 'tools'" in caplog.text
    assert (with_tools.reads_tools, without_tools.reads_tools) == (True, False)


def test_what_is_logged_of_unknown_options_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a client could forge lines of the log, or fill the log and the memory."""
    template = formatter()
    template.render([], **{'x\n{"event": "request"}': 1, "\x1b[31mred": 1})
    assert caplog.messages[0].startswith(r"the chat template does not read '\x1b[31mred'")
    assert caplog.messages[1].startswith(r"""the chat template does not read 'x\n{"event": "request"}'""")
    tracemalloc.start()
    for i in range(300):
        template.render([], **{f"{i:04d}" + "x" * 100_000: 1})
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(caplog.messages) == 100
    assert max(map(len, caplog.messages)) < 200
    assert kept_bytes < 1_000_000


def test_thinking_sets_the_switch_of_the_template() -> None:
    assert text(formatter().render([], thinking=True)).endswith("<go><think>\n")
    assert text(formatter().render([], thinking=False)).endswith("<go>")
    assert text(formatter("{{ 'yes' if thinking }}").render([], thinking=True)) == "yes"
    with pytest.raises(TemplateError, match="cannot be asked for reasoning"):
        formatter("{{ messages }}").render([], thinking=False)
    with pytest.raises(TemplateError, match="give one"):
        formatter().render([], thinking=True, enable_thinking=True)


def test_answers_begin_with_reasoning_if_the_prompt_begins_it() -> None:
    for thinking, reasoning, content in ((True, "a", "b"), (None, None, "a</think>b"), (False, None, "a</think>b")):
        parser = formatter().stream_parser(thinking=thinking)
        parser.feed("a</think>b")
        message = parser.finish()[1]
        assert (message.reasoning, message.content) == (reasoning, content), f"thinking={thinking}"
    with pytest.raises(TemplateError, match="cannot be asked for reasoning"):
        formatter("{{ messages }}").stream_parser(thinking=True)


def test_parse_finds_reasoning_that_the_prompt_may_have_begun() -> None:
    assert formatter().parse("a</think>b") == Message(Role.ASSISTANT, "b", reasoning="a")
    assert formatter("{{ messages }}").parse("a</think>b") == Message(Role.ASSISTANT, "a</think>b")
    always = formatter("{% if not messages %}{{ raise_exception('none') }}{% endif %}<go><think>\n")
    assert always.parse("a</think>b") == Message(Role.ASSISTANT, "b", reasoning="a")


def test_a_refusal_contains_the_message_of_the_template() -> None:
    with pytest.raises(TemplateError, match="refused the messages: System role not supported"):
        formatter("{{ raise_exception('System role\n  not supported') }}").render([])
    with pytest.raises(TemplateError, match=r"failed in line 3: .*no attribute"):
        formatter("\n\n{{ messages.x.y }}").render([])
    with pytest.raises(TemplateError, match=r"not valid jinja: line 2: "):
        formatter("\n{% if %}")


def test_the_clock_can_be_set() -> None:
    source = FormatterSource(template="{{ strftime_now('%d %B %Y') }}", now=datetime(2026, 1, 15))
    assert text(TemplateFormatter(source).render([])) == "15 January 2026"


def test_the_registry_creates_formatters_by_name() -> None:
    registry = Registry({"formatters": plugin})
    assert registry.formatter("template", FormatterSource(template=ECHO)).name == "template of the model file"
    assert registry.formatter("chatml", FormatterSource()).name == "chatml"
    with pytest.raises(TemplateError, match="no chat template of its own"):
        registry.formatter("template", FormatterSource())
    assert all(isinstance(entry, Entry) for entry in plugin.slm_formatters())
