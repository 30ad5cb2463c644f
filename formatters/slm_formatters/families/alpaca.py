"""Alpaca: headings ``### Instruction:`` and ``### Response:``."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import SYSTEM_APART
from slm_formatters.template import TemplateFormatter

TEMPLATE = (
    SYSTEM_APART
    + """\
{{- bos_token }}
{{- system if messages[0].role == 'system' else 'Below is an instruction that describes a task. Write a response that \
appropriately completes the request.' }}
{{- '\\n\\n' }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- '### Instruction:\\n' + message.content + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '### Response:\\n' + message.content + eos_token + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{{- '### Response:\\n' if add_generation_prompt }}
"""
)


def alpaca(source: FormatterSource) -> TemplateFormatter:
    """Alpaca."""
    return family(source, "alpaca", TEMPLATE, stops=("### Instruction:",))
