"""Zephyr: ``<|role|>``, a line break, the content and the end-of-sequence token."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') %}
        {{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
    {%- endif %}
    {{- '<|assistant|>\\n' if loop.last and add_generation_prompt }}
{%- endfor %}
"""


def zephyr(source: FormatterSource) -> TemplateFormatter:
    """Zephyr; also TinyLlama and StableLM 2 Zephyr."""
    return family(source, "zephyr", TEMPLATE, stops=("<|user|>",))
