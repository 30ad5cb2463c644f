"""Cohere's Command R: a control token for each role."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import ALTERNATE, SYSTEM_APART
from slm_formatters.template import TemplateFormatter

TEMPLATE = (
    """\
{%- macro turn(role, content) %}
    {{- '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + content + '<|END_OF_TURN_TOKEN|>' }}
{%- endmacro %}
"""
    + SYSTEM_APART
    + """\
{{- bos_token }}
{{- turn('SYSTEM', system) if system is defined }}
{%- for message in turns %}
"""
    + ALTERNATE
    + """\
    {%- if message.role in ('user', 'assistant') %}
        {{- turn('USER' if message.role == 'user' else 'CHATBOT', message.content.strip()) }}
    {%- endif %}
{%- endfor %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' if add_generation_prompt }}
"""
)


def command_r(source: FormatterSource) -> TemplateFormatter:
    """Command R and Command R+, without tools."""
    return family(source, "command_r", TEMPLATE, stops=("<|END_OF_TURN_TOKEN|>",))
