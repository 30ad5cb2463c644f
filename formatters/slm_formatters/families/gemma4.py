"""Gemma 4: turns between ``<|turn>`` and ``<turn|>``, thoughts in a channel, tools declared without quotes."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

_VALUES = """\
{%- macro quoted(text) %}{{ '<|"|>' }}{{ text }}{{ '<|"|>' }}{% endmacro %}
{%- macro listed(items) %}
    {{- '[' }}{% for item in items %}{{ quoted(item) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
{%- endmacro %}
{%- macro value(given, quote_keys=true) %}
    {%- if given is string %}
        {{- quoted(given) }}
    {%- elif given is boolean %}
        {{- 'true' if given else 'false' }}
    {%- elif given is mapping %}
        {{- '{' + fields(given, quote_keys) + '}' }}
    {%- elif given is sequence %}
        {{- '[' }}
        {%- for item in given %}{{ value(item, quote_keys) }}{{ ',' if not loop.last }}{% endfor %}
        {{- ']' }}
    {%- else %}
        {{- given }}
    {%- endif %}
{%- endmacro %}
{%- macro fields(given, quote_keys=false) %}
    {%- for name, item in given | dictsort %}
        {{- quoted(name) if quote_keys else name }}{{ ':' + value(item, quote_keys) }}{{ ',' if not loop.last }}
    {%- endfor %}
{%- endmacro %}
"""
_DECLARATIONS = """\
{%- macro properties(specs) %}
    {%- for name, spec in specs | dictsort if name not in ('description', 'type', 'properties', 'required', 'nullable') %}
        {%- set kind = spec.type | upper %}
        {%- set said = ['description:' + quoted(spec.description)] if spec.description else [] %}
        {%- set said = said + ['nullable:true'] if spec.nullable else said %}
        {%- set said = said + ['enum:' + value(spec.enum)] if kind == 'STRING' and spec.enum else said %}
        {{- name }}{{ ':{' + said | join(',') }}
        {%- if kind == 'OBJECT' %}
            {{- ',properties:{' }}
            {{- properties(spec.properties if spec.properties is mapping else spec) + '}' }}
            {{- ',required:' + listed(spec.required) if spec.required }}
        {%- elif kind == 'ARRAY' and spec['items'] and spec['items'] is mapping %}
            {{- ',items:{' + items(spec['items']) + '}' }}
        {%- endif %}
        {{- ',' if said }}{{ 'type:' + quoted(kind) + '}' }}{{ ',' if not loop.last }}
    {%- endfor %}
{%- endmacro %}
{%- macro items(spec) %}
    {%- for name, item in spec | dictsort if item is not none %}
        {{- name + ':' }}
        {%- if name == 'properties' %}
            {{- '{' + (properties(item) if item is mapping else '') + '}' }}
        {%- elif name == 'required' %}
            {{- listed(item) }}
        {%- elif name == 'type' %}
            {{- value(item | upper if item is string else item | map('upper') | list) }}
        {%- else %}
            {{- value(item) }}
        {%- endif %}
        {{- ',' if not loop.last }}
    {%- endfor %}
{%- endmacro %}
{%- macro declaration(function) %}
    {%- set parameters, response = function.parameters, function.response %}
    {{- 'declaration:' }}{{ function.name }}{{ '{description:' + quoted(function.description) }}
    {%- if parameters %}
        {{- ',parameters:{' }}
        {{- 'properties:{' + properties(parameters.properties) + '},' if parameters.properties }}
        {{- 'required:' + listed(parameters.required) + ',' if parameters.required }}
        {{- 'type:' + quoted(parameters.type | upper) + '}' if parameters.type }}
    {%- endif %}
    {%- if response is defined %}
        {{- ',response:{' + ('description:' + quoted(response.description) + ',' if response.description else '') }}
        {{- 'type:' + quoted('OBJECT') + '}' if response.type | upper == 'OBJECT' }}
    {%- endif %}
    {{- '}' }}
{%- endmacro %}
"""
_TURNS = """\
{%- macro without_thoughts(text) %}
    {%- set kept %}{% for part in text.split('<channel|>') %}{{ part.split('<|channel>')[0] }}{% endfor %}{% endset %}
    {{- kept | trim }}
{%- endmacro %}
{{- bos_token }}
{%- set has_system = messages[0].role in ('system', 'developer') %}
{%- if has_system or enable_thinking or tools %}
    {{- '<|turn>system\\n' + ('<|think|>\\n' if enable_thinking else '') }}
    {{- messages[0].content | trim if has_system }}
    {%- for tool in tools or [] %}{{ '<|tool>' + declaration(tool.function) + '<tool|>' }}{% endfor %}
    {{- '<turn|>\\n' }}
{%- endif %}
{%- set turns = messages[1:] if has_system else messages %}
{%- set ns = namespace(question=-1, responded=false) %}
{%- for message in turns %}
    {%- set ns.question = loop.index0 if message.role == 'user' else ns.question %}
{%- endfor %}
{%- for message in turns %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<|turn>' + role + '\\n' if not (ns.responded and message.tool_calls) }}
    {%- set ns.responded = message.tool_responses and true %}
    {%- if message.tool_calls and message.reasoning_content and loop.index0 > ns.question %}
        {{- '<|channel>thought\\n' + message.reasoning_content + '<channel|>' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set arguments = call.function.arguments %}
        {{- '<|tool_call>call:' + call.function.name + '{' }}
        {{- fields(arguments) if arguments is mapping else arguments if arguments is string }}
        {{- '}<tool_call|>' }}
    {%- endfor %}
    {%- for result in message.tool_responses or [] %}
        {%- set told = fields(result.response) if result.response is mapping else 'value:' + value(result.response, false) %}
        {{- '<|tool_response>response:' + result.name | default('unknown') + '{' + told + '}<tool_response|>' }}
    {%- endfor %}
    {%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content or [] %}
    {%- for part in parts %}
        {%- if part.type == 'text' %}
            {{- without_thoughts(part.text) if role == 'model' else part.text | trim }}
        {%- elif part.type in ('image', 'audio', 'video') %}
            {{- '<|' + part.type + '|>' }}
            {%- set ns.responded = false %}
        {%- endif %}
    {%- endfor %}
    {{- '<turn|>\\n' if message.content or not message.tool_responses }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' if not ns.responded }}
    {{- '<|channel>thought\\n<channel|>' if not enable_thinking }}
{%- endif %}
"""
TEMPLATE = _VALUES + _DECLARATIONS + _TURNS


def gemma4(source: FormatterSource) -> TemplateFormatter:
    """Gemma 4."""
    return family(source, "gemma4", TEMPLATE, stops=("<turn|>",))
