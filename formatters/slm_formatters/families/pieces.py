"""Pieces that templates of several families share."""

ALTERNATE = """\
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
"""
"""The start of a loop over messages, which refuses any other order of roles."""

SYSTEM_APART = """\
{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
"""
"""The text of a first system message, undefined without one, and the messages after it."""

XML_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '' }}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""The list of tools like in Hermes and Qwen."""

XML_CALL = """\
{%- macro tool_call(call) %}
    {%- set call = call.function or call %}
    {{- '<tool_call>\\n{"name": "' }}{{ call.name }}{{ '", "arguments": ' }}
    {{- call.arguments if call.arguments is string else call.arguments | tojson }}
    {{- '}\\n</tool_call>' }}
{%- endmacro %}
"""
"""A macro for a call like in Hermes and Qwen."""

XML_RESULT = """\
        {{- OPEN if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' }}{{ message.content }}{{ '\\n</tool_response>' }}
        {{- CLOSE if loop.last or loop.nextitem.role != 'tool' }}
"""
"""A tool's result like in Hermes and Qwen; consecutive results share one turn. Replace OPEN and CLOSE."""
