"""ChatML: ``<|im_start|>role ... <|im_end|>``, with tools and reasoning like Hermes and Qwen."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages and messages[0].role == 'system' else messages %}
{%- if system or tools %}
    {{- '<|im_start|>system\\n' + system }}
    {%- if tools %}
        {{- ('\\n\\n' if system else '') + 'You may call these functions:\\n<tools>\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson + '\\n' }}
        {%- endfor %}
        {{- '</tools>\\nFor each call, write a JSON object with its name and arguments:\\n' }}
        {{- '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in turns %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '' if loop.first and not message.content else '\\n' }}
        {{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
        {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined %}
        {{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def chatml(source: FormatterSource) -> TemplateFormatter:
    """ChatML for a model without a template, or instead of the model's template."""
    return family(source, "chatml", TEMPLATE, stops=("<|im_end|>",))
