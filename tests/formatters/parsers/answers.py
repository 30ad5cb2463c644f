"""Answers in the published formats of models, with the expected messages, written by hand."""

from __future__ import annotations

from slm_core.types import Message, ToolCall

from .helpers import answer

WEATHER = ToolCall("get_weather", {"city": "Paris"})
SUM = ToolCall("add", {"a": 1, "b": -2.5})
SEARCH = ToolCall("search", {"query": 'a <b> {c}\n"d" é', "limit": 3, "deep": True, "tags": ["x", "y"], "none": None})

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("get_weather", {"city": {"type": "string"}}),
        ("add", {"a": {"type": "integer"}, "b": {"type": "number"}}),
        (
            "search",
            {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "deep": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "tags": {"$ref": "#/$defs/tags"},
                "none": {"type": ["string", "null"]},
            },
        ),
    )
]
DEFINITIONS = {"tags": {"type": "array", "items": {"type": "string"}}}
TOOLS[2]["function"]["parameters"]["$defs"] = DEFINITIONS  # type: ignore[index]

WEATHER_JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
SUM_JSON = '{"name": "add", "arguments": {"a": 1, "b": -2.5}}'
SEARCH_ARGUMENTS = (
    '{"query": "a <b> {c}\\n\\"d\\" \\u00e9", "limit": 3, "deep": true, "tags": ["x", "y"], "none": null}'
)


def identified(call: ToolCall, identity: str) -> ToolCall:
    return ToolCall(call.name, call.arguments, identity)


ANSWERS: dict[str, list[tuple[str, Message]]] = {
    "none": [("<think>hm</think>Yes", answer("Yes", "hm"))],
    "json": [
        (WEATHER_JSON, answer("", None, WEATHER)),
        (f"[{WEATHER_JSON}, {SUM_JSON}]", answer("", None, WEATHER, SUM)),
        ('{"city": "Paris"}', answer('{"city": "Paris"}')),
        ('{"name": "unknown", "arguments": {}}', answer('{"name": "unknown", "arguments": {}}')),
        ('{"name": "get_weather"}', answer('{"name": "get_weather"}')),
        ("{", answer("{")),
    ],
    "pythonic": [
        ("[get_weather(city='Paris'), add(a=1, b=-2.5)]", answer("", None, WEATHER, SUM)),
        ("[1, 2] and more", answer("[1, 2] and more")),
        ("[see the docs](https://x.y)", answer("[see the docs](https://x.y)")),
    ],
    "hermes": [(f"<tool_call>\n{SUM_JSON}\n</tool_call>", answer("", None, SUM))],
    "granite": [(f"Sure.<tool_call>{SUM_JSON}</tool_call><|end_of_text|>", answer("Sure.", None, SUM))],
    "granite3": [
        (f"<|tool_call|>[{WEATHER_JSON}, {SUM_JSON}]<|end_of_text|>", answer("", None, WEATHER, SUM)),
        ("<think>hm</think><response>It is 3.</response>", answer("It is 3.", "hm")),
    ],
    "phi4": [(f"<|tool_call|>[{WEATHER_JSON}]<|/tool_call|><|end|>", answer("", None, WEATHER))],
    "nemotron": [(f"<think>\nhm\n</think>\n\n<TOOLCALL>[{SUM_JSON}]</TOOLCALL>", answer("", "hm", SUM))],
    "minimax": [(f"<tool_calls>\n{WEATHER_JSON}\n{SUM_JSON}\n</tool_calls>", answer("", None, WEATHER, SUM))],
    "command_r": [
        (
            "<|START_THINKING|>I will.<|END_THINKING|><|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
            '    {"tool_call_id": "1", "tool_name": "add", "parameters": {"a": 1, "b": -2.5}}\n'
            "]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
            answer("", "I will.", identified(WEATHER, "0"), identified(SUM, "1")),
        ),
        ("<|START_RESPONSE|>It rains.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", answer("It rains.")),
    ],
    "command_r_json": [
        (
            'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n'
            '        "parameters": {\n            "city": "Paris"\n        }\n    }\n]\n```',
            answer("", None, WEATHER),
        )
    ],
    "llama3": [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>', answer("", None, WEATHER)),
        ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": -2.5}}', answer("", None, SUM)),
        (
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
            '{"name": "add", "parameters": {"a": 1, "b": -2.5}}<|eom_id|>',
            answer("", None, WEATHER, SUM),
        ),
        (
            '<|python_tag|>brave_search.call(query="weather in Paris")<|eom_id|>',
            answer("", None, ToolCall("brave_search", {"query": "weather in Paris"})),
        ),
        (
            '<|python_tag|>import math\nprint(math.pi, {"a": 1})\n<|eom_id|>',
            answer("", None, ToolCall("python", {"code": 'import math\nprint(math.pi, {"a": 1})\n'})),
        ),
        ('{"a": 1}', answer('{"a": 1}')),
    ],
    "mistral": [
        (
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]</s>',
            answer("", None, identified(WEATHER, "VvvODy9mT")),
        ),
        (
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{"a": 1, "b": -2.5}</s>',
            answer("", None, WEATHER, SUM),
        ),
        (
            'Well.[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": -2.5}',
            answer("Well.", None, identified(SUM, "123456789")),
        ),
        ("[THINK]hm[/THINK]Yes", answer("Yes", "hm")),
    ],
    "qwen3_coder": [
        (
            'I look.\n\n<tool_call>\n<function=search>\n<parameter=query>\na <b> {c}\n"d" é\n</parameter>\n'
            "<parameter=limit>\n3\n</parameter>\n<parameter=deep>\nTrue\n</parameter>\n"
            "<parameter=tags>\n['x', 'y']\n</parameter>\n<parameter=none>\nnull\n</parameter>\n"
            "</function>\n</tool_call>",
            answer("I look.", None, SEARCH),
        ),
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n</parameter> in </function>\n</parameter>\n"
            "</function>\n</tool_call>",
            answer("", None, ToolCall("get_weather", {"city": "</parameter> in </function>"})),
        ),
    ],
    "glm": [
        (
            "<think>hm</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>-2.5</arg_value>\n</tool_call>",
            answer("", "hm", SUM),
        )
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
            '{"a": 1, "b": -2.5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
            answer("", None, WEATHER, SUM),
        )
    ],
    "deepseek_v3_1": [
        (
            "One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            answer("One moment.", None, WEATHER),
        )
    ],
    "deepseek_v4": [
        (
            'Let me.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="search">\n'
            '<｜DSML｜parameter name="query" string="true">a <b> {c}\n"d" é</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="limit" string="false">3</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="deep" string="false">true</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="tags" string="false">["x", "y"]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="none" string="false">null</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            answer("Let me.", None, SEARCH),
        )
    ],
    "kimi": [
        (
            "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>'
            '{"a": 1, "b": -2.5}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
            answer("Yes.", None, identified(WEATHER, "functions.get_weather:0"), identified(SUM, "functions.add:1")),
        )
    ],
    "minimax_m2": [
        (
            '<think>hm</think>\n\n<minimax:tool_call>\n<invoke name="search">\n'
            '<parameter name="query">a <b> {c}\n"d" é</parameter>\n<parameter name="limit">3</parameter>\n'
            '<parameter name="deep">true</parameter>\n<parameter name="tags">["x", "y"]</parameter>\n'
            '<parameter name="none">null</parameter>\n</invoke>\n</minimax:tool_call>',
            answer("", "hm", SEARCH),
        )
    ],
    "functionary": [
        (
            '<function=get_weather>{"city": "Paris"}</function><function=add>{"a": 1, "b": -2.5}</function><|eom_id|>',
            answer("", None, WEATHER, SUM),
        )
    ],
    "functionary_v3_2": [
        (
            'all\nIt depends.>>>get_weather\n{"city": "Paris"}>>>add\n{"a": 1, "b": -2.5}<|eot_id|>',
            answer("It depends.", None, WEATHER, SUM),
        ),
        ("python\nprint(1)", answer("", None, ToolCall("python", {"code": "print(1)"}))),
    ],
    "gemma": [
        ('Okay.\n```tool_code\nget_weather(city="Paris")\n```<end_of_turn>', answer("Okay.", None, WEATHER)),
        ("```tool_code\nprint(add(a=1, b=-2.5))\n```", answer("", None, SUM)),
        ("```tool_code\nadd(a=1, b=-2.5)\nget_weather(city='Paris')\n```", answer("", None, SUM, WEATHER)),
    ],
    "gemma4": [
        (
            '<|channel>thought\nhm\n<channel|><|tool_call>call:search{query:<|"|>a <b> {c}\n"d" é<|"|>,limit:3,'
            'deep:true,tags:[<|"|>x<|"|>,<|"|>y<|"|>],none:null}<tool_call|><turn|>',
            answer("", "hm", SEARCH),
        )
    ],
    "lfm2": [
        (
            "<|tool_call_start|>[search(query='a <b> {c}\\n\"d\" \\u00e9', limit=3, deep=True, tags=[\"x\", 'y'], "
            "none=None), add(a=1, b=-2.5)]<|tool_call_end|>Checking.",
            answer("Checking.", None, SEARCH, SUM),
        )
    ],
    "apertus": [
        (
            "<|inner_prefix|>hm<|inner_suffix|><|tools_prefix|>"
            '[{"get_weather": {"city": "Paris"}}, {"add": {"a": 1, "b": -2.5}}]<|tools_suffix|>',
            answer("", "hm", WEATHER, SUM),
        )
    ],
    "minimax_m3": [
        (
            '<mm:think>hm</mm:think>]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="search">'
            ']<]minimax[>[<query>a <b> {c}\n"d" é]<]minimax[>[</query>]<]minimax[>[<limit>3]<]minimax[>[</limit>'
            "]<]minimax[>[<deep>true]<]minimax[>[</deep>]<]minimax[>[<tags>]<]minimax[>[<item>x]<]minimax[>[</item>"
            "]<]minimax[>[<item>y]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[<none>null]<]minimax[>[</none>"
            "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
            answer("", "hm", SEARCH),
        )
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>User asks.<|end|><|start|>assistant<|channel|>final<|message|>4.<|return|>",
            answer("4.", "User asks."),
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
            '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
            answer("", "hm", WEATHER),
        ),
        (
            " to=functions.add<|channel|>commentary json<|message|>" + '{"a": 1, "b": -2.5}<|call|>',
            answer("", None, SUM),
        ),
        (
            "<|channel|>commentary<|message|>First this.<|end|><|start|>assistant to=python<|channel|>analysis"
            "<|message|>print(1)<|call|>",
            answer("First this.", None, ToolCall("python", {"code": "print(1)"})),
        ),
        ("Plain words.", answer("Plain words.")),
    ],
}
