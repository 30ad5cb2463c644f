"""Phi 3 and Phi 3.5: ``<|role|>`` and ``<|end|>`` on separate lines."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') or (message.role == 'system' and message.content) %}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}
"""


def phi3(source: FormatterSource) -> TemplateFormatter:
    """Phi 3 and Phi 3.5."""
    return family(source, "phi3", TEMPLATE, stops=("<|end|>",))
