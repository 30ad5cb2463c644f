"""Mistral: ``[INST] ... [/INST]``, in the versions of mistral-common.

v1 and v3 are for SentencePiece vocabularies, with spaces after control tokens; tekken (v3 for the Tekken vocabulary)
has no spaces. v7 has control tokens for the system message.
"""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import SYSTEM_APART
from slm_formatters.template import TemplateFormatter

_ORDER = "After the optional system message, conversation roles must alternate user/assistant/user/assistant/..."
_ROLES = "Only user and assistant roles are supported, with the exception of an initial optional system message!"

V1 = (
    SYSTEM_APART
    + """\
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('ORDER') }}
    {%- elif message.role == 'user' %}
        {%- set content = system + '\\n\\n' + message.content if loop.first and system is defined else message.content %}
        {{- ' [INST] ' + content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('ROLES') }}
    {%- endif %}
{%- endfor %}
""".replace("ORDER", _ORDER).replace("ROLES", _ROLES)
)

_WITH_TOOLS = (
    SYSTEM_APART
    + """\
{%- macro checked(id) %}
    {%- if not id is defined or id | length != 9 %}
        {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
    {%- endif %}
    {{- id }}
{%- endmacro %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in turns if message.role not in ('tool', 'tool_results') and not message.tool_calls is defined %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('ORDER') }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS]SPACE[' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' + ('"' + value + '"' if value is string else value | tojson) }}
                    {{- ', ' if not loop.last }}
                {%- endfor %}
                {{- '}}' + (', ' if not loop.last else ']') }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]SPACE' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS]SPACE[' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + checked(call.id) + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- SAID + eos_token }}
    {%- elif message.role in ('tool', 'tool_results') %}
        {%- set content = message.content.content if message.content.content is defined else message.content %}
        {{- '[TOOL_RESULTS]SPACE{"content": ' + content | string + ', "call_id": "' }}
        {{- checked(message.tool_call_id) + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('ROLES') }}
    {%- endif %}
{%- endfor %}
""".replace("ORDER", _ORDER).replace("ROLES", _ROLES)
)
V3 = _WITH_TOOLS.replace("SPACE", " ").replace("SAID", "' ' + message.content | trim")
TEKKEN = _WITH_TOOLS.replace("SPACE", "").replace("SAID", "message.content")

V7 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT] ' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""


def mistral_v1(source: FormatterSource) -> TemplateFormatter:
    """Mistral 7B Instruct v0.1 and v0.2, Mixtral 8x7B."""
    return family(source, "mistral_v1", V1)


def mistral_v3(source: FormatterSource) -> TemplateFormatter:
    """Mistral 7B Instruct v0.3, Mixtral 8x22B, Mistral Large 2407."""
    return family(source, "mistral_v3", V3)


def mistral_tekken(source: FormatterSource) -> TemplateFormatter:
    """Mistral Nemo 2407, Ministral 8B 2410."""
    return family(source, "mistral_tekken", TEKKEN)


def mistral_v7(source: FormatterSource) -> TemplateFormatter:
    """Mistral Large 2411."""
    return family(source, "mistral_v7", V7)
