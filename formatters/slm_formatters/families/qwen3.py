"""Qwen 3: ChatML with tools in XML and reasoning, which is kept only after the last question."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import XML_CALL, XML_RESULT, XML_TOOLS
from slm_formatters.template import TemplateFormatter

TEMPLATE = (
    XML_CALL
    + """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content + '\\n\\n' if messages[0].role == 'system' -}}
"""
    + XML_TOOLS
    + """\
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=messages | length - 1) %}
{%- for message in messages | reverse %}
    {%- if message.role == 'user' and not (message.content.startswith('<tool_response>') and \
message.content.endswith('</tool_response>')) %}
        {%- set ns.question = loop.revindex0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = message.reasoning_content %}
        {%- if reasoning is not string and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.question and (loop.last or reasoning) %}
            {{- '<think>\\n' + (reasoning or '').strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n' if content or not loop.first else '') + tool_call(call) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
"""
    + XML_RESULT.replace("OPEN", "'<|im_start|>user'").replace("CLOSE", "'<|im_end|>\\n'")
    + """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('' if enable_thinking | default(true) else '<think>\\n\\n</think>\\n\\n') }}
{%- endif %}
"""
)


def qwen3(source: FormatterSource) -> TemplateFormatter:
    """Qwen 3."""
    return family(source, "qwen3", TEMPLATE, stops=("<|im_end|>",))
