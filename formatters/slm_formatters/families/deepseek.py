"""DeepSeek: V2 with plain text markers; V3.1 and distilled R1 with wide bars, tool calls and reasoning."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

V2 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'User: ' + message.content + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant: ' + message.content + eos_token }}
    {%- elif message.role == 'system' %}
        {{- message.content + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{{- 'Assistant:' if add_generation_prompt }}
"""

V3 = """\
{%- set thinking = thinking if thinking is defined else enable_thinking | default(false) %}
{%- set systems = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list %}
{%- set ns = namespace(after='') %}
{{- bos_token + systems | join('\\n\\n') }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
        {%- set ns.after = 'user' %}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.after = 'tool' %}
    {%- elif message.role == 'assistant' %}
        {%- if ns.after == 'user' %}
            {{- '<｜Assistant｜>' }}
            {{- '<think>' if message.prefix and thinking and not message.tool_calls else '<think></think>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {{- message.content or '' }}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
                {{- call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- else %}
            {%- set split = ns.after != 'tool' and '</think>' in message.content %}
            {{- message.content.split('</think>', 1)[1] if split else message.content }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
        {%- set ns.after = '' %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.after == 'user' %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '<think></think>') }}
{%- endif %}
"""

R1 = """\
{%- set systems = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list %}
{%- set ns = namespace(after_tool=false, called=false, answered=false) %}
{{- bos_token + (systems | last | default('')) }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
        {%- set ns.after_tool = false %}
    {%- elif message.role == 'tool' %}
        {{- '\\n' if ns.answered else '<｜tool▁outputs▁begin｜>' }}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.answered, ns.after_tool = true, true %}
    {%- elif message.role == 'assistant' %}
        {%- if message.tool_calls %}
            {%- set ns.after_tool = false %}
            {%- for call in message.tool_calls %}
                {{- '\\n' if ns.called else '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
                {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
                {{- '\\n```json\\n' + call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
                {%- set ns.called = true %}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
        {%- endif %}
        {%- if message.content is not none %}
            {%- set content = message.content if ns.after_tool else message.content.split('</think>')[-1] %}
            {{- ('<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>') + content + '<｜end▁of▁sentence｜>' }}
            {%- set ns.after_tool = false %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.after_tool %}
    {{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}
    {{- '<｜Assistant｜><think>\\n' + ('' if enable_thinking else '</think>') }}
{%- endif %}
"""


def deepseek_v2(source: FormatterSource) -> TemplateFormatter:
    """DeepSeek V2 and V2 Lite."""
    return family(source, "deepseek_v2", V2)


def deepseek_v3(source: FormatterSource) -> TemplateFormatter:
    """DeepSeek V3.1."""
    return family(source, "deepseek_v3", V3)


def deepseek_r1(source: FormatterSource) -> TemplateFormatter:
    """DeepSeek R1 distilled into other models; reasoning has to be turned on."""
    return family(source, "deepseek_r1", R1)
