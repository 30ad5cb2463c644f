"""Llama 2: ``[INST] ... [/INST]``, with the system message in the first block."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import ALTERNATE, SYSTEM_APART
from slm_formatters.template import TemplateFormatter

TEMPLATE = (
    SYSTEM_APART
    + """\
{%- for message in turns %}
"""
    + ALTERNATE
    + """\
    {%- set content = message.content %}
    {%- if loop.first and messages[0].role == 'system' %}
        {%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + content %}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
)


def llama2(source: FormatterSource) -> TemplateFormatter:
    """Llama 2; the system message is in the first turn."""
    return family(source, "llama2", TEMPLATE)
