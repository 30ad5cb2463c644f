"""Qwen 2.5: ChatML with tools in XML, and a default system message."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import XML_CALL, XML_RESULT, XML_TOOLS
from slm_formatters.template import TemplateFormatter

TEMPLATE = (
    XML_CALL
    + """\
{{- '<|im_start|>system\\n' }}
{{- messages[0].content if messages[0].role == 'system' else 'You are Qwen, created by Alibaba Cloud. You are a helpful \
assistant.' }}
{%- if tools %}
    {{- '\\n\\n' -}}
"""
    + XML_TOOLS
    + """\
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {{- '\\n' + tool_call(call) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role in ('user', 'assistant') or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
"""
    + XML_RESULT.replace("OPEN", "'<|im_start|>user'").replace("CLOSE", "'<|im_end|>\\n'")
    + """\
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
)


def qwen2_5(source: FormatterSource) -> TemplateFormatter:
    """Qwen 2.5 and Qwen 2.5 Coder."""
    return family(source, "qwen2_5", TEMPLATE, stops=("<|im_end|>",))
