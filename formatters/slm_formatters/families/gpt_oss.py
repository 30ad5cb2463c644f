"""gpt-oss: the harmony format, with channels for reasoning, calls and answers, and tools as TypeScript.

Earlier reasoning is dropped, except reasoning before calls without a later answer.
"""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.template import TemplateFormatter

_TYPES = """\
{%- macro optional(name, required) %}{{ name }}{{ '?' if name not in (required or []) }}{{ ': ' }}{% endmacro %}
{%- macro list_of(spec) %}
    {%- set kinds = {'string': 'string', 'number': 'number', 'integer': 'number', 'boolean': 'boolean'} %}
    {%- if not spec %}
        {{- 'any' }}
    {%- elif spec.type is string and spec.type in kinds %}
        {{- kinds[spec.type] }}
    {%- else %}
        {%- set kind = typed(spec) %}
        {{- 'any' if kind == 'object | object' or kind | length > 50 else kind }}
    {%- endif %}
    {{- '[]' }}
{%- endmacro %}
{%- macro one_of(variants) %}
    {%- for variant in variants %}
        {{- typed(variant) }}{{ '// ' + variant.description if variant.description }}
        {{- '                    // default: ' + variant.default | tojson if variant.default is defined }}
        {{- ' | \\n' if not loop.last }}
    {%- endfor %}
{%- endmacro %}
{%- macro typed(spec) %}
    {%- set nullable = ' | null' if spec.nullable else '' %}
    {%- if spec.type == 'array' %}
        {{- list_of(spec['items']) + nullable }}
    {%- elif spec.type is sequence and spec.type is not string and spec.type %}
        {{- spec.type | join(' | ') }}
    {%- elif spec.oneOf %}
        {{- one_of(spec.oneOf) }}
    {%- elif spec.type == 'string' %}
        {{- '"' + spec.enum | join('" | "') + '"' if spec.enum else 'string' + nullable }}
    {%- elif spec.type in ('number', 'integer') %}
        {{- 'number' }}
    {%- elif spec.type == 'boolean' %}
        {{- 'boolean' }}
    {%- elif spec.type == 'object' and spec.properties %}
        {{- '{\\n' }}
        {%- for name, property in spec.properties.items() %}
            {{- optional(name, spec.required) + '\\n                ' + typed(property) + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- '}' }}
    {%- else %}
        {{- 'object' if spec.type == 'object' else 'any' }}
    {%- endif %}
{%- endmacro %}
{%- macro functions(tools) %}
    {{- '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
    {%- for tool in tools %}
        {%- set parameters = tool.function.parameters %}
        {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = ' }}
        {{- '(_: {\\n' if parameters.properties else '() => any;\\n\\n' }}
        {%- for name, spec in (parameters.properties or {}).items() %}
            {{- '// ' + spec.description + '\\n' if spec.description }}
            {{- optional(name, parameters.required) + typed(spec) }}
            {%- if spec.default is defined %}
                {{- ('' if spec.oneOf and not spec.enum else ', ') + '// default: ' }}
                {{- spec.default if spec.enum or spec.oneOf else spec.default | tojson }}
            {%- endif %}
            {{- ',\\n' }}
        {%- endfor %}
        {{- '}) => any;\\n\\n' if parameters.properties }}
    {%- endfor %}
    {{- '} // namespace functions' }}
{%- endmacro %}
"""
_BROWSER = """\
## browser

// Tool for browsing.
// The `cursor` appears in brackets before each browsing display: `[{cursor}]`.
// Cite information from the tool using the following format:
// `【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.
// Do not quote more than 10 words directly from the tool output.
// sources=web (default: web)
namespace browser {

// Searches for information related to `query` and displays `topn` results.
type search = (_: {
query: string,
topn?: number, // default: 10
source?: string,
}) => any;

// Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing `num_lines` lines.
// Valid link ids are displayed with the formatting: `【{id}†.*】`.
// If `cursor` is not provided, the most recent page is implied.
// If `id` is a string, it is treated as a fully qualified URL associated with `source`.
// If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on the most \
relevant passage, if available.
// Use this function without `id` to scroll to a new location of an opened page.
type open = (_: {
id?: number | string, // default: -1
cursor?: number, // default: -1
loc?: number, // default: -1
num_lines?: number, // default: -1
view_source?: boolean, // default: false
source?: string,
}) => any;

// Finds exact matches of `pattern` in the current page, or the page given by `cursor`.
type find = (_: {
pattern: string,
cursor?: number, // default: -1
}) => any;

} // namespace browser\
"""
_PYTHON = """\
## python

Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This tool should be \
used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when creating plots, \
tables, or files).

When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook environment. \
python will respond with the output of the execution or time out after 120.0 seconds. The drive at '/mnt/data' can be used \
to save and persist user files. Internet access for this session is UNKNOWN. Depends on the cluster.\
"""
_SYSTEM = """\
{{- '<|start|>system<|message|>' }}
{{- model_identity | default('You are ChatGPT, a large language model trained by OpenAI.') }}
{{- '\\nKnowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') }}
{{- '\\n\\nReasoning: ' + reasoning_effort | default('medium') + '\\n\\n' }}
{{- '# Tools\\n\\n' if builtin_tools }}
{%- if builtin_tools and 'browser' in builtin_tools -%}
BROWSER{{- '\\n\\n' }}
{%- endif %}
{%- if builtin_tools and 'python' in builtin_tools -%}
PYTHON{{- '\\n\\n' }}
{%- endif %}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." if tools }}
{{- '<|end|>' }}
{%- set instructions = messages[0].content if messages[0].role in ('developer', 'system') else '' %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\\n\\n' + instructions + '\\n\\n' if instructions }}
    {{- functions(tools) if tools }}
    {{- '<|end|>' }}
{%- endif %}
"""
_TURNS = """\
{%- macro said(channel, text, end='<|end|>') %}
    {{- '<|start|>assistant<|channel|>' + channel + '<|message|>' + text + end }}
{%- endmacro %}
{%- macro refuse_channels(text, name) %}
    {%- if '<|channel|>analysis<|message|>' in text or '<|channel|>final<|message|>' in text %}
        {{- raise_exception("You have passed a message containing <|channel|> tags in the " + name + " field. Instead of \\
doing this, you should pass analysis messages (the string between '<|message|>' and '<|end|>') in the 'thinking' field, and \\
final messages (the string between '<|message|>' and '<|end|>') in the 'content' field.") }}
    {%- endif %}
{%- endmacro %}
{%- set turns = messages[1:] if messages[0].role in ('developer', 'system') else messages %}
{%- set ns = namespace(called=none, answer=-1) %}
{%- for message in turns %}
    {%- set ns.answer = loop.index0 if message.role == 'assistant' and message.tool_calls is not defined else ns.answer %}
{%- endfor %}
{%- for message in turns %}
    {%- if message.role == 'assistant' %}
        {{- refuse_channels(message.content, 'content') if 'content' in message }}
        {{- refuse_channels(message.thinking, 'thinking') if 'thinking' in message }}
        {%- if message.tool_calls is defined %}
            {%- set call = message.tool_calls[0].function or message.tool_calls[0] %}
            {%- if message.content and message.thinking %}
                {{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls! Put the \\
analysis message in one or the other, but not both.') }}
            {%- endif %}
            {%- set thought = message.content or message.thinking %}
            {{- said('analysis', thought) if thought and loop.index0 > ns.answer }}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary ' }}
            {{- call.content_type | default('json') + '<|message|>' + call.arguments | tojson + '<|call|>' }}
            {%- set ns.called = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- said('analysis', message.thinking) if 'thinking' in message }}
            {{- said('final', message.content, '<|return|>') }}
        {%- else %}
            {{- said('final', message.content) }}
            {%- set ns.called = none %}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if ns.called is none %}
            {{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}
        {%- endif %}
        {{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
"""
TEMPLATE = _TYPES + _SYSTEM.replace("BROWSER", _BROWSER).replace("PYTHON", _PYTHON) + _TURNS


def gpt_oss(source: FormatterSource) -> TemplateFormatter:
    """OpenAI's gpt-oss."""
    return family(source, "gpt_oss", TEMPLATE, stops=("<|return|>", "<|call|>"))
