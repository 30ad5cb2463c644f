"""RWKV World: ``User:`` and ``Assistant:``, with an empty line between turns; reasoning on request."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

TEMPLATE = """\
{%- set systems = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list %}
{{- bos_token }}
{{- 'System: ' + systems[-1] + '\\n\\n' if systems and systems[-1] }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'User: ' + message.content | trim + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant: ' + message.content.split('</think>')[-1] | trim + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
    {%- if enable_thinking is defined %}
        {{- ' <think>' if enable_thinking else ' <think>\\n</think>' }}
    {%- endif %}
{%- endif %}
"""


def rwkv_world(source: FormatterSource) -> TemplateFormatter:
    """RWKV World."""
    return family(source, "rwkv_world", TEMPLATE, stops=("\n\nUser:",))
