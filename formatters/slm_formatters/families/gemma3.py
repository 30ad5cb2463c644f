"""Gemma 3: the system message is at the start of the first user message; images."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import ALTERNATE, SYSTEM_APART
from slm_formatters.template import TemplateFormatter

TEMPLATE = (
    SYSTEM_APART
    + """\
{{- bos_token }}
{%- set system = (system if system is string else system[0].text) + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in turns %}
"""
    + ALTERNATE
    + """\
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- system if loop.first }}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- elif message.content is iterable %}
        {%- for part in message.content %}
            {{- '<start_of_image>' if part.type == 'image' else part.text | trim if part.type == 'text' }}
        {%- endfor %}
    {%- else %}
        {{- raise_exception('Invalid content type') }}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}
"""
)


def gemma3(source: FormatterSource) -> TemplateFormatter:
    """Gemma 3 and Gemma 3n."""
    return family(source, "gemma3", TEMPLATE, stops=("<end_of_turn>",))
