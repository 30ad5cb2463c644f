"""Damaged and costly chat templates."""

from __future__ import annotations

import numpy as np

from slm_formatters.jinja_template import JinjaTemplate
from slm_formatters.limits import Limits

_SOUND = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m.content | trim | upper }}"
    "{% else %}none{% endfor %}",
    "{% macro turn(m) %}{{ m.content.split('</think>')[-1].strip() }}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}{% endfor %}{{ raise_exception('x') if ns.n > 9 }}",
)
_PIECES = (
    *(
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "(",
        ")",
        "[",
        "]",
        "|",
        "'",
        '"',
        "\\",
        "\0",
        "\ud800",
        "\n",
        "-",
        "~",
        "*",
        "**",
    ),
    *(
        " * 10**9 ",
        " ** 99999 ",
        "range(10**9)",
        "|tojson",
        "|string * 99999",
        ".format(1e308)",
        "|center(10**9)",
        "% 0",
    ),
    *(
        "loop",
        "self",
        "cycler",
        "namespace",
        "caller()",
        "super()",
        ".__class__",
        "['__globals__']",
        "|attr('__init__')",
    ),
    *(
        "{% for i in range(99999) %}",
        "{% endfor %}",
        "{% set x = messages * 9999 %}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ),
    *(
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "|indent(10**9)",
        "|batch(0)",
        "|slice(0)",
        "|round(400)",
        "[::0]",
    ),
    *("|sort(attribute='x.y')", "|groupby('z')", "|map('int')", "{% filter upper %}", "{% call f() %}", "{% break %}"),
)
_MESSAGES = [
    {"role": "system", "content": "Be brief. <|im_end|>"},
    {"role": "user", "content": "What is \ud83d\ude00?"},
    {"role": "assistant", "content": "<think>hm</think>An emoji.", "tool_calls": []},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def attack(rng: np.random.Generator) -> None:
    """Compile a damaged template and render it."""
    template = JinjaTemplate(_mutated(rng), Limits(seconds=1.0))
    template.render(_MESSAGES, tools=_TOOLS if rng.random() < 0.5 else None, tokens={"bos_token": "<s>"})


def _mutated(rng: np.random.Generator) -> str:
    text = _SOUND[rng.integers(len(_SOUND))]
    for _ in range(1 + int(rng.integers(3))):
        at, end = sorted(rng.integers(len(text) + 1, size=2).tolist())
        match int(rng.integers(6)):
            case 0 | 1 | 2:
                text = text[:at] + _PIECES[rng.integers(len(_PIECES))] + text[at:]
            case 3:
                text = text[:at] + text[min(end, at + 6) :]
            case 4:
                text = text[:end] + text[at:]
            case _:
                text = text[:at] + "([{"[rng.integers(3)] * int(rng.choice([2, 60, 5000])) + text[at:]
    return text
