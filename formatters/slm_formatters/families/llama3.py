"""Llama 3.1 to 3.3: headers, tools as JSON in the first user message."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

_HEADER = """\
{%- macro header(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- macro schemas(tools) %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- 'Do not use variables.\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{%- endmacro %}
"""
_SYSTEM = """\
{%- set tools = custom_tools if custom_tools is defined else tools %}
{%- set tools_in_user_message = tools_in_user_message | default(true) %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token + header('system') }}
{{- 'Environment: ipython\\n' if tools is not none or builtin_tools is defined }}
{%- if builtin_tools is defined %}
    {{- 'Tools: ' + builtin_tools | reject('equalto', 'code_interpreter') | join(', ') + '\\n\\n' }}
{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + DATE + '\\n\\n' }}
{%- if tools is not none and not tools_in_user_message %}
    {{- 'You have access to the following functions. To call a function, please respond with JSON for a function call.' }}
    {{- schemas(tools) }}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- if tools is not none and tools_in_user_message %}
    {%- if not turns %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- header('user') + 'Given the following functions, please respond with a JSON for a function call ' }}
    {{- 'with its proper arguments that best answers the given prompt.\\n\\n' + schemas(tools) }}
    {{- turns[0].content | trim + '<|eot_id|>' }}
    {%- set turns = turns[1:] %}
{%- endif %}
"""
_TURNS = """\
{%- for message in turns %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- header('assistant') }}
        {%- if builtin_tools is defined and call.name in builtin_tools %}
            {{- '<|python_tag|>' + call.name + '.call(' }}
            {%- for name, value in call.arguments | items %}{{ ', ' if not loop.first }}{{ name + '="' + value + '"' }}{% endfor %}
            {{- ')' }}
        {%- else %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {%- endif %}
        {{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- header('ipython') + (message.content | tojson if message.content is iterable else message.content) }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- header(message.role) + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{{- header('assistant') if add_generation_prompt }}
"""
TEMPLATE = _HEADER + _SYSTEM + _TURNS


def llama3(source: FormatterSource) -> TemplateFormatter:
    """Llama 3.2, with today's date in the prompt."""
    dated = TEMPLATE.replace("DATE", "(date_string if date_string is defined else strftime_now('%d %b %Y'))")
    return family(source, "llama3", dated, stops=("<|eot_id|>", "<|eom_id|>"))


def llama3_1(source: FormatterSource) -> TemplateFormatter:
    """Llama 3.1 and 3.3, with ``date_string`` in the prompt; the default is the date in their template."""
    dated = TEMPLATE.replace("DATE", "(date_string | default('26 Jul 2024'))")
    return family(source, "llama3_1", dated, stops=("<|eot_id|>", "<|eom_id|>"))
