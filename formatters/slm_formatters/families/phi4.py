"""Phi 4: ChatML with ``<|im_sep|>`` after the role, and no text between turns."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant<|im_sep|>' if add_generation_prompt }}
"""


def phi4(source: FormatterSource) -> TemplateFormatter:
    """Phi 4."""
    return family(source, "phi4", TEMPLATE, stops=("<|im_end|>",))
