"""Vicuna 1.1 and 1.5, as FastChat writes it: ``USER:`` and ``ASSISTANT:`` in running text."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import SYSTEM_APART
from slm_formatters.template import TemplateFormatter

TEMPLATE = (
    SYSTEM_APART
    + """\
{{- bos_token }}
{{- system if messages[0].role == 'system' else "A chat between a curious user and an artificial intelligence assistant. The \
assistant gives helpful, detailed, and polite answers to the user's questions." }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- (' ' if loop.first else '') + 'USER: ' + message.content + ' ' }}
    {%- elif message.role == 'assistant' %}
        {{- 'ASSISTANT: ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
{{- 'ASSISTANT:' if add_generation_prompt }}
"""
)


def vicuna(source: FormatterSource) -> TemplateFormatter:
    """Vicuna 1.1 and 1.5."""
    return family(source, "vicuna", TEMPLATE, stops=("USER:",))
