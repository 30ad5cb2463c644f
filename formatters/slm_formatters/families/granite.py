"""IBM Granite: roles between control tokens; 3.x lists tools in a separate turn, 4.0 like Hermes and Qwen."""

from __future__ import annotations

from slm_core.plugins import FormatterSource
from slm_formatters.families import family
from slm_formatters.families.pieces import SYSTEM_APART, XML_CALL, XML_RESULT
from slm_formatters.template import TemplateFormatter

_TOOLS = (
    "You are a helpful assistant with access to the following tools. When a tool is required to answer the user's query,"
    " respond only with <|tool_call|> followed by a JSON list of tools used. If a tool does not exist in the provided list"
    " of tools, notify the user that you do not have the ability to fulfill the request."
)
_FACTS = (
    "Write the response to the user's input by strictly aligning with the facts in the provided documents. If the"
    " information needed to answer the question is not available in the documents, inform the user that the question"
    " cannot be answered based on the available data."
)
_THOUGHTS = (
    "Respond to every user query in a comprehensive and detailed way. You can write down"
    " your thoughts and reasoning process before responding. In the thought process, engage in a comprehensive cycle of"
    " analysis, summarization, exploration, reassessment, reflection, backtracing, and iteration to develop"
    " well-considered thinking process. In the response section, based on various attempts, explorations, and reflections"
    " from the thoughts section, systematically present the final solution that you deem correct. The response should"
    " summarize the thought process. Write your thoughts between <think></think> and write your response between"
    " <response></response> for each user query."
)
_CITATIONS = (
    "Use the symbols <|start_of_cite|> and <|end_of_cite|> to indicate when a fact comes from a document in the search"
    " result, e.g <|start_of_cite|> {document_id: 1}my fact <|end_of_cite|> for a fact from document 1. Afterwards, list"
    " all the citations with their corresponding documents in an ordered list."
)
_RISKS = (
    "Finally, after the response is written, include a numbered list of sentences from the response with a"
    " corresponding risk value that are hallucinated and not based in the documents."
)

_TOLD_NOTHING = "You are a helpful assistant. Please ensure responses are professional, accurate, and safe."
_TOLD_OF_TOOLS = (
    "You are a helpful assistant with access to the following tools. You may call one or more tools to assist with the"
    " user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:"
)
_TOLD_TO_CALL = (
    "For each tool call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:"
    '\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>. If a tool does not exist'
    " in the provided list of tools, notify the user that you do not have the ability to fulfill the request."
)
_TOLD_OF_DOCUMENTS = (
    "You are a helpful assistant with access to the following documents. You may use one or more documents to assist with"
    " the user query.\\n\\nYou are given a list of documents within <documents></documents> XML tags:"
)

V3 = (
    """\
{%- macro turn(role, content) %}
    {{- '<|start_of_role|>' + role + '<|end_of_role|>' + content + '<|end_of_text|>\\n' }}
{%- endmacro %}
"""
    + SYSTEM_APART
    + """\
{%- set tools = available_tools or tools %}
{%- if messages[0].role != 'system' %}
    {%- set system %}
        {{- "Knowledge Cutoff Date: April 2024. Today's Date: " + strftime_now('%B %d, %Y') }}
        {{- '. You are Granite, developed by IBM.' }}
        {{- " TOOLS" if tools }}
        {{- " FACTS" if documents }}
        {%- if not tools and not documents %}
            {{- ' You are a helpful AI assistant.' + ('\\nTHOUGHTS' if thinking else '') }}
        {%- endif %}
        {{- '\\nCITATIONS' if 'citations' in controls and documents }}
        {{- '\\nRISKS' if 'hallucinations' in controls and documents }}
    {%- endset %}
{%- endif %}
{{- turn('system', system) }}
{{- turn('available_tools', tools | tojson(indent=4)) if tools }}
{%- for document in documents or [] %}
    {{- turn('document {"document_id": "' + document.doc_id | string + '"}', '\\n' + document.text) }}
{%- endfor %}
{%- for message in turns %}
    {{- turn(message.role, message.content) }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' + (' ' + controls | tojson if controls else '') + '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
""".replace("TOOLS", _TOOLS)
    .replace("FACTS", _FACTS)
    .replace("THOUGHTS", _THOUGHTS)
    .replace("CITATIONS", _CITATIONS)
    .replace("RISKS", _RISKS)
)

V4 = (
    XML_CALL
    + """\
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable %}
        {{- content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\\n') }}
    {%- endif %}
{%- endmacro %}
{%- macro listed(kind, items) %}
    {{- '\\n<' + kind + '>' }}
    {%- for item in items %}{{ '\\n' + item | tojson }}{% endfor %}
    {{- '\\n</' + kind + '>\\n\\n' }}
{%- endmacro %}
{%- set parts = [text(messages[0].content)] if messages[0].role == 'system' else [] %}
{%- set tools = available_tools or tools %}
{%- if tools %}
    {%- set parts = parts + ['TOLD_OF_TOOLS' + listed('tools', tools) + 'TOLD_TO_CALL'] %}
{%- endif %}
{%- if documents %}
    {%- set parts = parts + ['TOLD_OF_DOCUMENTS' + listed('documents', documents) + "FACTS"] %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + (parts | join('\\n\\n') or 'TOLD_NOTHING') + '<|end_of_text|>\\n' }}
{%- for message in messages %}
    {%- set content = text(message.content) %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content + '<|end_of_text|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n' if content or not loop.first else '') + tool_call(call) }}
        {%- endfor %}
        {{- '<|end_of_text|>\\n' }}
    {%- elif message.role == 'tool' %}
""".replace("TOLD_OF_TOOLS", _TOLD_OF_TOOLS)
    .replace("TOLD_TO_CALL", _TOLD_TO_CALL)
    .replace("TOLD_OF_DOCUMENTS", _TOLD_OF_DOCUMENTS)
    .replace("TOLD_NOTHING", _TOLD_NOTHING)
    .replace("FACTS", _FACTS)
    + XML_RESULT.replace("OPEN", "'<|start_of_role|>user<|end_of_role|>'")
    .replace("CLOSE", "'<|end_of_text|>\\n'")
    .replace("message.content", "content")
    + """\
    {%- endif %}
{%- endfor %}
{{- '<|start_of_role|>assistant<|end_of_role|>' if add_generation_prompt }}
"""
)


def granite(source: FormatterSource) -> TemplateFormatter:
    """Granite 3.2 and 3.3."""
    return family(source, "granite", V3, stops=("<|end_of_text|>",))


def granite4(source: FormatterSource) -> TemplateFormatter:
    """Granite 4.0."""
    return family(source, "granite4", V4, stops=("<|end_of_text|>",))
