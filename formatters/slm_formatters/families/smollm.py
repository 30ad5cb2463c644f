"""SmolLM 2: ChatML with a default system message."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

TEMPLATE = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""


def smollm(source: FormatterSource) -> TemplateFormatter:
    """SmolLM 2."""
    return family(source, "smollm", TEMPLATE, stops=("<|im_end|>",))
