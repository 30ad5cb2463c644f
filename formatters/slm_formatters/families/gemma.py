"""Gemma and Gemma 2: turns of user and model; no system message."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import ALTERNATE
from slm_formatters.template import TemplateFormatter

TEMPLATE = (
    """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
"""
    + ALTERNATE
    + """\
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}
"""
)


def gemma(source: FormatterSource) -> TemplateFormatter:
    """Gemma and Gemma 2."""
    return family(source, "gemma", TEMPLATE, stops=("<end_of_turn>",))
